"""Reading some rows of a batch without the others.

There are two readers. Where a row of the batch depends on its record alone, `RecordRows` reaches
below ``.batch`` and evaluates those records and no more. Where it does not (a custom ``batch_fn``,
a ``.map`` after ``.batch``), `WholeBatchRows` evaluates the batch and keeps the rows, which costs
more and gives the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside import nodes, routes
from grain_shard.grain_inside.nodes import Epoch
from grain_shard.host_arrays import copied, empty
from grain_shard.reading.fingerprint import Fingerprint, fields_before, fingerprint
from grain_shard.reading.row_dataset import MadeBatch, Piece, RowMapDataset, RowReader
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
_UNKNOWN = object()
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
        return routes.route(self._node.records, np.arange(0)).reads_many

    @property
    def only_asks_sources(self) -> bool:
        return routes.route(self._node.records, np.arange(0)).only_asks_sources

    def begin(self, index: int, rows: np.ndarray | None) -> MadeBatch:
        records = _record_indices(self._node, index, rows)
        return _RecordBatch(self, index, records, routes.route(self._node.records, records))

    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        with span(READ):
            if len(pieces) > 1:
                return routes.read_together([piece.batch.way_of(piece) for piece in pieces])
            batch, start, stop = piece = pieces[0]
            way = batch.way_of(piece)
            return [batch.named(lambda: way.read(until), start, stop)]

    def stack(self, num_rows: int, row: Any = _UNKNOWN) -> Stack:
        """A new stack of rows that look like the first one that was ever read.

        Args:
            num_rows: How many.
            row: One that was read, in case it is the first.
        """
        if self._stacker is None:
            with _LEARNING:
                if self._stacker is None:
                    like = self._node.records[0] if row is _UNKNOWN else row
                    self._stacker = RowStacker(like, _NAME)
        return Stack(self._stacker, num_rows)

    @property
    def rows_at_a_time(self) -> int:
        return 1 if self._stacker is None else self._stacker.rows_at_a_time

    def evaluate_apart(self, record: int) -> Any:
        """One record by the public way."""
        return self._node.records[record]


class _RecordBatch(MadeBatch):
    """A batch made of records."""

    def __init__(self, reader: RecordRows, index: int, records: np.ndarray, way: routes.Route):
        self._reader, self._index, self._records, self._way = reader, index, records, way
        self.size = len(records)
        self._stack: Stack | None = None
        self._stacking = threading.Lock()  # held while that is made

    @property
    def most_at_a_time(self) -> int:
        return self._reader.rows_at_a_time

    def way_of(self, piece: Piece) -> routes.Route:
        return self._way.part(piece.start, piece.stop)

    def write(self, elements: list[Any], start: int, until: float) -> int:
        first = 0
        while first < len(elements) and (not first or time.perf_counter() < until):
            # The very first record comes alone: it tells how many go at a time.
            stop = min(len(elements), first + self._reader.rows_at_a_time)
            at, way = start + first, self._way.part(start + first, start + stop)
            some = elements[first:stop]
            with span(READ):
                rows = self.named(
                    lambda way=way, some=some: way.finish(some, until), at, start + stop
                )
            with span(BATCH):
                with self._stacking:
                    if self._stack is None:
                        self._stack = self._reader.stack(self.size, rows[0])
                self._stack.write(rows, at, self._records[at : at + len(rows)])
            elements[first : first + len(rows)] = [None] * len(rows)
            first += len(rows)
        return first

    def finish(self) -> Batch:
        # Let go of: a read whose answer has come otherwise may still refer to this.
        stack, self._stack = self._stack, None
        # If it is all padding, one record, once, tells what the rows would look like.
        return (stack or self._reader.stack(0)).batch()

    def named(self, evaluate: Callable[[], list[Any]], start: int, stop: int) -> list[Any]:
        """What is evaluated of some records; of an error, says which record it was."""
        try:
            return evaluate()
        except Exception as error:
            records = self._records[start:stop]
            # Read them again one by one, to be able to say which it was.
            for record in records.tolist():
                try:
                    self._reader.evaluate_apart(record)
                except Exception as one:
                    one.add_note(
                        f"grain_shard: while evaluating record {record} of the dataset above"
                        f" .batch, for batch {self._index}"
                    )
                    raise one from None
            error.add_note(
                f"grain_shard: while evaluating records {records[0]} to {records[-1]} of the"
                f" dataset above .batch, for batch {self._index}; none of them failed a second"
                " time"
            )
            raise


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

    def begin(self, index: int, rows: np.ndarray | None) -> MadeBatch:
        return _KeptBatch(index, rows)

    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        with span(READ):
            return [[self._whole(piece.batch)] for piece in pieces]

    def _whole(self, kept: _KeptBatch) -> FlatBatch:
        index = kept.index
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
        if kept.rows is not None and batch.rows > self.global_batch_size:
            batch.refuse(
                f"batch {index} has {batch.rows} rows, more than the {self.global_batch_size} of a"
                " full batch.",
                remedy="give every batch but the last of an epoch the same number of rows: shuffle,"
                " mix or concatenate before .batch, or use .batch(B, drop_remainder=True).",
            )
        return batch

    def _rows_of(self, index: int) -> int:
        return FlatBatch.of(self._ds[index]).rows


class _KeptBatch(MadeBatch):
    """Some rows of a batch that is evaluated as a whole, as one record."""

    size = 1

    def __init__(self, index: int, rows: np.ndarray | None):
        self.index, self.rows = index, rows
        self._batch: Batch | None = None

    def write(self, elements: list[Any], start: int, until: float) -> int:
        with span(BATCH):
            self._batch = take_rows(elements[0], self.rows)
        return 1

    def finish(self) -> Batch:
        return self._batch


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
