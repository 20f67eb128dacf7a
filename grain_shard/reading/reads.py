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

from grain_shard.pace import ReadPace
from grain_shard.reading.batch_builder import BatchBuilder
from grain_shard.reading.batching import Batching
from grain_shard.reading.contents import Contents
from grain_shard.reading.cuts import Progress
from grain_shard.reading.faults import Faults
from grain_shard.reading.read import Part, Read, records_in_time
from grain_shard.tasks import Raised, Tasks
from grain_shard.trees import Batch

# The most records in one call of a source. With array_record, a record costs 25 us in a call for
# 256 records, 12 us in a call for 1024, and 10 us in a call for 2048. So larger calls gain little.
_RECORDS_PER_CALL = 1024
# The indices of several batches are computed together, up to this many records: a shuffle of 4096
# indices takes 0.25 ms, and a shuffle of 256 indices takes 0.14 ms. For a fast start, the
# first batch is computed alone. Then more and more batches are computed at once.
_RECORDS_AHEAD = 4096


class Reads(Tasks[tuple[Batch, Progress]]):
    """The tasks that read an iterator's batches. A result is a batch and the position after it.

    Args:
        batching: Describes the batches of the pipeline.
        indices: The numbers of the batches to read.
        buffer_size: Largest number of batches that wait for the loop or are unfinished.
        pace: Decides the number of concurrent reads, and measures the time that one record takes.
        faults: The rules for failed reads.
        contents: Two records of the source to read and digest beside the first batch.
    """

    def __init__(
        self,
        batching: Batching,
        indices: range,
        buffer_size: int,
        pace: ReadPace,
        *,
        faults: Faults,
        contents: Contents,
    ):
        self._sequence = _Sequence(batching, indices, faults)
        self._buffer_size, self._pace, self._faults = buffer_size, pace, faults
        self._contents = None if contents.is_read else contents
        self._reads_many = batching.reads_many
        self._batch_size = max(1, batching.records_per_batch)
        self._lock = threading.Lock()
        self._left: list[Part] = []  # parts that a read left to the next reads
        self._under_way = 0  # number of reads that were drawn and are not done

    @property
    def room_wanted(self) -> int:
        sequence = self._sequence
        has_ended = sequence.end is not None
        if self._left or (self._contents and sequence.begun) or (sequence.next and not has_ended):
            return 0
        batches_left = 0 if has_ended else sequence.num_batches - sequence.begun
        if not batches_left:
            # All records are drawn, but a read under way may hand some of them back. Until all
            # reads are done, more room is wanted than the buffer has, so no thread calls `draw`.
            # After that, no room is wanted, and the next `draw` reports the end.
            return self._buffer_size + 1 if self._under_way else 0
        if not self._reads_many:
            return 1
        # A call for many records costs less for each record. So the next call waits until the
        # buffer has room for all batches of the call. It waits for three quarters of the buffer at
        # most. During the call, the loop trains on the other batches of the buffer and on the
        # batches on the devices.
        batches = self._records_at_a_time() // self._batch_size
        return min(batches_left, max(1, min(batches, 3 * self._buffer_size // 4)))

    def draw(self, room: int) -> Read | Contents | None:
        begun = self._sequence.begun
        if (contents := self._contents) and begun:
            self._contents = None
            return contents
        with self._lock:
            parts, more_may_be_left = self._draw_left(), self._under_way > 0
        parts = parts or self._sequence.take(self._records_at_a_time(), room)
        if not parts and more_may_be_left:
            return None  # a read has failed since the stage looked at `room_wanted`
        if not parts:
            raise self._sequence.end or StopIteration
        with self._lock:
            self._under_way += 1
        return Read(parts, self._reads_many, self._sequence.begun - begun)

    def done(self, task: Read | Contents) -> bool:
        if isinstance(task, Contents):
            return False
        with self._lock:
            self._left += task.left
            self._under_way -= 1
            return bool(task.left) or not self._under_way

    def end(self) -> None:
        self._sequence.end = self._sequence.end or StopIteration()

    def stop(self) -> None:
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

    Attributes:
        num_batches: Number of batches.
        begun: Number of batches from which records were taken.
        next: The records of the last begun batch that no read has yet; None if there are none.
        most_at_a_time: Largest number of records of a read, if records are read one by one. It
            follows from the size of a row.
        end: StopIteration, or the error that was raised when the next batch was begun. It is raised
            to the user only after all earlier batches. None while records may be taken. Once it is
            set, no record is taken, even of a begun batch.
    """

    def __init__(self, batching: Batching, indices: range, faults: Faults):
        self._builders = _builders(batching, indices, faults)
        self.num_batches: int = len(indices)
        self.begun, self.most_at_a_time = 0, 1
        self.next: Part | None = None
        self.end: BaseException | None = None

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
                    self.end = Raised.of(error).error
                    break
                self.begun, self.most_at_a_time = self.begun + 1, builder.template.rows_at_a_time
                self.next = Part(builder, 0, builder.size)
            drawn, rest = self.next.cut(most)
            self.next = rest[0] if rest else None
            most -= drawn.stop - drawn.start
            parts.append(drawn)
        return parts


def _builders(batching: Batching, indices: range, faults: Faults) -> Iterator[BatchBuilder]:
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
            builder.number, begun = begun, begun + 1
            yield builder
