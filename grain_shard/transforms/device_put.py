"""`DevicePut`: the end of the chain. Global arrays on the devices, some of them ahead of time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any, NoReturn

import grain

from grain_shard.assemble import Assembler
from grain_shard.errors import ShardingError, require_int
from grain_shard.fingerprint import Fingerprint, fingerprint
from grain_shard.host_batches import HostBatches, Position, RandomAccess, Stream
from grain_shard.prefetch import Background
from grain_shard.shardings import ShardingTree
from grain_shard.state_files import read_state, write_state
from grain_shard.transforms.shard_batch import ShardBatchMapDataset
from grain_shard.trees import Batch


@dataclass(frozen=True)
class DevicePut:
    """Places this host's rows on its devices, as shards of global arrays, ahead of their use.

    Two stages run in the background: one makes batches on the host, one places them. Over a
    `MapDataset` the first reads batches side by side, in threads or in worker processes.

    Example:
        >>> import grain, jax
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> ds = grain.MapDataset.range(4).map(lambda i: {"x": i}).batch(2)
        >>> for batch in ds.pipe(DevicePut(ShardingTree.of(mesh))):
        ...     print(batch["x"])
        [0 1]
        [2 3]

    Attributes:
        shardings: Of every leaf of the batch.
        cpu_buffer_size: Batches that may wait on the host or be in the making there.
        device_buffer_size: Batches that may wait on the devices or be on their way there.
        num_threads: Threads that each make a batch; None chooses by the machine. `MapDataset` only.
        num_workers: Grain worker processes that make the batches, if not 0. `MapDataset` only.
        fingerprint: What a saved state must agree with; by default that of the dataset.
    """

    shardings: ShardingTree
    cpu_buffer_size: int = 4
    device_buffer_size: int = 2
    num_threads: int | None = None
    num_workers: int = 0
    fingerprint: Fingerprint | None = None

    def __post_init__(self):
        require_int("cpu_buffer_size", self.cpu_buffer_size, 1)
        require_int("device_buffer_size", self.device_buffer_size, 1)
        require_int("num_workers", self.num_workers, 0)
        if self.num_threads is not None:
            require_int("num_threads", self.num_threads, 1)

    def __call__(self, ds: grain.MapDataset | grain.IterDataset) -> DevicePutIterDataset:
        """The dataset of global batches."""
        return DevicePutIterDataset(ds, self)


class DevicePutIterDataset(grain.IterDataset):
    """Global batches on the devices."""

    def __init__(self, parent: grain.MapDataset | grain.IterDataset, put: DevicePut):
        super().__init__(parent)
        self._put = put
        self._layout = put.shardings.layout()
        # Fresh arrays come from ShardBatch alone, and only if no other process made them.
        self._copies = put.num_workers > 0 or not isinstance(parent, ShardBatchMapDataset)

    def __len__(self) -> int:
        """The number of batches.

        Raises:
            TypeError: Only the end of the stream tells it.
        """
        batches = self._host_batches().num_batches()
        if batches is None:
            raise TypeError("the number of batches of a stream is not known")
        return batches

    def __bool__(self) -> bool:
        return True  # not by len(), which a stream does not have

    def __iter__(self) -> DevicePutIterator:
        return DevicePutIterator(
            self._host_batches(),
            Assembler(self._put.shardings, self._layout, copies=self._copies),
            self._put.device_buffer_size,
        )

    def __str__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self._put.shardings.mesh_axes)
        return f"DevicePut(mesh=({axes}), device_buffer_size={self._put.device_buffer_size})"

    def mp_prefetch(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused: workers come before placement."""
        self._refuse_workers()

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> NoReturn:
        """Refused; Grain calls it to divide a dataset among its workers."""
        self._refuse_workers()

    def __reduce__(self) -> NoReturn:
        self._refuse_workers()

    def _refuse_workers(self) -> NoReturn:
        raise ShardingError(
            "worker processes come before placement, since they must not hold a device.",
            mesh_axes=self._put.shardings.mesh_axes,
            remedy="pass num_workers to .shard_to instead of calling .mp_prefetch after it.",
        )

    def _host_batches(self) -> HostBatches:
        put, (parent,) = self._put, self.parents
        if isinstance(parent, grain.MapDataset):
            return RandomAccess(
                parent,
                put.fingerprint or fingerprint(parent, remainder="pad"),
                buffer_size=put.cpu_buffer_size,
                num_threads=put.num_threads,
                num_workers=put.num_workers,
            )
        return Stream(parent, buffer_size=put.cpu_buffer_size)


class DevicePutIterator(grain.DatasetIterator[Batch]):
    """Hands out global batches. A context manager; its state is that of the last batch handed out.

    After the end ``next`` keeps raising StopIteration; after an error, that error.
    """

    def __init__(self, host: HostBatches, assembler: Assembler, device_buffer_size: int):
        super().__init__()
        self._host, self._assembler = host, assembler
        self._device_buffer_size = device_buffer_size
        self._open(None)

    def _open(self, position: Position | None) -> None:
        self._position, batches = self._host.open(position)
        assembler = self._assembler  # threads must not refer to self, or it is never collected
        self._stage: Background[Any, tuple[Batch, Position]] = Background(
            lambda ticket: (assembler(ticket[0]), ticket[1]),
            batches,
            buffer_size=self._device_buffer_size,
            name="grain-shard-device",
        )

    def __next__(self) -> Batch:
        self._assert_not_closed()
        try:
            batch, self._position = next(self._stage)
        except ShardingError as error:
            # What stands before placement knows no mesh, and may run where there is none.
            raise error.with_mesh(self._assembler.mesh_axes)  # noqa: B904 (it is the same error)
        return batch

    def get_state(self) -> dict[str, Any]:
        """The position after the last batch that ``next`` returned, as plain JSON."""
        return self._host.to_state(self._position)

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes on from a saved position, in an iterator that is new or in use.

        Raises:
            StateError: The state was saved by another pipeline; the message names what changed.
        """
        self._assert_not_closed()
        position = self._host.from_state(state)
        self._stage.close()
        self._open(position)

    async def save(self, directory: Any) -> Awaitable[None]:
        """Orbax's v1 API: writes the state while the loop goes on."""
        state = self.get_state()

        async def write() -> None:
            await asyncio.to_thread(write_state, await directory.await_creation(), state)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Orbax's v1 API: restores what `save` wrote."""

        async def read() -> None:
            self.set_state(await asyncio.to_thread(read_state, directory))

        return read()

    def start_prefetch(self) -> None:
        """Starts working ahead before the first ``next``."""
        self._assert_not_closed()
        self._stage.start()

    def close(self) -> None:
        """Stops the background threads and waits for them; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._stage.close()

    def __enter__(self) -> DevicePutIterator:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __del__(self):
        if (stage := getattr(self, "_stage", None)) is not None:
            stage.stop()  # without waiting: the garbage collector runs anywhere
