"""`RecordStream`: the records of a `grain.MapDataset` as a stream, looked up many at a time.

To find a record, its index is followed through shuffles, slices and repeats up to the source. Grain
does this for one record at a time. That takes longer than most transformations of the record. So
`RecordStream` follows the indices of many records at once.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import grain

from grain_shard.errors import noting
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.reading.faults import FaultCounts
from grain_shard.reading.origin import name_in
from grain_shard.reading.shared_reads import Limits, SharedReads
from grain_shard.threads.tasks import Raised


class RecordStream(grain.IterDataset):
    """A faster replacement of Grain's ``.to_iter_dataset()``, with the same elements.

    Args:
        reads: Evaluates the records of all feeds of a host.
        feed: Number of the feed; None in a stream that is no feed.
        records: The records.
        limits: The limits of reading ahead that the user has set.

    Attributes:
        last: Index of the record that was yielded last.
    """

    def __init__(
        self, reads: SharedReads, feed: int | None, records: grain.MapDataset, limits: Limits
    ):
        super().__init__(records)
        self.reads: SharedReads = reads
        self.feed: int | None = feed
        self.records: grain.MapDataset = records
        self.limits: Limits = limits
        self.last: int = -1

    def __iter__(self) -> RecordIterator:
        return RecordIterator(self)

    def leave_out(self, bad: Unreadable) -> None:
        """Leaves out the last record, whose row failed after the record was yielded.

        Raises:
            BadRecordsError: There are too many bad records.
            BaseException: The error of the row, if the rules do not let the record be left out.
        """
        faults = self.reads.faults
        if not faults.may_leave_out(bad.error):
            with noting(f"while evaluating {self.name_of(self.last)}"):
                Raised.of(bad.error).throw()
        faults.leave_out(bad, self.records, self.last, self.feed)

    def name_of(self, index: int) -> str:
        """Returns the name of a record for messages."""
        return name_in(self.records, "the dataset before .to_iter_dataset", index)


class RecordIterator(grain.DatasetIterator):
    """An iterator over records, whose state has the form of Grain's own state."""

    def __init__(self, stream: RecordStream):
        super().__init__()
        self._stream, self._length, self._next_index = stream, len(stream.records), 0
        # Yields the elements from `_next_index` on; None if the reads from this index on have not
        # begun.
        self._next_elements: Generator[Any] | None = None

    def __next__(self) -> Any:
        stream, faults = self._stream, self._stream.reads.faults
        while self._next_index < self._length:
            if self._next_elements is None:
                self._next_elements = stream.reads.elements(
                    stream.records, self._next_index, stream.limits
                )
            element = None
            try:
                element = next(self._next_elements)
                if type(element) is Unreadable and not faults.may_leave_out(element.error):
                    # `Raised.of` makes a RuntimeError of a StopIteration, because a StopIteration
                    # would look like the end of the feed.
                    Raised.of(element.error).throw()
            except BaseException as error:
                self._next_elements = None  # the next call reads the same record again
                error.add_note(f"grain_shard: while evaluating {self._name(element)}")
                raise
            index, self._next_index = self._next_index, self._next_index + 1
            if faults.masks:
                faults.count(FaultCounts(records=1))
            if type(element) is Unreadable:
                faults.leave_out(element, stream.records, index, stream.feed)
            elif element is not None:  # None: a filter left the record out, and Grain skips it, too
                stream.last = index
                return element
        raise StopIteration

    def _name(self, element: Any) -> str:
        """Returns the name of the next record, for an error.

        Args:
            element: The record's `Unreadable` element, which may stand for several records; None if
                there is no element.
        """
        name = self._stream.name_of(self._next_index)
        among = element.among if type(element) is Unreadable else 1
        return name if among == 1 else f"one of {among} records, the first of which is {name}"

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next_index}

    def set_state(self, state: dict[str, Any]) -> None:
        index = state["next_index"]
        if not 0 <= index <= self._length:
            raise IndexError(f"there is no record {index}: the dataset has {self._length} records")
        self._next_elements, self._next_index = None, index

    def close(self) -> None:
        self._next_elements = None
        super().close()
