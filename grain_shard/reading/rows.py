"""Reading some rows of a batch without the others.

There are two readers. Where a row of the batch depends on its record alone, `RecordRows` reaches
below ``.batch`` and evaluates those records and no more. Where it does not (a custom ``batch_fn``,
a ``.map`` after ``.batch``), `WholeBatchRows` evaluates the batch and keeps the rows, which costs
more and gives the same.
"""

from __future__ import annotations

import copy
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import grain
import numpy as np

from grain_shard.errors import BadRecordsError, describe_error
from grain_shard.grain_inside import nodes, routes
from grain_shard.host_arrays import copied, empty
from grain_shard.reading.batching import Batching
from grain_shard.reading.cuts import Cuts, Progress
from grain_shard.reading.faults import Faults
from grain_shard.reading.fingerprint import Fingerprint, fingerprint
from grain_shard.reading.forgotten_batch import refuse_records, warn_of_records
from grain_shard.reading.origin import Origin, record_name
from grain_shard.reading.row_dataset import MadeBatch, Piece, RowMapDataset, RowReader
from grain_shard.reading.stack import RowStacker, Stack
from grain_shard.spans import BATCH, MAP, READ, span
from grain_shard.trees import Batch, FlatBatch


def row_reader(ds: grain.MapDataset) -> RowReader:
    """The cheapest reader that gives exactly the rows of this dataset's batches."""
    node = nodes.batch_node(ds)
    batching = None if node is None else Batching.of(node, len(ds))
    if batching is not None and node is not None and node.only_stacks:
        return RecordRows(batching)
    return WholeBatchRows(ds, batching)


def whole_batches(ds: RowMapDataset) -> RowMapDataset:
    """The dataset, if its batches have all their rows.

    If rows were chosen already, what is left of a batch is taken for a whole one, of which no row
    can be read alone.
    """
    return ds if ds.has_all_rows else RowMapDataset(ds, row_reader(ds))


class RecordRows(RowReader):
    """Rows read below ``.batch``: those of a batch are records that follow each other.

    Args:
        batching: What is batched, and how.
    """

    def __init__(self, batching: Batching):
        self._batching, self._rows = batching, _RowsOf(batching.records)

    def _with(self, **changes: Any) -> RecordRows:
        other = copy.copy(self)  # it goes on to know what rows look like
        other._batching = replace(self._batching, **changes)
        return other

    @property
    def cuts(self) -> Cuts:
        return self._batching.cuts

    @property
    def num_epochs(self) -> int:
        return self._batching.num_epochs

    @property
    def counts_records(self) -> bool:
        return self._batching.sliced is None

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        return self._batching.by_record.sizes

    def global_batch_size_of(self, index: int) -> int:
        return self._batching.cut(index).size

    def epochs(self) -> Cuts | None:
        return self._batching.by_record if self.counts_records else None

    def dropping_remainder(self) -> RecordRows:
        return self._with(by_record=self._batching.by_record.dropping_remainder())

    def beginning_at(self, progress: Progress) -> RecordRows:
        if not self.counts_records:
            return self
        return self._with(by_record=self._batching.by_record.beginning_at(progress))

    def repeated(self, times: int) -> RecordRows:
        return self._with(num_epochs=self.num_epochs * times)

    def fingerprint(self) -> Fingerprint:
        found = self._batching.fingerprint()
        if self.counts_records:
            return found
        (global_batch_size,) = self.global_batch_sizes
        return {**found, "global_batch_size": global_batch_size}

    @property
    def reads_many(self) -> bool:
        return routes.route(self._batching.records, np.arange(0)).reads_many

    @property
    def only_asks_sources(self) -> bool:
        return routes.route(self._batching.records, np.arange(0)).only_asks_sources

    def begin(
        self, indices: Sequence[int], rows: Sequence[np.ndarray | None], faults: Faults
    ) -> list[MadeBatch]:
        of_batches = list(map(self._record_indices, indices, rows))
        stops = list(itertools.accumulate(map(len, of_batches)))
        way = routes.route(self._batching.records, np.concatenate(of_batches))
        return [
            _RecordBatch(self._rows, index, records, way.part(stop - len(records), stop), faults)
            for index, records, stop in zip(indices, of_batches, stops, strict=True)
        ]

    def _record_indices(self, index: int, rows: np.ndarray | None) -> np.ndarray:
        """The records of the chosen rows that exist, in their order."""
        start, existing = self._batching.first_and_count(index)
        return start + (np.arange(existing) if rows is None else rows[rows < existing])

    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        with span(READ):
            if len(pieces) > 1:
                ways = [piece.batch.way_of(piece) for piece in pieces]
                return routes.read_together(ways, pieces[0].batch.faults)
            batch, start, stop = piece = pieces[0]
            way = batch.way_of(piece)
            return [batch.named(lambda: way.read(until, batch.faults), start, stop)]


_NAME = "record {}"
_UNKNOWN = object()
# How many records to try if the first ones cannot be had.
_MOST_LOOKED_AT = 1000
# Held while one record is read to learn the structure of all. It belongs to this module and not to
# a reader, since readers are pickled for worker processes, and a lock cannot be.
_LEARNING = threading.Lock()


class _RowsOf:
    """What the rows of some records look like, once one was read."""

    def __init__(self, records: grain.MapDataset):
        self._records = records
        self._stacker: RowStacker | None = None

    def stacker(self, faults: Faults, row: Any = _UNKNOWN) -> RowStacker:
        """Stacks rows that look like the first one that was ever read.

        Args:
            faults: What becomes of records that cannot be had, if one has to be read.
            row: One that was read, in case it is the first.
        """
        if self._stacker is None:
            with _LEARNING:
                if self._stacker is None:
                    like = self._first(faults) if row is _UNKNOWN else row
                    self._stacker = RowStacker(like, _NAME)
        return self._stacker

    def _first(self, faults: Faults) -> Any:
        """The first record that can be had."""
        error: Exception = LookupError("there is no record")
        for record in range(min(len(self._records), _MOST_LOOKED_AT)):
            way = routes.route(self._records, np.array([record]))
            (row,) = way.finish(way.read(routes.NEVER, faults), routes.NEVER, faults)
            if type(row) is not routes.Unreadable:
                return row
            error = row.error
        raise BadRecordsError(
            f"none of the first {min(len(self._records), _MOST_LOOKED_AT):,} records can be read,"
            f" so nothing tells what a row looks like; the last: {describe_error(error)}.\n"
            "  remedy: look at the source, and at what .map does."
        ) from error

    @property
    def rows_at_a_time(self) -> int:
        return 1 if self._stacker is None else self._stacker.rows_at_a_time

    def origin(self, record: int) -> Origin | None:
        """Where a record comes from, if that is known."""
        return Origin.of(self._records, record)

    def evaluate_apart(self, record: int) -> Any:
        """One record by the public way."""
        return self._records[record]


class _RecordBatch(MadeBatch):
    """A batch made of records."""

    def __init__(
        self,
        like: _RowsOf,
        index: int,
        records: np.ndarray,
        way: routes.Route,
        faults: Faults,
    ):
        self._like, self._index, self._records, self._way = like, index, records, way
        self.size, self.faults = len(records), faults
        self._bad_rows: list[int] = []
        self._stack: Stack | None = None
        self._stacking = threading.Lock()  # held while that is made

    @property
    def most_at_a_time(self) -> int:
        return self._like.rows_at_a_time

    @property
    def bad_rows(self) -> list[int]:
        return self._bad_rows

    def way_of(self, piece: Piece) -> routes.Route:
        return self._way.part(piece.start, piece.stop)

    def write(self, elements: list[Any], start: int, until: float) -> int:
        first = 0
        while first < len(elements) and (not first or time.perf_counter() < until):
            # The very first record comes alone: it tells how many go at a time.
            stop = min(len(elements), first + self._like.rows_at_a_time)
            at, way = start + first, self._way.part(start + first, start + stop)
            some = elements[first:stop]
            with span(READ, part=MAP if way.runs_no_function else None):
                rows = self.named(
                    lambda way=way, some=some: way.finish(some, until, self.faults),
                    at,
                    start + stop,
                )
            with span(BATCH):
                if self.faults.leaves_out:
                    self._leave_out(rows, at)
                with self._stacking:
                    if self._stack is None:
                        stacker = self._like.stacker(self.faults, rows[0])
                        self._stack = Stack(stacker, self.size)
                self._stack.write(rows, at, self._records[at : at + len(rows)])
            elements[first : first + len(rows)] = [None] * len(rows)
            first += len(rows)
        return first

    def _leave_out(self, rows: list[Any], start: int) -> None:
        """Puts empty rows in the places of those that could not be had, and counts them."""
        self.faults.count(len(rows))
        bad = [i for i, row in enumerate(rows) if type(row) is routes.Unreadable]
        if not bad:
            return
        good = next((row for row in rows if type(row) is not routes.Unreadable), _UNKNOWN)
        empty_row = self._like.stacker(self.faults, good).empty_row
        for i in bad:
            record = int(self._records[start + i])
            self.faults.note(record, rows[i].error, origin=self._like.origin(record))
            self._bad_rows.append(start + i)
            rows[i] = empty_row

    def finish(self) -> Batch:
        # Let go of: a read whose answer has come otherwise may still refer to this.
        stack, self._stack = self._stack, None
        # If it is all padding, one record, once, tells what the rows would look like.
        return (stack or Stack(self._like.stacker(self.faults), 0)).batch()

    def named(self, evaluate: Callable[[], list[Any]], start: int, stop: int) -> list[Any]:
        """What is evaluated of some records; of an error, says which record it was."""
        try:
            return evaluate()
        except BadRecordsError:
            raise
        except Exception as error:
            records = self._records[start:stop]
            # Read them again one by one, to be able to say which it was.
            for record in records.tolist():
                try:
                    self._like.evaluate_apart(record)
                except Exception as one:
                    for note in getattr(error, "__notes__", ()):
                        one.add_note(note)
                    one.add_note(self._place_note(record))
                    raise one from None
            error.add_note(self._passing_note(error, records))
            raise

    def _place_note(self, record: int) -> str:
        name = record_name(record, "the dataset above .batch", self._like.origin(record))
        return f"grain_shard: while evaluating {name}, for batch {self._index}"

    def _passing_note(self, error: Exception, records: np.ndarray) -> str:
        """Of an error that did not come again when the records were read once more."""
        if len(records) == 1:
            place = self._place_note(int(records[0]))
            again = "Reading it a second time, to find the cause, succeeded"
        else:
            place = (
                f"grain_shard: while evaluating one of the records {records[0]} to {records[-1]} of"
                f" the dataset above .batch, for batch {self._index}"
            )
            again = "Reading each of them a second time, to find which one it was, succeeded"
        return f"{place}. {again}. {self.faults.advice(error)}"


class WholeBatchRows(RowReader):
    """Rows kept from whole batches, where a row cannot be had alone.

    Args:
        ds: The batches.
        batching: What they are made of, if that is known.
    """

    reads_whole_batches = True

    def __init__(self, ds: grain.MapDataset, batching: Batching | None):
        self._ds, self._batching, self._times = ds, batching, 1
        self._cuts = Cuts(len(ds), {0: 1}) if batching is None else batching.cuts
        # Of an epoch, in the dataset; some of them may be dropped here.
        self._dataset_batches = self._cuts.steps_before(1)
        self._size = None if batching is None else batching.by_record.sizes[0]

    @property
    def cuts(self) -> Cuts:
        return self._cuts

    @property
    def num_epochs(self) -> int:
        return self._times * (1 if self._batching is None else self._batching.num_epochs)

    @property
    def counts_records(self) -> bool:
        return False

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        return (self.global_batch_size_of(0),)

    def global_batch_size_of(self, index: int) -> int:
        if self._size is None:  # nothing tells it but a batch
            batch = FlatBatch.of(self._ds[0])
            refuse_records(self._ds, batch)
            warn_of_records(self._ds, batch)
            self._size = batch.rows
        return self._size

    def epochs(self) -> Cuts | None:
        if self._batching is not None:
            return self._batching.by_record if self._batching.sliced is None else None
        size, last = self.global_batch_size_of(0), self._dataset_batches - 1
        return Cuts(last * size + self._rows_of(last), {0: size})

    def dropping_remainder(self) -> WholeBatchRows:
        cuts, other = self.epochs(), copy.copy(self)
        assert cuts is not None, "no batch of a slice is dropped"
        other._cuts = cuts.dropping_remainder()
        return other

    def beginning_at(self, progress: Progress) -> WholeBatchRows:
        return self

    def repeated(self, times: int) -> WholeBatchRows:
        other = copy.copy(self)
        other._times = self._times * times
        return other

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self._ds)

    def begin(
        self, indices: Sequence[int], rows: Sequence[np.ndarray | None], faults: Faults
    ) -> list[MadeBatch]:
        return [_KeptBatch(*chosen, faults) for chosen in zip(indices, rows, strict=True)]

    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        with span(READ):
            return [[self._whole(piece.batch)] for piece in pieces]

    def _whole(self, kept: _KeptBatch) -> FlatBatch:
        index = kept.index
        batch = FlatBatch.of(kept.faults.evaluate(self._ds, self._dataset_index(index)))
        if self._batching is not None:
            made_of = self._batching if self._batching.sliced else self._cuts
            existing = made_of.cut(index).num_records
            if batch.rows != existing:
                batch.refuse(
                    f"batch {index} has {batch.rows} rows, made of {existing} records: what stands"
                    " after .batch changes their number.",
                    remedy="change it before .batch; or in a stream, .to_iter_dataset().batch(B)"
                    ".map(...), whose first batch tells the size.",
                )
        if kept.rows is not None and batch.rows > (full := self.global_batch_size_of(index)):
            batch.refuse(
                f"batch {index} has {batch.rows} rows, more than the {full} of a full batch.",
                remedy="give every batch but the last of an epoch the same number of rows: shuffle,"
                " mix or concatenate before .batch, or use .batch(B, drop_remainder=True).",
            )
        return batch

    def _dataset_index(self, index: int) -> int:
        """Of a batch, in the dataset, which still has those that are dropped."""
        epoch, record, _, size = self._cuts.cut(index)
        return epoch * self._dataset_batches + record // size

    def _rows_of(self, index: int) -> int:
        return FlatBatch.of(self._ds[index]).rows


class _KeptBatch(MadeBatch):
    """Some rows of a batch that is evaluated as a whole, as one record."""

    size = 1

    def __init__(self, index: int, rows: np.ndarray | None, faults: Faults):
        self.index, self.rows, self.faults = index, rows, faults
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
