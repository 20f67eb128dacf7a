"""Whole batches of any source, placed ahead of the loop."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import grain

from grain_shard.errors import ShardingError, require_int
from grain_shard.host_arrays import owned
from grain_shard.hosts.compare import GLOBAL, LOCAL
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.random_access import RandomAccess
from grain_shard.iteration.stream import Stream
from grain_shard.reading.faults import FaultRules, Faults
from grain_shard.reading.fingerprint import fingerprint, fingerprint_at
from grain_shard.reading.iterable import from_iterable, said_rows
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
        source: A Grain dataset, or any other iterable of batches; see `from_iterable`.
        target: Where the leaves go.
        device_buffer_size: Batches that may wait on the devices or be on their way there.
        cpu_buffer_size: Batches that may wait on the host or be in the making there.

    Raises:
        ShardingError: A buffer size is no positive integer, this process has no device in a
            sharding, or others have, too, and the source does not say what its rows are.
    """
    require_int("device_buffer_size", device_buffer_size, 1)
    require_int("cpu_buffer_size", cpu_buffer_size, 1)
    require_local(target)
    if not all(sharding.is_fully_addressable for sharding in target.shardings()):
        _require_global(source, target)
    if isinstance(source, grain.MapDataset):
        host_batches = RandomAccess(
            _CopiedBatches(source),
            fingerprint_at(fingerprint(source), None),  # its batches are counted, not its records
            buffer_size=cpu_buffer_size,
            num_threads=None,
            num_workers=0,
            reread_slow=False,  # each batch is read as a whole, with all that the user does
            fault_rules=FaultRules(),
        )
    else:
        if not isinstance(source, grain.IterDataset):
            source = from_iterable(source, rows=GLOBAL)
        stream = StreamDataset.of(source).with_own_arrays()
        host_batches = Stream(stream, buffer_size=cpu_buffer_size)
    return ShardedIterator(
        host_batches,
        _Placer(target),
        device_buffer_size=device_buffer_size,
        reshard=None,
        across=None,
    )


def _require_global(source: Any, target: ShardingTree) -> None:
    """Refuses a source that may have other batches on another host.

    Raises:
        ShardingError: Nothing says that it yields the same whole batches everywhere.
    """
    is_dataset = isinstance(source, grain.MapDataset | grain.IterDataset)
    rows = said_rows(source) if is_dataset else None
    if rows == GLOBAL:
        return
    if rows == LOCAL:
        problem = 'it says rows="local": what it yields is a part of each batch.'
        remedy = ".shard_to(sharding) in place of prefetch_to_device puts the parts together."
    elif is_dataset:
        problem = "nothing says that it yields the same whole batches on each of them."
        remedy = "end the dataset with .shard_to(sharding), which reads this host's rows of it."
    else:
        problem = "nothing says that it yields the same whole batches on each of them."
        remedy = (
            'pass grain_shard.from_iterable(source, rows="global") if it does; or if each host has'
            ' the rows of its own devices, end from_iterable(source, rows="local") with'
            " .shard_to(sharding)."
        )
    raise ShardingError(
        f"the devices are those of several hosts, the source is a {type(source).__name__}, and"
        f" {problem}",
        mesh_axes=target.mesh_axes,
        remedy=remedy,
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


class _CopiedBatches(BatchMapDataset):
    """The batches of a random-access dataset, whatever they are, in arrays of their own."""

    def __len__(self) -> int:
        (parent,) = self.parents
        return len(parent)

    def begin(self, indices: Sequence[int], faults: Faults) -> list[MadeBatch]:
        return [_CopiedBatch(index, faults) for index in indices]

    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        (parent,) = self.parents
        batches = [piece.batch for piece in pieces]
        return [[owned(batch.faults.evaluate(parent, batch.index))] for batch in batches]


class _CopiedBatch(MadeBatch):
    """A batch that is read as a whole, as one record."""

    size = 1

    def __init__(self, index: int, faults: Faults):
        self.index, self.faults = index, faults
        self._batch: Batch | None = None

    def write(self, elements: list[Any], start: int, until: float) -> int:
        self._batch = elements.pop()
        return 1

    def finish(self) -> Batch:
        return self._batch
