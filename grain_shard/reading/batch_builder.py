"""`BatchBuilder`: makes one host batch of a random-access pipeline from its records.

The records of a batch are read in ranges of any size, by any thread. Each range is written to its
place in the batch. The batch is padded and finished once no range is missing. One call of the
source may read ranges of several batches.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from grain_shard.errors import BadRecordsError
from grain_shard.grain_inside.array_rows import ArrayRows
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import Elements, Route
from grain_shard.reading.cuts import Progress
from grain_shard.reading.faults import FaultCounts, Faults
from grain_shard.reading.origin import BEFORE_BATCH, name_in
from grain_shard.reading.padding import Padding, pad_batch
from grain_shard.reading.row_arrays import read_arrays, with_arrays
from grain_shard.reading.stack import RowTemplate
from grain_shard.spans import BATCH, MAP, PAD, READ, span
from grain_shard.trees import Batch, FlatBatch

# Rows gathered from arrays need no memory besides the batch, so this many times as many of them are
# written at a time: 8 MiB. Writing 1 MiB at a time would take a tenth longer.
_GATHERED = 8


@dataclass(eq=False)
class BatchBuilder:
    """An unfinished host batch. Several threads may each read some of its records.

    Attributes:
        index: The number of the batch in the pipeline, for messages.
        position: The iterator's position after this batch, which the iterator saves in its state.
        records: int64[n], the indices of the records to read, in the order of the rows.
        route: Reads these records and applies the user's functions to them.
        template: The dataset of the records, and the structure of its rows.
        faults: The rules for failed reads.
        num_rows: Number of rows of the finished batch. Unused without padding.
        padding: The padding; None for an unpadded batch.
        size: Number of records to read; 0 if every row of the batch is padding.
    """

    index: int
    position: Progress
    records: np.ndarray
    route: Route
    template: RowTemplate
    faults: Faults
    num_rows: int
    padding: Padding | None

    def __post_init__(self) -> None:
        self.size: int = len(self.records)
        self._missing = self.size
        self._bad_rows: list[int] = []
        self._arrays: list[np.ndarray] | None = None
        self._lock = threading.Lock()

    def write(self, elements: Elements | None, start: int, stop: int) -> bool:
        """Reads records, applies the user's functions to them, and writes them to the batch.

        Several threads may call this at the same time, for different records.

        Args:
            elements: The elements of the records, if they were read already; None otherwise. In a
                list, None replaces each element once it is written, which frees its memory.
            start: Position of the first record among the records of the batch.
            stop: Position after the last record.

        Returns:
            True if no record of the batch is missing any more. The caller must then call `finish`.
        """
        if elements is None:
            with span(READ):
                elements = self.way(start, stop).read(self.faults)
        # `first` counts within `elements`, and `begin` within the batch.
        first, count = 0, len(elements)
        # True if rows are only copied out of arrays; see `_GATHERED`.
        gathers = isinstance(elements, ArrayRows) and not self.route.steps
        while first < count:
            # `rows_at_a_time` depends on the size of a row. It is 1 until a first row is known.
            most = self.template.rows_at_a_time * (_GATHERED if gathers else 1)
            rows, begin = elements[first : first + most], start + first
            if self.route.steps:
                # The functions' time is counted as MAP only if the read above ran none of them.
                with span(READ, part=MAP if self.route.runs_no_function else None):
                    rows = self.route.finish(rows, self.faults, begin)
            if self.faults.masks:  # `max_bad_records` may be a share of the records read
                self.faults.count(FaultCounts(records=len(rows)))
            with span(BATCH):
                # Only a list can hold an `Unreadable`: `ArrayRows` were read without an error.
                if isinstance(rows, list) and Unreadable in map(type, rows):
                    self._leave_out_bad(rows, begin)
                self._put(rows, begin)
            if isinstance(elements, list):  # frees the memory of the elements
                elements[first : first + len(rows)] = [None] * len(rows)
            first += len(rows)
        with self._lock:
            self._missing -= stop - start
            return not self._missing

    def way(self, start: int, stop: int) -> Route:
        """Returns the `Route` that reads the batch's records from position `start` up to `stop`."""
        return self.route if stop - start == self.size else self.route.part(start, stop)

    def _put(self, elements: Elements, start: int) -> None:
        """Writes elements to the rows from `start` on.

        Several threads may call this at the same time, for different rows.
        """
        read_leaves = functools.partial(self._with_arrays, start)
        if not self.template.is_known and isinstance(elements, list):
            elements = read_leaves(elements)
        stacker = self.template.stacker(self.faults, lambda: (elements[0], self.records[start]))
        with self._lock:
            if self._arrays is None:
                self._arrays = stacker.empty(self.size)
        origins = self.records[start : start + len(elements)]
        stacker.write(self._arrays, elements, start, origins, read_leaves)

    def _with_arrays(self, start: int, rows: list[Any]) -> list[Any]:
        """Returns rows in which the leaves of other libraries are arrays.

        If a leaf cannot be read, `_leave_out_bad` decides about its row.
        """
        found = list[Any]()
        for row in rows:
            found.append(read_arrays(row, self.faults))
            if type(found[-1]) is Unreadable:
                self._leave_out_bad(found, start)
        return found

    def _stacked(self) -> FlatBatch:
        """Returns the batch without padding. Every element must have been written before.

        Afterwards this object no longer refers to the arrays of the batch.
        """
        stacker, arrays = self.template.stacker(self.faults), self._arrays
        self._arrays = None
        return stacker.batch(stacker.empty(0) if arrays is None else arrays)

    def finish(self) -> Batch:
        """Returns the finished batch with its padding: a tree of arrays.

        No other object refers to the arrays.

        Raises:
            ShardingError: The batch is short although short batches are not padded, or it cannot be
                padded.
        """
        batch = self._stacked()
        if self.padding is None:
            return batch.tree
        with span(PAD):
            if batch.rows < self.num_rows and not self.padding.pads_short:
                batch.refuse(
                    "a batch in the middle of an epoch is short, because a transformation between"
                    " .batch and .shard_to changes the order of batches.",
                    remedy="shuffle, mix or concatenate before .batch, or use"
                    " .batch(B, drop_remainder=True).",
                )
            return pad_batch(batch, self.num_rows, self.padding, self._bad_rows)

    def _leave_out_bad(self, rows: list[Any], start: int) -> None:
        """Replaces each `Unreadable` row with a placeholder, and counts its record as bad.

        Padding overwrites the placeholder when the batch is finished.

        Raises:
            BaseException: A record's error, if the rules do not let the record be left out.
        """
        bad = [i for i, row in enumerate(rows) if type(row) is Unreadable]
        for i in bad:
            if not self.faults.may_leave_out(rows[i].error):
                raise self._error_naming_record(rows[i], start + i)
        # If the structure is unknown, `rows` is a single bad row, because rows are made one at a
        # time until it is known. The template then reads other records to learn it.
        placeholder = self.template.stacker(self.faults).placeholder
        for i in bad:
            record = int(self.records[start + i])
            self.faults.leave_out(rows[i], self.template.records, record)
            self._bad_rows.append(start + i)
            rows[i] = placeholder

    def _error_naming_record(self, bad: Unreadable, start: int) -> BaseException:
        """Returns the error of an unreadable record, with a note that names the record.

        The record is evaluated once more, so that the note can say whether a second try succeeded.
        If a call for several records failed, each of these records is evaluated. The first one that
        fails again is named, and its new error is returned.

        Args:
            bad: The record's `Unreadable`, with its error. `bad.among` is the number of records of
                the call that failed.
            start: Position of the record among the records of the batch.
        """
        error = bad.error
        if isinstance(error, BadRecordsError) or not isinstance(error, Exception):
            return error
        records = self.records[start : start + bad.among].tolist()
        for record in records:
            try:
                # Read by Grain's own code, without the shortcuts of this package.
                with_arrays(self.template.records[record])
            except Exception as second:
                # The error of a call for several records may be about a different record.
                found = error if bad.among == 1 else second
                found.add_note(self._where(record, 1))
                return found
        where, advice = self._where(records[0], len(records)), self.faults.advice(error)
        error.add_note(
            f"{where}. The read failed. Another read, made for this message, succeeded. If the"
            f" source is not safe for several threads, hold a lock around its reads. {advice}"
        )
        return error

    def _where(self, record: int, among: int) -> str:
        return f"grain_shard: while evaluating {self._name(record, among)}, for batch {self.index}"

    def _name(self, record: int, among: int) -> str:
        """Returns a name for messages: of one record, or of `among` records from `record` on."""
        if among == 1:
            return name_in(self.template.records, BEFORE_BATCH, record)
        return f"one of the records {record} to {record + among - 1} of {BEFORE_BATCH}"
