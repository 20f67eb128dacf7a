"""`BatchBuilder`: one batch of random access, from its records to its padding.

A batch is begun, its records are read in ranges of any size by any thread, each range is written
where it belongs, and the batch is finished when none is missing. One call of the source may read
ranges of several batches.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, cast

import numpy as np

from grain_shard.errors import BadRecordsError
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import Route
from grain_shard.reading.faults import Faults
from grain_shard.reading.origin import Origin
from grain_shard.reading.pad_batch import Padding, pad_batch
from grain_shard.spans import BATCH, MAP, PAD, READ, span
from grain_shard.tasks import Raised
from grain_shard.trees import Batch, FlatBatch


class Stacked(Protocol):
    """The arrays of a batch that is being made; `Stack` is one."""

    def write(self, rows: Sequence[Any], start: int, origins: Iterable[Any]) -> None:
        """Writes some elements; several threads may, each its own.

        Args:
            rows: The elements.
            start: The place of the first in the batch.
            origins: The record of each, for messages.
        """
        ...

    def batch(self) -> Batch:
        """Returns the batch, once all is written."""
        ...


class Rows(ABC):
    """The records that batches are made of: how they are stacked, and their names in messages."""

    @property
    def rows_at_a_time(self) -> int:
        """The most rows to make before they are written."""
        return 1

    @abstractmethod
    def stack(self, size: int, faults: Faults, elements: Sequence[Any]) -> Stacked:
        """Returns an empty stack.

        Args:
            size: The number of elements to be written.
            faults: The rules for reads that fail, if an element has to be read to see its look.
            elements: Elements that were read.
        """

    @abstractmethod
    def empty_element(self, faults: Faults, elements: Sequence[Any]) -> Any:
        """Returns an element of zeros that looks like these, or like any other."""

    @abstractmethod
    def name(self, record: int, among: int) -> str:
        """Returns the name of a record, or of as many that follow each other."""

    @abstractmethod
    def origin(self, record: int) -> Origin | None:
        """Returns where a record comes from, if that is known."""

    @abstractmethod
    def evaluate(self, record: int) -> Any:
        """Evaluates a record alone, on the public path."""


class BatchBuilder:
    """A batch that is being made; each record of it may be read by another thread.

    Args:
        index: The number of the batch.
        records: int64[n], the records to read.
        route: The way to these.
        rows: Stacks them, and names them.
        faults: The rules for reads that fail.
        num_rows: Rows of the finished batch, if it is padded.
        padding: The padding; None for a batch as it is.

    Attributes:
        size: The number of records to read; 0 if the batch is all padding.
        number: The place of the batch among those that are read together.
        position: The position of an iterator after this batch.
        faults: As given.
    """

    def __init__(
        self,
        index: int,
        records: np.ndarray,
        route: Route,
        rows: Rows,
        faults: Faults,
        num_rows: int,
        padding: Padding | None,
    ):
        self._index, self._records, self._rows = index, records, rows
        self._route, self.faults = route, faults
        self._num_rows, self._padding = num_rows, padding
        self.size: int = len(records)
        self.number, self.position = 0, cast(Any, None)
        self._missing = self.size
        self._bad_rows: list[int] = []
        self._stack: Stacked | None = None
        self._lock = threading.Lock()

    @property
    def most_at_a_time(self) -> int:
        """The most records to read before they are written, if they are read one by one."""
        return self._rows.rows_at_a_time

    def write(self, elements: list[Any], start: int, until: float) -> int:
        """Applies the user's functions to elements, and writes them; by several threads at once.

        Args:
            elements: The elements that were read. Those written are let go at once, since the batch
                needs the memory.
            start: The place of the first among the `size` records.
            until: The time, by `time.perf_counter`, from which on the rest is left to others.

        Returns:
            The number of elements written, at least one.
        """
        first = 0
        while first < len(elements) and (not first or time.perf_counter() < until):
            # The very first record comes alone, and decides how many go at a time.
            stop = min(len(elements), first + self.most_at_a_time)
            way = self._route.part(start + first, start + stop)
            with span(READ, part=MAP if way.runs_no_function else None):
                rows = way.finish(elements[first:stop], until, self.faults)
            with span(BATCH):
                self._leave_out_bad(rows, start + first)
                self._put(rows, start + first)
            elements[first : first + len(rows)] = [None] * len(rows)
            first += len(rows)
        return first

    def way(self, start: int, stop: int) -> Route:
        """Returns the way to some of its records."""
        return self._route.part(start, stop)

    def _put(self, elements: list[Any], start: int) -> None:
        with self._lock:
            if self._stack is None:
                self._stack = self._rows.stack(self.size, self.faults, elements)
        self._stack.write(elements, start, self._records[start : start + len(elements)])

    def wrote(self, count: int) -> list[tuple[int, tuple[Batch, Any]]]:
        """Counts records that were written; after the last, gives the batch and its position."""
        with self._lock:
            self._missing -= count
            if self._missing:
                return []
            self._missing = -1  # finished: it is so once
        return [(self.number, (self.finish(), self.position))]

    def finish(self) -> Batch:
        """Returns the batch with its padding: a tree of arrays that nothing else refers to."""
        stack, self._stack = self._stack, None
        batch = (stack or self._rows.stack(0, self.faults, ())).batch()
        if self._padding is None:
            return batch
        with span(PAD):
            if self._padding.remainder != "pad":
                self._check_full(batch)
            return pad_batch(batch, self._num_rows, self._padding.rows, self._bad_rows)

    def failed(self, start: int, error: Raised) -> list[tuple[int, Raised]]:
        """Returns an error in place of the batch."""
        return [(self.number, error)]

    def _check_full(self, batch: Batch) -> None:
        """Refuses a batch that is short elsewhere than at the end of an epoch."""
        flat = FlatBatch.of(batch)
        if flat.rows < self._num_rows:
            flat.refuse(
                "a batch is short in the middle of an epoch: something stands between .batch and"
                " .shard_to that changes the order of batches.",
                remedy="shuffle, mix or concatenate before .batch, or use"
                " .batch(B, drop_remainder=True).",
            )

    def _leave_out_bad(self, rows: list[Any], start: int) -> None:
        """Puts empty elements in the places of those that could not be read, and counts them."""
        bad = [i for i, row in enumerate(rows) if type(row) is Unreadable]
        for i in bad:
            if not self.faults.may_leave_out(rows[i].error):
                raise self._named(rows[i], start + i)
        if self.faults.masks:
            self.faults.count(records=len(rows))
        if not bad:
            return
        good = [row for row in rows if type(row) is not Unreadable]
        empty = self._rows.empty_element(self.faults, good)
        for i in bad:
            record = int(self._records[start + i])
            self.faults.leave_out(rows[i], record, origin=self._rows.origin(record))
            self._bad_rows.append(start + i)
            rows[i] = empty

    def _named(self, bad: Unreadable, start: int) -> Exception:
        """Returns the error of a record, with a note that names the record.

        The record is evaluated once more: a second try that succeeds is worth knowing of. After a
        call for many has failed, the second try finds the record.
        """
        error = bad.error
        if isinstance(error, BadRecordsError):
            return error
        records = self._records[start : start + bad.among].tolist()
        for record in records:
            if (again := _error_of(self._rows.evaluate, record)) is not None:
                found = error if bad.among == 1 else again
                found.add_note(self._place(record, 1))
                return found
        again = "Reading it a second time, to find the cause, succeeded"
        if len(records) > 1:
            again = "Reading each of them a second time, to find which one it was, succeeded"
        place = self._place(records[0], len(records))
        error.add_note(f"{place}. {again}. {self.faults.advice(error)}")
        return error

    def _place(self, record: int, among: int) -> str:
        name = self._rows.name(record, among)
        return f"grain_shard: while evaluating {name}, for batch {self._index}"


def _error_of(evaluate: Callable[[int], Any], record: int) -> Exception | None:
    try:
        evaluate(record)
    except Exception as error:
        return error
    return None
