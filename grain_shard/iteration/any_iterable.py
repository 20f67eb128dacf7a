"""Batches from whatever Python can iterate over, placed ahead, with a state if they have one."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain

from grain_shard.errors import ShardingError, StateError, require_int
from grain_shard.host_arrays import owned
from grain_shard.hosts.state_files import KIND
from grain_shard.iteration.host_batches import Opened, RandomAccess, Stream
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.reading.fingerprint import fingerprint
from grain_shard.reading.row_dataset import BatchMapDataset, MadeBatch, Piece
from grain_shard.reading.stream_dataset import StreamDataset
from grain_shard.sharding.place import place_tree, require_local
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.trees import Batch


def prefetch(
    source: Iterable[Batch],
    target: ShardingTree,
    *,
    device_buffer_size: int,
    cpu_buffer_size: int,
) -> ShardedIterator:
    """Iterates over whole batches that were placed ahead of time.

    Args:
        source: A Grain dataset, or any other iterable of batches; see `AnyIterable`.
        target: Where the leaves go.
        device_buffer_size: Batches that may wait on the devices or be on their way there.
        cpu_buffer_size: Batches that may wait on the host or be in the making there.

    Raises:
        ShardingError: A buffer size is no positive integer, or this process has no device in a
            sharding.
    """
    require_int("device_buffer_size", device_buffer_size, 1)
    require_int("cpu_buffer_size", cpu_buffer_size, 1)
    require_local(target)
    if isinstance(source, grain.MapDataset):
        host_batches = RandomAccess(
            _CopiedBatches(source),
            fingerprint(source),
            buffer_size=cpu_buffer_size,
            num_threads=None,
            num_workers=0,
        )
    elif isinstance(source, grain.IterDataset):
        stream = StreamDataset(source, global_batch_size=None).with_own_arrays()
        host_batches = Stream(stream, buffer_size=cpu_buffer_size)
    else:
        host_batches = AnyIterable(source, buffer_size=cpu_buffer_size)
    return ShardedIterator(
        host_batches,
        _Placer(target),
        device_buffer_size=device_buffer_size,
        reshard=None,
        across=None,
    )


class _Placer:
    """Does what an `Assembler` does, for whole batches of any shape."""

    def __init__(self, target: ShardingTree):
        self._target, self.mesh_axes, self.digest = target, target.mesh_axes, ""

    def __call__(self, batch: Batch) -> Batch:
        if batch is None:
            raise ShardingError(
                "the dataset has no element at this index: a filter dropped it.",
                remedy="call .to_iter_dataset() on the dataset, which skips these.",
            )
        return place_tree(batch, self._target, in_background=True)

    def describe(self) -> dict[str, str]:
        return {}  # each batch may be of another shape


class AnyIterable(Stream):
    """The batches of an iterable that is no Grain dataset.

    Of a list, a `grain.DataLoader` or whatever else makes a new iterator each time, every opening
    is a pass of its own. An iterator, such as a generator, is taken as it stands.

    There is a state if the iterator has ``get_state`` and ``set_state``. That of a
    `grain.DataLoader` is bytes, which JSON cannot hold, and becomes text.

    Args:
        source: The batches. Arrays are copied, so it may fill its buffers again.
        buffer_size: Batches that may wait on the host or be in the making.
    """

    _BYTES = "parent_bytes"  # the state's key instead of "parent", for a state that is bytes

    def __init__(self, source: Iterable[Batch], *, buffer_size: int):
        ds = StreamDataset(_IterableDataset(source), global_batch_size=None, owns_arrays=True)
        super().__init__(ds, buffer_size=buffer_size)
        self._source, self._stateful = source, False

    def open(self, position: bytes | None) -> Opened:
        opened = super().open(position)
        self._stateful = pickle.loads(opened.position) is not None
        return opened

    def to_state(self, position: bytes) -> dict[str, Any]:
        self._require_state()
        state = super().to_state(position)
        if isinstance(parent := state.pop(self._PARENT), bytes):
            return {**state, self._BYTES: parent.decode("latin-1")}  # any byte is one character
        return {**state, self._PARENT: parent}

    def from_state(self, state: dict[str, Any]) -> bytes:
        self._require_state()
        if isinstance(state, dict) and isinstance(text := state.get(self._BYTES), str):
            state = {KIND: self.kind, self._PARENT: text.encode("latin-1")}
        return super().from_state(state)

    def _require_state(self) -> None:
        if not self._stateful:
            raise StateError(
                f"a {type(self._source).__name__} has no state: nothing tells where it stands, or"
                " brings it back there.\n  remedy: pass a Grain dataset or a grain.DataLoader, or"
                " give the iterator get_state() and set_state(state)."
            )


class _CopiedBatches(BatchMapDataset):
    """The batches of a random-access dataset, whatever they are, in arrays of their own."""

    def __len__(self) -> int:
        (parent,) = self.parents
        return len(parent)

    def begin(self, index: int) -> MadeBatch:
        return _CopiedBatch(index)

    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        (parent,) = self.parents
        return [[owned(parent[piece.batch.index])] for piece in pieces]


class _CopiedBatch(MadeBatch):
    """A batch that is read as a whole, as one record."""

    size = 1

    def __init__(self, index: int):
        self.index = index
        self._batch: Batch | None = None

    def write(self, elements: list[Any], start: int, until: float) -> int:
        self._batch = elements.pop()
        return 1

    def finish(self) -> Batch:
        return self._batch


class _IterableDataset(grain.IterDataset):
    def __init__(self, source: Iterable[Batch]):
        super().__init__()
        self._source = source
        self._in_use = threading.Lock()

    def __iter__(self) -> grain.DatasetIterator:
        iterator = iter(self._source)
        return _IterableIterator(iterator, self._in_use, is_own=iterator is not self._source)


class _IterableIterator(grain.DatasetIterator):
    """Gives any iterator the methods of Grain's.

    Args:
        iterator: The iterator.
        in_use: Held while it works. After ``set_state`` a thread may still be inside the user's
            ``next``, and if the iterator is the user's own, the next thread asks the same one.
        is_own: Whether it was made for this object, and nobody else can have it.
    """

    def __init__(self, iterator: Iterator[Batch], in_use: threading.Lock, *, is_own: bool):
        super().__init__()
        self._iterator: Any = iterator
        self._in_use = in_use
        self._stateful = hasattr(iterator, "get_state") and hasattr(iterator, "set_state")
        # An iterator with a state may be asked to go back after this, so its owner closes it.
        self._to_close = hasattr(iterator, "close") and (is_own or not self._stateful)

    def __next__(self) -> Batch:
        with self._in_use:  # for the copy, too: who asks next may have the arrays filled again
            return owned(next(self._iterator))

    def get_state(self) -> Any:
        with self._in_use:
            return self._iterator.get_state() if self._stateful else None

    def set_state(self, state: Any) -> None:
        with self._in_use:
            self._iterator.set_state(state)

    def close(self) -> None:
        closes, self._to_close = self._to_close, False  # Grain closes again when it collects this
        if closes:
            self._iterator.close()
