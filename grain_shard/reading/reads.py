"""Batches made by concurrent reads, each of which takes the next few records.

The records of all batches form one sequence: this host's records of batch 0, then of batch 1, and
so on. A read takes the next ones, even across the end of a batch, and writes them to their batches.
A batch is complete when none of its records is missing. So the first batch is ready after a few
reads' time, and a slow record delays no other record.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from grain_shard.pace import ReadPace
from grain_shard.reading.batch_builder import BatchBuilder
from grain_shard.reading.batching import Batching
from grain_shard.reading.contents import Contents, ContentsRead
from grain_shard.reading.faults import Faults
from grain_shard.reading.read import Part, Read, records_in_time
from grain_shard.tasks import Raised, Tasks
from grain_shard.trees import Batch

# With array_record, 256 records in a call cost 25 us each, 1024 cost 12, 2048 cost 10.
_RECORDS_PER_CALL = 1024
# Routes are computed for several batches at once, because a shuffle of 4096 indices takes 0.25 ms
# and one of 256 takes 0.14 ms. Routes are computed for one batch first, then for more and more.
_RECORDS_AHEAD = 4096


class Reads(Tasks[tuple[Batch, Any]]):
    """The reads of some batches; results are batches, each with the position after it.

    Args:
        batching: The batches.
        indices: The numbers of the batches to read.
        buffer_size: Most batches that wait or are unfinished.
        pace: The number of concurrent reads, and the time that one record takes.
        position_after: Maps the index of a batch to the position after it.
        faults: The rules for failed reads.
        contents: The contents to read beside the first batch.
    """

    def __init__(
        self,
        batching: Batching,
        indices: range,
        buffer_size: int,
        pace: ReadPace,
        position_after: Callable[[int], Any],
        *,
        faults: Faults,
        contents: Contents,
    ):
        self._sequence = _Sequence(batching, indices, position_after, faults)
        self._buffer_size, self._pace, self._faults = buffer_size, pace, faults
        self._contents = None if contents.is_read else contents
        self._reads_many = batching.reads_many
        self._batch_size = max(1, batching.records_per_batch)
        self._batches_in_a_call = 1  # starts at 1 for a fast first batch, then doubles
        self._lock = threading.Lock()
        self._left: list[Part] = []  # parts that a read left to the next reads
        self._under_way = 0  # number of reads

    @property
    def room_wanted(self) -> int:
        if self._draws_contents or self._left or self._sequence.is_inside_a_batch:
            return 0
        batches_left = self._sequence.batches_left
        if not batches_left:
            # This is the end, unless a read under way leaves records to other reads.
            return self._buffer_size + 1 if self._under_way else 0
        if not self._reads_many:
            return 1
        # A large call is worth a wait until three quarters of the buffer are free for it. The other
        # batches, and those on the devices, feed the training loop during the call.
        batches = self._records_at_a_time() // self._batch_size
        return min(batches_left, max(1, min(batches, 3 * self._buffer_size // 4)))

    @property
    def _draws_contents(self) -> bool:
        return self._contents is not None and self._sequence.begun > 0

    def draw(self, room: int) -> Read | ContentsRead:
        if self._contents is not None and self._draws_contents:
            contents, self._contents = self._contents, None
            return ContentsRead(contents)
        with self._lock:
            parts = self._draw_left()
        begun = self._sequence.begun
        if not parts:
            parts = self._sequence.take(self._records_at_a_time(), room)
            self._batches_in_a_call = min(2 * self._batches_in_a_call, self._buffer_size)
        if not parts:
            raise self._sequence.failure or StopIteration
        with self._lock:
            self._under_way += 1
        return Read(parts, self._reads_many, self._sequence.begun - begun)

    def done(self, task: Read | ContentsRead) -> bool:
        if isinstance(task, ContentsRead):
            return False
        with self._lock:
            self._left += task.left
            self._under_way -= 1
            return bool(task.left) or not self._under_way

    def end(self) -> None:
        self._sequence.end()

    def stop(self) -> None:
        self._faults.stop()

    def _draw_left(self) -> list[Part]:
        """Draws an equal share of the earliest records that other reads have left."""
        if not self._left:
            return []
        part = min(self._left, key=lambda part: (part.sink.number, part.start))
        self._left.remove(part)
        share = -(-(part.stop - part.start) // self._pace.threads)
        drawn, rest = part.cut(min(share, records_in_time(self._pace.seconds_per_record)))
        self._left += rest
        return [drawn]

    def _records_at_a_time(self) -> int:
        """Returns the number of records for the next read."""
        if not self._reads_many:
            return min(
                records_in_time(self._pace.seconds_per_record), self._sequence.most_at_a_time
            )
        # A call takes about as long for many records as for few, so each thread gets an equal part.
        threads = self._pace.threads
        if threads > self._buffer_size:
            part = -(-self._batch_size * self._buffer_size // threads)
        else:
            part = self._batch_size * min(self._buffer_size // threads, self._batches_in_a_call)
        return max(1, min(part, _RECORDS_PER_CALL))


class _Sequence:
    """The records of some batches, one batch after the other.

    Args:
        batching: As for `Reads`.
        indices: As for `Reads`.
        position_after: As for `Reads`.
        faults: As for `Reads`.

    Attributes:
        begun: Batches from which records were taken.
        failure: An error in finding the records of the next batch. It is raised only after all
            earlier records are taken, because they belong to earlier batches.
    """

    def __init__(
        self,
        batching: Batching,
        indices: range,
        position_after: Callable[[int], Any],
        faults: Faults,
    ):
        self._batching, self._indices, self._faults = batching, indices, faults
        self._position_after = position_after
        self._ahead: deque[BatchBuilder] = deque()  # the next batches, with their routes
        self.begun = 0
        self._next: Part | None = None  # the rest of the last batch begun
        self.most_at_a_time = 1  # `most_at_a_time` of the last batch begun
        self.failure: BaseException | None = None
        self._has_ended = False

    def end(self) -> None:
        """Stops the sequence, even inside the batch last begun."""
        self._has_ended = True

    @property
    def is_inside_a_batch(self) -> bool:
        """True if the next record belongs to a batch that is already begun."""
        return self._next is not None and not self._has_ended

    @property
    def batches_left(self) -> int:
        """Batches that can still be begun."""
        is_over = self._has_ended or self.failure is not None
        return 0 if is_over else len(self._indices) - self.begun

    def take(self, most: int, room: int) -> list[Part]:
        """Takes the next records, which begin at most `room` batches."""
        parts: list[Part] = []
        begins = 0
        while most > 0 and not self._has_ended and self.failure is None:
            if self._next is None:
                if begins == room or not self.batches_left:
                    break
                try:
                    self._next = self._begin()
                except BaseException as error:
                    self.failure = Raised.of(error).error
                    break
                begins += 1
            drawn, rest = self._next.cut(most)
            self._next = rest[0] if rest else None
            most -= drawn.stop - drawn.start
            parts.append(drawn)
        return parts

    def _begin(self) -> Part:
        if not self._ahead:
            self._ahead.extend(self._found())
        builder = self._ahead.popleft()
        builder.number = self.begun
        builder.position = self._position_after(self._indices[builder.number])
        self.most_at_a_time, self.begun = builder.most_at_a_time, self.begun + 1
        return Part(builder, 0, builder.size)

    def _found(self) -> list[BatchBuilder]:
        """Returns the next few batches; if an error prevents that, tries the next one alone."""
        most = _RECORDS_AHEAD // max(1, self._batching.records_per_batch)
        count = max(1, min(most, self.begun))
        indices = self._indices[self.begun :][:count]
        if len(indices) > 1:
            with contextlib.suppress(Exception):
                return self._batching.begin(indices, self._faults)
        return self._batching.begin(indices[:1], self._faults)
