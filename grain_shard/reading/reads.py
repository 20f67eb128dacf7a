"""`Reads`: divides the records of a pipeline's batches into reads, which threads run side by side.

The records of all batches form one sequence: this host's records of batch 0, then its records of
batch 1, and so on. Each read takes the next few records, even across the end of a batch, and writes
them to their batches. A batch is complete when none of its records is missing. All threads take the
earliest records first, so the first batch is ready soon. A slow record delays no other thread.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from grain_shard.reading.batch_builder import BatchBuilder
from grain_shard.reading.batching import Batching
from grain_shard.reading.cuts import Progress
from grain_shard.reading.faults import Faults
from grain_shard.reading.first_record import FirstRecord
from grain_shard.reading.read import Part, Read, records_in_time
from grain_shard.threads.pace import ReadPace
from grain_shard.threads.results import Results, ResultTasks
from grain_shard.threads.tasks import Raised
from grain_shard.trees import Batch

# The most records in one call of a source. With array_record, a record costs 25 us in a call for
# 256 records, 12 us in a call for 1024, and 10 us in a call for 2048. So larger calls gain little.
_RECORDS_PER_CALL = 1024
# The indices of several batches are computed together, up to this many records: a shuffle of 4096
# indices takes 0.25 ms, and a shuffle of 256 indices takes 0.14 ms. For a fast start, the
# first batch is computed alone. Then more and more batches are computed at once.
_RECORDS_AHEAD = 4096


class Reads(ResultTasks[tuple[Batch, Progress]]):
    """The tasks that read an iterator's batches. A result is a batch and the position after it.

    Args:
        batching: Describes the batches of the pipeline.
        indices: The numbers of the batches to read.
        buffer_size: Largest number of batches that wait for the loop or are unfinished.
        pace: Decides the number of concurrent reads, and measures the time that one record takes.
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
        super().__init__(buffer_size)
        self._sequence = _Sequence(batching, indices, faults, self.results)
        self._buffer_size, self._pace, self._faults = buffer_size, pace, faults
        self._first_record = None if first_record.is_read else first_record
        self._reads_many = batching.reads_many
        self._batch_size = max(1, batching.records_per_batch)
        self._lock = threading.Lock()
        self._left: list[Part] = []  # parts that a read left to the next reads
        self._under_way = 0  # number of reads that were drawn and are not done

    def draw(self) -> Read | FirstRecord | None:
        sequence, results = self._sequence, self.results
        lingers = self._pace.threads <= self._buffer_size // 2
        while results.wait_for_room(self._can_draw, lingers=lingers):
            if (first_record := self._first_record) and sequence.begun:
                self._first_record = None
                return first_record
            with self._lock:
                parts, more_may_be_left = self._draw_left(), self._under_way > 0
            begun = sequence.begun
            if parts := parts or sequence.take(self._records_at_a_time(), results.room):
                with self._lock:
                    self._under_way += 1
                results.begin(sequence.begun - begun)
                return Read(parts, self._reads_many, self._has_read)
            if not more_may_be_left:
                results.end(sequence.end or Raised(StopIteration(), None))
        return None

    def _can_draw(self, room: int) -> bool:
        """Returns True if `draw` has something to return: a task, or that none is left.

        Args:
            room: Most batches that the task may begin.
        """
        sequence, has_ended = self._sequence, self._has_ended
        with self._lock:
            if self._left or (self._first_record and sequence.begun):
                return True
            if sequence.next and not has_ended:
                return True
            batches_left = 0 if has_ended else sequence.num_batches - sequence.begun
            if not batches_left:
                # All records are drawn, but a read under way may hand some of them back.
                return not self._under_way
        # A call for many records costs less for each record. So the next call waits until the
        # buffer has room for all batches of the call. It waits for three quarters of the buffer at
        # most. During the call, the loop trains on the other batches of the buffer and on the
        # batches on the devices.
        batches = self._records_at_a_time() // self._batch_size if self._reads_many else 1
        return room >= min(batches_left, max(1, min(batches, 3 * self._buffer_size // 4)))

    @property
    def _has_ended(self) -> bool:
        """True if no more records are taken, except for those that a read has left."""
        return self._sequence.end is not None or self.results.has_end

    def _has_read(self, read: Read) -> None:
        """Takes over the ranges that a read has left."""
        with self._lock:
            self._left += read.left
            self._under_way -= 1
            may_draw = bool(read.left) or not self._under_way
        if may_draw:
            self.results.check_room_again()

    def stop(self) -> None:
        super().stop()
        self._faults.stop()

    def abort(self, error: Raised) -> None:
        super().abort(error)
        self._faults.stop()

    def _draw_left(self) -> list[Part]:
        """Takes a share of the earliest records that an earlier read began, but did not finish.

        The records are divided equally among the threads, so that slow records are read side by
        side.

        Returns:
            A list with one range of records; an empty list if every read has finished its records.
        """
        if not self._left:
            return []
        part = min(self._left, key=lambda part: (part.sink.number, part.start))
        self._left.remove(part)
        share = -(-(part.stop - part.start) // self._pace.threads)
        drawn, rest = part.cut(min(share, records_in_time(self._pace.seconds_per_record)))
        self._left += rest
        return [drawn]

    def _records_at_a_time(self) -> int:
        """Returns the largest number of records for the next read."""
        if not self._reads_many:
            return min(
                records_in_time(self._pace.seconds_per_record), self._sequence.most_at_a_time
            )
        # A call for many records costs less for each record. So each thread's call gets an equal
        # share of the whole buffer. If the share is a batch or more, the first calls are smaller,
        # for a fast first batch: one batch, then twice as many batches each time.
        threads = self._pace.threads
        if threads > self._buffer_size:
            part = -(-self._batch_size * self._buffer_size // threads)
        else:
            part = self._batch_size * min(self._buffer_size // threads, self._sequence.begun + 1)
        return max(1, min(part, _RECORDS_PER_CALL))


class _Sequence:
    """The records of an iterator's batches as one sequence, from which reads take the next ones.

    Args:
        batching: Describes the batches of the pipeline.
        indices: The numbers of the batches.
        faults: The rules for failed reads.
        results: The buffer for the finished batches.

    Attributes:
        num_batches: Number of batches.
        begun: Number of batches from which records were taken.
        next: The records of the last begun batch that no read has yet; None if there are none.
        most_at_a_time: Largest number of records of a read, if records are read one by one. It
            follows from the size of a row.
        end: The error that was raised when the next batch was begun; None without one. It is raised
            to the user only after all earlier batches. Once it is set, no record is taken, even of
            a begun batch.
    """

    def __init__(
        self,
        batching: Batching,
        indices: range,
        faults: Faults,
        results: Results[tuple[Batch, Progress]],
    ):
        self._builders = _builders(batching, indices, faults, results)
        self.num_batches: int = len(indices)
        self.begun, self.most_at_a_time = 0, 1
        self.next: Part | None = None
        self.end: Raised | None = None

    def take(self, most: int, room: int) -> list[Part]:
        """Takes the next records, and begins their batches.

        An error in beginning a batch is not raised, but kept as `end`.

        Args:
            most: Largest number of records to take.
            room: Largest number of batches to begin.

        Returns:
            A list of ranges, one for each batch; empty if no record can be taken.
        """
        parts = list[Part]()
        last = min(self.begun + room, self.num_batches)
        while most > 0 and self.end is None and (self.next or self.begun < last):
            if self.next is None:
                try:
                    builder = next(self._builders)
                except BaseException as error:
                    self.end = Raised.of(error)
                    break
                self.begun, self.most_at_a_time = self.begun + 1, builder.template.rows_at_a_time
                self.next = Part(builder, 0, builder.size)
            drawn, rest = self.next.cut(most)
            self.next = rest[0] if rest else None
            most -= drawn.stop - drawn.start
            parts.append(drawn)
        return parts


def _builders(
    batching: Batching,
    indices: range,
    faults: Faults,
    results: Results[tuple[Batch, Progress]],
) -> Iterator[BatchBuilder]:
    """Yields a builder for each batch. The records of several batches are found together."""
    begun, batch_size = 0, max(1, batching.records_per_batch)
    while begun < len(indices):
        some = indices[begun:][: max(1, min(_RECORDS_AHEAD // batch_size, begun))]
        found: list[BatchBuilder] = []
        if len(some) > 1:
            # If an error is raised for several batches together, only the first one is begun.
            with contextlib.suppress(Exception):
                found = batching.begin(some, faults)
        for builder in found or batching.begin(some[:1], faults):
            builder.number, builder.results, begun = begun, results, begun + 1
            yield builder
