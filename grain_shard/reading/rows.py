"""Reading some rows of a batch without the others.

There are two readers. Where a row of the batch depends on its record alone, `RecordRows` reaches
below ``.batch`` and evaluates those records and no more. Where it does not (a custom ``batch_fn``,
a ``.map`` after ``.batch``), `WholeBatchRows` evaluates the batch and keeps the rows, which costs
more and gives the same.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from grain_shard.grain_inside import nodes, routes
from grain_shard.grain_inside.nodes import Epoch
from grain_shard.host_arrays import copied, empty
from grain_shard.reading.fingerprint import Fingerprint, fields_before, fingerprint
from grain_shard.reading.row_dataset import RowMapDataset, RowReader
from grain_shard.reading.stack import RowStacker, Stack
from grain_shard.spans import BATCH, READ, span
from grain_shard.trees import Batch, FlatBatch


def row_reader(ds: grain.MapDataset) -> RowReader:
    """The cheapest reader that gives exactly the rows of this dataset's batches."""
    node = nodes.batch_node(ds)
    if node is not None and node.only_stacks:
        return RecordRows(ds, node)
    return WholeBatchRows(ds, node)


def whole_batches(ds: RowMapDataset) -> RowMapDataset:
    """The dataset, if its batches have all their rows.

    If rows were chosen already, what is left of a batch is taken for a whole one, of which no row
    can be read alone.
    """
    return ds if ds.has_all_rows else RowMapDataset(ds, row_reader(ds))


_NAME = "record {}"
# Held while one record is read to learn the structure of all. It belongs to this module and not to
# a reader, since readers are pickled for worker processes, and a lock cannot be.
_LEARNING = threading.Lock()


class RecordRows(RowReader):
    """Rows read below ``.batch``: row r of batch k is record k * B + r of what stands above it."""

    def __init__(self, ds: grain.MapDataset, node: nodes.BatchNode):
        self._ds, self._node = ds, node
        self._stacker: RowStacker | None = None

    @property
    def global_batch_size(self) -> int:
        return self._node.global_batch_size

    def num_batches(self) -> int:
        return len(self._ds)

    def epoch(self) -> Epoch | None:
        return self._node.epoch()

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self._ds)

    def fields_before(self, batch: int) -> Fingerprint:
        return fields_before(self._ds, batch)

    @property
    def reads_many(self) -> bool:
        return routes.route(self._node.records, np.arange(1)).reads_many

    def fetch(self, indices: Sequence[int], rows: np.ndarray | None) -> Sequence[_Fetched]:
        of_batches = [_record_indices(self._node, index, rows) for index in indices]
        everything = np.concatenate(of_batches)
        way = routes.route(self._node.records, everything)
        elements = None
        if way.reads_many and len(everything):
            with span(READ):
                elements = self._naming_the_record(way.read, everything, indices[0])
        fetched, start = [], 0
        for index, records in zip(indices, of_batches, strict=True):
            stop = start + len(records)
            own = None if elements is None else elements[start:stop]
            fetched.append(_Fetched(index, records, way.part(start, stop), own))
            start = stop
        return fetched

    def make(self, fetched: _Fetched, rows: np.ndarray | None) -> Batch:
        index, records, way, elements = fetched
        if not len(records):
            # All padding. One record, once, tells what the rows would look like.
            with _LEARNING:
                self._stacker = self._stacker or RowStacker(self._node.records[0], _NAME)
        stack = None if self._stacker is None else Stack(self._stacker, len(records))
        start = 0
        while start < len(records):
            # The very first record comes alone: it tells how many go at a time.
            stop = min(len(records), start + (1 if stack is None else stack.rows_at_a_time))
            some = records[start:stop]
            with span(READ):
                values = self._evaluated(way.part(start, stop), elements, start, some, index)
            with span(BATCH):
                if stack is None:
                    self._stacker = self._stacker or RowStacker(values[0], _NAME)
                    stack = Stack(self._stacker, len(records))
                stack.add(values, some)
            start = stop
        assert stack is not None  # there were records
        return stack.batch()

    def _evaluated(
        self,
        way: routes.Route,
        fetched: list[Any] | None,
        start: int,
        records: np.ndarray,
        index: int,
    ) -> list[Any]:
        """The values of some records of batch `index`, which stand at `start` in what was fetched.

        What was fetched of them is let go: the batch that is made of it takes its place.
        """
        if fetched is None:
            return self._naming_the_record(lambda: way.finish(way.read()), records, index)
        stop = start + len(records)
        elements, fetched[start:stop] = fetched[start:stop], [None] * len(records)
        return self._naming_the_record(lambda: way.finish(elements), records, index)

    def _naming_the_record(
        self, evaluate: Callable[[], list[Any]], records: np.ndarray, index: int
    ) -> list[Any]:
        try:
            return evaluate()
        except Exception as error:
            # Read them again one by one, to be able to say which it was.
            for record in records.tolist():
                try:
                    self._node.records[record]
                except Exception as one:
                    one.add_note(
                        f"grain_shard: while evaluating record {record} of the dataset above"
                        f" .batch, for batch {index}"
                    )
                    raise one from None
            error.add_note(
                f"grain_shard: while evaluating records {records[0]} to {records[-1]} of the"
                f" dataset above .batch, for batch {index}; none of them failed a second time"
            )
            raise


class _Fetched(NamedTuple):
    """Of one batch: its index, its records, their way, and what was read of them, if it was."""

    batch: int
    records: np.ndarray
    way: routes.Route
    elements: list[Any] | None


def _record_indices(node: nodes.BatchNode, index: int, rows: np.ndarray | None) -> np.ndarray:
    """The records of the chosen rows that exist, in their order."""
    start, existing = _first_and_count(node, index)
    rows = np.arange(existing) if rows is None else rows[rows < existing]
    return rows + start


def _first_and_count(node: nodes.BatchNode, index: int) -> tuple[int, int]:
    """The first record of a batch, and how many it has."""
    size, records = node.global_batch_size, len(node.records)
    per_epoch = records // size if node.drop_remainder else -(-records // size)
    epoch, batch = divmod(node.batch_index(index), per_epoch)
    return epoch * records + batch * size, min(size, records - batch * size)


class WholeBatchRows(RowReader):
    """Rows kept from whole batches, where a row cannot be had alone."""

    reads_whole_batches = True

    def __init__(self, ds: grain.MapDataset, node: nodes.BatchNode | None):
        self._ds, self._node = ds, node
        self._size = node.global_batch_size if node else None

    @property
    def global_batch_size(self) -> int:
        if self._size is None:  # nothing tells it but a batch
            self._size = self._rows_of(0)
        return self._size

    def num_batches(self) -> int:
        return len(self._ds)

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self._ds)

    def fields_before(self, batch: int) -> Fingerprint:
        return fields_before(self._ds, batch)

    def epoch(self) -> Epoch | None:
        if self._node is not None:
            return self._node.epoch()
        batches = len(self._ds)
        short = self._rows_of(batches - 1) < self.global_batch_size
        return Epoch(batches, batches - short)

    def fetch(self, indices: Sequence[int], rows: np.ndarray | None) -> Sequence[int]:
        return indices  # nothing is read for several batches at once

    def make(self, fetched: int, rows: np.ndarray | None) -> Batch:
        index = fetched
        with span(READ):
            batch = FlatBatch.of(self._ds[index])
        if self._node is not None:
            existing = _first_and_count(self._node, index)[1]
            if batch.rows != existing:
                batch.refuse(
                    f"batch {index} has {batch.rows} rows, made of {existing} records: what stands"
                    " after .batch changes their number.",
                    remedy="change it before .batch; or in a stream, .to_iter_dataset().batch(B)"
                    ".map(...), whose first batch tells the size.",
                )
        if rows is not None and batch.rows > self.global_batch_size:
            batch.refuse(
                f"batch {index} has {batch.rows} rows, more than the {self.global_batch_size} of a"
                " full batch.",
                remedy="give every batch but the last of an epoch the same number of rows: shuffle,"
                " mix or concatenate before .batch, or use .batch(B, drop_remainder=True).",
            )
        with span(BATCH):
            return take_rows(batch, rows)

    def _rows_of(self, index: int) -> int:
        return FlatBatch.of(self._ds[index]).rows


def take_rows(batch: FlatBatch, rows: np.ndarray | None) -> Batch:
    """The chosen rows that exist, all if None, as a batch; scalars belong to every row.

    Always in fresh plain arrays: the caller's buffer may be reused, and a view of Grain's shared
    memory loses its offset on the way out of a worker.
    """
    existing = np.arange(batch.rows) if rows is None else rows[rows < batch.rows]
    return batch.structure.unflatten(
        [_rows_of(array, existing) if array.ndim else copied(array) for array in batch.arrays]
    )


def _rows_of(array: np.ndarray, existing: np.ndarray) -> np.ndarray:
    taken = empty((len(existing), *array.shape[1:]), array.dtype)
    # "clip", or numpy would gather into a buffer of its own first; no row is out of bounds here.
    return np.take(array, existing, axis=0, out=taken, mode="clip")
