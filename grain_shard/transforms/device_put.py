"""`DevicePut`: the end of the chain. Global arrays on the devices, some of them ahead of time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import grain
import jax

from grain_shard.errors import ShardingError, require_int
from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.feeding.host_feeds import HostFeeds, check_feeds
from grain_shard.host_arrays import owned
from grain_shard.iteration.host_batches import HostBatches, RandomAccess, Stream
from grain_shard.iteration.iterator import AcrossHosts, ShardedIterator
from grain_shard.reading.fingerprint import Fingerprint, fingerprint
from grain_shard.reading.pad_batch import Remainder
from grain_shard.sharding.assemble import Assembler
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.reshard import Resharder
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.transforms.shard_batch import ShardBatchIterDataset, ShardBatchMapDataset
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
        num_threads: Threads that each make a batch (`MapDataset`; None chooses by the machine), or
            that run feeds side by side (`FeedBatches`; None for one).
        num_workers: Grain worker processes that make the batches, if not 0. `MapDataset` only.
        fingerprint: What a saved state must agree with; by default that of the dataset.
        final_shardings: If not None, the shardings to which the devices move each batch as it is
            handed out; `shardings` are then those by which it is read.
        rows: What a stream yields on several hosts: "global" batches, the same on each, or the
            "local" rows of each.
        remainder: Whether a stream that ends before those of other hosts, or a feed that ends
            before others, goes on with padding ("pad") or ends them all.
        mask_key: The key of the mask, or None for no mask (`FeedBatches`; other batches come with
            theirs).
        timeout_s: How long one host waits for another, in seconds.
    """

    shardings: ShardingTree
    cpu_buffer_size: int = 4
    device_buffer_size: int = 2
    num_threads: int | None = None
    num_workers: int = 0
    fingerprint: Fingerprint | None = None
    final_shardings: ShardingTree | None = None
    rows: Literal["global", "local"] = "global"
    remainder: Remainder = "pad"
    mask_key: str | None = "valid_mask"
    timeout_s: float = 60.0

    def __post_init__(self):
        require_int("cpu_buffer_size", self.cpu_buffer_size, 1)
        require_int("device_buffer_size", self.device_buffer_size, 1)
        require_int("num_workers", self.num_workers, 0)
        if self.num_threads is not None:
            require_int("num_threads", self.num_threads, 1)
        if not isinstance(self.timeout_s, int | float) or not self.timeout_s > 0:
            raise ShardingError(
                f"timeout_s={self.timeout_s!r} is not a positive number of seconds.",
                remedy="pass how long one host may wait for another.",
            )

        if not isinstance(self.shardings, ShardingTree):
            raise ShardingError(
                f"cannot place batches by a {type(self.shardings).__name__}.",
                remedy="pass ShardingTree.of(mesh, spec).",
            )

    def __call__(self, ds: grain.MapDataset | grain.IterDataset) -> DevicePutIterDataset:
        """The dataset of global batches."""
        return DevicePutIterDataset(ds, self)


class DevicePutIterDataset(grain.IterDataset):
    """Global batches on the devices."""

    def __init__(self, parent: grain.MapDataset | grain.IterDataset, put: DevicePut):
        super().__init__(parent)
        self._put = put
        self._layout = put.shardings.layout()
        self._yields_own_rows = put.rows == "local" or isinstance(parent, FeedBatches)
        if isinstance(parent, FeedBatches):
            check_feeds(parent, put.shardings.shardings(), put.remainder)
            _ = parent.fingerprint  # makes feed 0: an error in make_feed is found here

    @property
    def settings(self) -> DevicePut:
        """The transformation that made this dataset."""
        return self._put

    def __len__(self) -> int:
        """The number of batches.

        Raises:
            TypeError: Only the end of the stream tells it.
        """
        batches = self.num_batches()
        if batches is None:
            raise TypeError("the number of batches of a stream is not known")
        return batches

    def num_batches(self) -> int | None:
        """The number of batches; None if only the end of the stream tells it."""
        return self._host_batches().num_batches()

    def __bool__(self) -> bool:
        return True  # not by len(), which a stream does not have

    def __iter__(self) -> ShardedIterator:
        put = self._put
        return ShardedIterator(
            self._host_batches(),
            self.assembler(),
            device_buffer_size=put.device_buffer_size,
            reshard=put.final_shardings and Resharder(put.final_shardings),
            across=self._across_hosts(),
        )

    def assembler(self) -> Assembler:
        """What makes this host's batches global."""
        put = self._put
        return Assembler(put.shardings, self._layout, digests=self._yields_own_rows)

    def abstract_batch(self) -> Batch:
        """What every batch looks like, without one: `jax.ShapeDtypeStruct`s with their shardings.

        This host's rows of the first batch are read for it, in the calling thread, and no other
        host is asked. Good for compiling a step ahead of time: ``jax.jit(step).lower(state,
        ds.abstract_batch())``.

        Returns:
            The tree of a batch; text is that of this host's rows.

        Raises:
            ShardingError: The batch does not fit its shardings, or the stream has none.
        """
        batch = self.assembler().abstract(self._host_batches().first())
        final = self._put.final_shardings
        if final is None:
            return batch
        leaves, structure = jax.tree.flatten(batch)
        return structure.unflatten(
            [
                leaf
                if sharding is None
                else jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
                for leaf, sharding in zip(leaves, final.match(batch), strict=True)
            ]
        )

    @property
    def layout(self) -> BatchLayout:
        """The rows that this host reads."""
        return self._layout

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
        raise ShardingError(
            "a dataset that places batches cannot be copied or sent to another process, since it"
            " refers to devices.",
            mesh_axes=self._put.shardings.mesh_axes,
            remedy="copy what stands before .shard_to; for workers, pass it num_workers.",
        )

    def _refuse_workers(self) -> NoReturn:
        raise ShardingError(
            "worker processes come before placement, since they must not hold a device.",
            mesh_axes=self._put.shardings.mesh_axes,
            remedy="pass num_workers to .shard_to instead of calling .mp_prefetch after it.",
        )

    def _host_batches(self) -> HostBatches:
        put, (parent,) = self._put, self.parents
        # These two and feeds make arrays that nobody else has.
        fresh = isinstance(parent, ShardBatchMapDataset | ShardBatchIterDataset)
        if isinstance(parent, grain.MapDataset):
            return RandomAccess(
                parent if fresh else parent.map(owned),
                put.fingerprint or fingerprint(parent, remainder="pad"),
                buffer_size=put.cpu_buffer_size,
                num_threads=put.num_threads,
                num_workers=put.num_workers,
            )
        if isinstance(parent, FeedBatches):
            return HostFeeds(
                parent,
                self._layout,
                remainder=put.remainder,
                mask_key=put.mask_key,
                buffer_size=put.cpu_buffer_size,
                num_threads=put.num_threads,
            )
        return Stream(parent if fresh else parent.map(owned), buffer_size=put.cpu_buffer_size)

    def _across_hosts(self) -> AcrossHosts | None:
        put, layout, (parent,) = self._put, self._layout, self.parents
        if layout.num_hosts == 1:
            return None
        feeds = isinstance(parent, FeedBatches)
        fields = {
            **(parent.fingerprint if feeds else put.fingerprint or {}),
            "rows": "feeds" if feeds else put.rows,
            "remainder": put.remainder,
            "read": "needed" if put.final_shardings is None else "once",
            **(put.final_shardings or put.shardings).describe(),
        }
        return AcrossHosts(
            hosts=put.shardings.hosts(),
            timeout_s=put.timeout_s,
            fields=fields,
            own_rows=layout.shards if self._yields_own_rows else None,
            remainder=put.remainder,
        )
