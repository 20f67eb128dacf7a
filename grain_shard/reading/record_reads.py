"""`RecordReads`: the records of a stream, read by the rules for failed reads.

Grain's ``.to_iter_dataset()`` reads these records in place of the user's. To find a record, its
index is followed through shuffles, slices and repeats up to the source. Grain follows one index at
a time, which takes longer than most transformations of a record. Here many indices are followed at
once.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from grain_shard.errors import Raised, noting
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import Route, route
from grain_shard.reading.faults import FaultCounts, Faults
from grain_shard.reading.origin import name_in
from grain_shard.threads.contexts import Contexts

# The indices of this many records are computed together, because a shuffle of one index takes about
# as long as a shuffle of 256 indices: 0.14 ms.
_BLOCK = 256


def bounded(options: grain.ReadOptions, *, threads: int, records: int) -> grain.ReadOptions:
    """Returns read options that read ahead no more than a batch needs.

    Args:
        options: The user's options. Numbers that the user has set are kept, if they are smaller.
        threads: The maximum number of threads. With fewer than 2, no thread reads ahead.
        records: The maximum number of records ahead.

    Example:
        >>> bounded(grain.ReadOptions(), threads=16, records=40)
        ReadOptions(num_threads=16, prefetch_buffer_size=40)
        >>> bounded(grain.ReadOptions(num_threads=2), threads=16, records=40)
        ReadOptions(num_threads=2, prefetch_buffer_size=40)
    """
    threads_set, records_set = nodes.options_set_by_user(options)
    records = min(records_set or records, records)
    threads = min(threads_set or threads, threads, records)
    if threads < 2 or not nodes.has_threads(options):
        return grain.ReadOptions(0, 0)
    return grain.ReadOptions(threads, records)


def record_stream(
    records: grain.MapDataset,
    options: grain.ReadOptions,
    faults: Faults,
    *,
    threads: int,
    ahead: int,
    feed: int | None = None,
) -> grain.IterDataset:
    """Returns ``records.to_iter_dataset(options)``, with our rules for failed reads.

    Args:
        records: The records.
        options: The user's read options.
        faults: The rules for failed reads.
        threads: The maximum number of threads that read ahead.
        ahead: The maximum number of records that are read ahead, or in one call if the source reads
            many in a call.
        feed: Number of the feed; None if the stream is not a feed.

    Returns:
        The stream. Its only parent is a `RecordReads`.
    """
    options = bounded(options, threads=threads, records=ahead)
    # A bad record that is left out counts for the turn of its feed (the feed's rows of one batch).
    # The turn is known only if the feed's own thread reads the record.
    if nodes.has_threads(options) and not faults.masks:
        return RecordReads(records, faults, feed, Contexts()).to_iter_dataset(options)
    reads = RecordReads(records, faults, feed, None)
    return RecordStream(reads, ahead if reads.reads_many else _BLOCK)


class RecordReads(grain.MapDataset):
    """The same records, read by the rules for failed reads.

    A failed read is tried again. An error names its record. A record that is left out is None, like
    a record that a filter drops: Grain's stream skips it.

    Args:
        records: The records.
        faults: The rules for failed reads.
        feed: Number of the feed; None if the stream is not a feed.
        contexts: The contexts to enter for each read, because Grain's threads read the records;
            None if the calling thread is in the right contexts already.

    Attributes:
        reads_many: True if one call of the source for many records costs less than many calls.
    """

    def __init__(
        self, records: grain.MapDataset, faults: Faults, feed: int | None, contexts: Contexts | None
    ):
        super().__init__(records)
        self._records, self._faults, self._feed, self._contexts = records, faults, feed, contexts
        # Caches the routes of the last few blocks of `_BLOCK` records, by a block's first record.
        self._block = functools.lru_cache(4)(functools.partial(_block, records))
        self.reads_many: bool = route(records, np.arange(0)).reads_many

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        read = self._read
        return read(index) if self._contexts is None else self._contexts.run(read, index)

    def _read(self, index: int) -> Any:
        return next(self.elements(index, 1))

    def elements(self, start: int, most: int) -> Iterator[Any]:
        """Yields all records from `start` on; None for each record that is left out.

        Args:
            start: Index of the first record.
            most: The maximum number of records that are looked up together, and read in one call if
                the source reads many in a call.
        """
        faults = self._faults
        stop = start  # end of the records that were looked up so far
        while stop < len(self):
            start, block_start = stop, stop - stop % _BLOCK
            stop = min(start + most, block_start + _BLOCK, len(self))
            way = self._block(block_start).part(start - block_start, stop - block_start)
            elements = iter(way.each(faults))
            for index in range(start, stop):
                try:
                    element = next(elements)
                except BaseException as error:  # for an `Exception`, `each` yields an `Unreadable`
                    error.add_note(f"grain_shard: while evaluating {self._name(index)}")
                    raise
                if faults.masks:
                    faults.count(FaultCounts(records=1))
                if type(element) is Unreadable:
                    self.leave_out(element, index)
                    element = None  # as for a record that a filter drops
                yield element

    def _name(self, index: int) -> str:
        return name_in(self._records, "the dataset before .to_iter_dataset", index)

    def leave_out(self, bad: Unreadable, index: int) -> None:
        """Counts a record that is left out, or raises its error if it may not be left out.

        Raises:
            BadRecordsError: There are too many bad records.
            BaseException: The error of `bad`.
        """
        if not self._faults.may_leave_out(bad.error):
            with noting(f"while evaluating {self._name(index)}"):
                # A StopIteration becomes a RuntimeError: it would look like the end of the stream.
                Raised.of(bad.error).throw()
        self._faults.leave_out(bad, self._records, index, self._feed)


class RecordStream(grain.IterDataset):
    """The records as a stream that is read in the calling thread.

    This replaces ``.to_iter_dataset`` with 0 threads, which takes 100 us per record, ten times as
    long as reading a record from memory.

    Args:
        reads: The records.
        most: The maximum number of records that are looked up together.
    """

    def __init__(self, reads: RecordReads, most: int):
        super().__init__(reads)
        self._reads, self._most = reads, most

    def __iter__(self) -> grain.DatasetIterator:
        return _RecordIterator(self._reads, self._most)


class _RecordIterator(grain.DatasetIterator):
    """An iterator over the records, with a state of the same form as Grain's."""

    def __init__(self, reads: RecordReads, most: int):
        super().__init__()
        self._reads, self._most, self._next_index = reads, most, 0
        self._elements: Iterator[Any] | None = None  # from `_next_index` on; None before the first

    def __next__(self) -> Any:
        while self._next_index < len(self._reads):
            if self._elements is None:
                self._elements = self._reads.elements(self._next_index, self._most)
            try:
                element = next(self._elements)
            except BaseException:
                self._elements = None  # the next call reads the same record again
                raise
            self._next_index += 1
            if element is not None:
                return element
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next_index}

    def set_state(self, state: dict[str, Any]) -> None:
        index, length = state["next_index"], len(self._reads)
        if not 0 <= index <= length:
            raise IndexError(f"there is no record {index}: the dataset has {length} records")
        self._elements, self._next_index = None, index


def _block(records: grain.MapDataset, first: int) -> Route:
    return route(records, np.arange(first, min(first + _BLOCK, len(records))))
