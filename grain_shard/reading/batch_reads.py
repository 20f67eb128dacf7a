"""`BatchReads`: divides the records of a pipeline's batches into tasks, which a pool runs.

The records of all batches form one sequence: this host's records of batch 0, then its records of
batch 1, and so on. Each task takes the next few records, even across the end of a batch, reads
them, and writes them to their batches. The task that writes the last missing records of a batch
also finishes the batch. All threads take the earliest records first, so the first batch is ready
soon.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

from grain_shard.errors import Raised
from grain_shard.grain_inside.routes import Elements, read_together
from grain_shard.reading.batch_builder import BatchBuilder
from grain_shard.reading.batching import Batching
from grain_shard.reading.cuts import Progress
from grain_shard.reading.faults import Faults
from grain_shard.reading.first_record import FirstRecord
from grain_shard.reading.stack import RowTemplate
from grain_shard.spans import READ, span
from grain_shard.threads.pace import ReadPace
from grain_shard.threads.pool import End, Task, Tasks
from grain_shard.trees import Batch

# The maximum number of records in one call of a source. With array_record, a record costs 25 us in
# a call for 256 records, 12 us in a call for 1024, and 10 us in a call for 2048. So larger calls
# gain little.
_RECORDS_PER_CALL = 1024
# The indices of several batches are computed together, up to this many records: a shuffle of 4096
# indices takes 0.25 ms, and a shuffle of 256 indices takes 0.14 ms.
_RECORDS_AHEAD = 4096


class BatchReads(Tasks[tuple[Batch, Progress]]):
    """The tasks that read an iterator's batches. A result is a batch and the position after it.

    Args:
        batching: Describes the batches of the pipeline.
        indices: The numbers of the batches to read.
        buffer_size: Largest number of batches that wait for the loop or are unfinished.
        pace: Decides the number of concurrent tasks, and measures the time that one record takes.
        faults: The rules for failed reads.
        first_record: The first record of the source, to read and digest beside the first batch.
    """

    def __init__(
        self,
        batching: Batching,
        indices: range,
        buffer_size: int,
        pace: ReadPace,
        *,
        faults: Faults,
        first_record: FirstRecord,
    ):
        # One thread at a time uses these, in `draw`. A batch is begun when its builder is drawn.
        self._builders = _builders(batching, indices, faults)
        self._num_batches = len(indices)
        self._begun = 0  # number of batches that were begun
        self._buffer_size, self._pace, self._faults = buffer_size, pace, faults
        # None once a task has it, or if it was read already.
        self._first_record = None if first_record.is_read else first_record
        self._reads_many = batching.reads_many
        self._batch_size = max(1, batching.records_per_batch)  # this host's records of a batch
        self._template: RowTemplate | None = None  # None before the first batch is begun
        # The records of the last begun batch that no task has yet; None if there are none.
        self._rest: _Range | None = None
        self._error: Raised | None = None  # the error of the next batch, which cannot begin

    def draw(self, limit: int) -> Task[tuple[Batch, Progress]] | None:
        # After the first task of batches, so that the first record does not delay the first batch.
        if self._first_record is not None and self._begun:
            first_record, self._first_record = self._first_record, None
            return first_record
        most, is_between_batches = self._records_at_a_time(), self._rest is None
        room = limit - self._begun
        if is_between_batches and self._error is None and room < self._room_needed(most):
            return None
        if ranges := self._take(most, limit):
            return _BatchTask(ranges, self._reads_many)
        return End(self._begun, self._error or _END) if limit > self._begun else None

    def _room_needed(self, most: int) -> int:
        """Returns for how many batches the buffer must have room before a task of `most` records.

        A call for many records costs less per record. So the next call waits until all its batches
        have room, but never for more than three quarters of the buffer: during the call, the loop
        trains on the other batches of the buffer, and on the batches that wait on the devices.
        """
        batches = most // self._batch_size if self._reads_many else 1
        left = self._num_batches - self._begun
        return max(1, min(batches, 3 * self._buffer_size // 4, left))

    def _records_at_a_time(self) -> int:
        """Returns the largest number of records for the next task."""
        if not self._reads_many:
            # Rows of a size that is not known yet are read one at a time.
            fitting = 1 if self._template is None else self._template.rows_at_a_time
            return min(self._pace.at_a_time(self._batch_size), fitting)
        # A call for many records costs less per record. So each thread's call gets an equal share
        # of the whole buffer. If the share is a batch or more, the first calls are smaller, for a
        # fast first batch: one batch, then twice as many batches each time.
        threads = self._pace.threads
        if threads > self._buffer_size:
            share = -(-self._batch_size * self._buffer_size // threads)
        else:
            share = self._batch_size * min(self._buffer_size // threads, self._begun + 1)
        return max(1, min(share, _RECORDS_PER_CALL))

    def _take(self, most: int, limit: int) -> list[_Range]:
        """Takes the next `most` records from the sequence of all batches' records.

        Fewer records are taken if the sequence ends, if a batch cannot begin, or where a batch
        begins whose number is not below `limit`.
        """
        ranges, num_batches = list[_Range](), min(limit, self._num_batches)
        while most > 0 and self._error is None:
            if self._rest is None:
                if self._begun >= num_batches:
                    break
                try:
                    builder = next(self._builders)
                except BaseException as error:
                    self._error = Raised.of(error)
                    break
                self._begun += 1
                self._template = builder.template
                self._rest = _Range(self._begun - 1, builder, 0, builder.size)
            if self._rest.number >= limit:  # an earlier batch has failed, which lowered `limit`
                break
            number, builder, start, stop = self._rest
            middle = min(start + most, stop)
            ranges.append(_Range(number, builder, start, middle))
            self._rest = _Range(number, builder, middle, stop) if middle < stop else None
            most -= middle - start
        return ranges

    def stop(self) -> None:
        self._faults.stop()


class _Range(NamedTuple):
    """A range of the records of one batch.

    Attributes:
        number: The number of the batch among the results.
        builder: The unfinished batch.
        start: Position of the first record among the records of the batch.
        stop: Position after the last record.
    """

    number: int
    builder: BatchBuilder
    start: int
    stop: int


class _BatchTask:
    """Reads ranges of records, and finishes the batches that they complete.

    Args:
        ranges: The ranges.
        reads_many: True if the source reads many records in one call.
    """

    def __init__(self, ranges: list[_Range], reads_many: bool):
        self._ranges, self._reads_many = ranges, reads_many
        self.size = sum(range_.stop - range_.start for range_ in ranges)

    def run(self) -> Iterator[tuple[int, tuple[Batch, Progress] | Raised]]:
        ranges, self._ranges = self._ranges, []
        for range_, elements in zip(ranges, self._read(ranges), strict=True):
            try:
                if range_.builder.write(elements, range_.start, range_.stop):
                    yield range_.number, (range_.builder.finish(), range_.builder.position)
            except BaseException as error:
                yield range_.number, Raised.of(error)

    def _read(self, ranges: list[_Range]) -> list[Elements | None]:
        """Returns the elements of each range, or None for a range that is still to be read.

        Several ranges are read in one call if the source can.
        """
        if len(ranges) > 1 and self._reads_many:
            # If this call fails, `BatchBuilder.write` reads each range alone. So only the batch
            # with the bad record gets the error.
            with contextlib.suppress(BaseException), span(READ):
                ways = [range_.builder.way(range_.start, range_.stop) for range_ in ranges]
                read = read_together(ways, ranges[0].builder.faults)
                return [elements or None for elements in read]
        return [None] * len(ranges)


_END = Raised(StopIteration(), None)


def _builders(batching: Batching, indices: range, faults: Faults) -> Iterator[BatchBuilder]:
    """Yields a builder for each batch. Several batches are begun together, which is faster.

    For a fast start, the first batch is begun alone, and then as many as have begun before.
    """
    begun, batch_size = 0, max(1, batching.records_per_batch)
    while begun < len(indices):
        some = indices[begun:][: max(1, min(_RECORDS_AHEAD // batch_size, begun))]
        found: list[BatchBuilder] = []
        if len(some) > 1:
            # If this fails, only the first batch is begun. So the error reaches only its own batch.
            with contextlib.suppress(Exception):
                found = batching.begin(some, faults)
        for builder in found or batching.begin(some[:1], faults):
            begun += 1
            yield builder
