"""Batches made by reads that go side by side, each of which takes the next few records.

The records of all batches stand in one sequence: those of batch 0 that this host holds, those of
batch 1, and so on. A read takes the next ones, whether they end with a batch or not, and writes
what becomes of them where it belongs. A batch is complete when none of its records is missing. So
the first batch is there after a few reads' time, and a slow record holds up no other.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grain_shard.pace import ReadPace
from grain_shard.reading.faults import Faults
from grain_shard.reading.late import Lateness
from grain_shard.reading.row_dataset import BatchMapDataset, MadeBatch, Piece
from grain_shard.tasks import Raised, Task, Tasks
from grain_shard.trees import Batch

# Records that are read one by one go together for about so long, as each read costs some
# microseconds; not for longer, so that a few slow records are read side by side. A read that has
# taken twice as long leaves the rest of its records to whoever comes next.
_READ_S = 4e-3
# Of array_record, 256 records in a call cost 25 us each, 1024 cost 12, 2048 cost 10.
_RECORDS_PER_CALL = 1024
# The ways to the records of a few batches are found at once, as those to 1024 take hardly longer
# than those to 256: 0.55 and 0.4 ms through a shuffle.
_RECORDS_AHEAD = 1024


class Reads(Tasks[tuple[Batch, Any]]):
    """The reads of some batches; results are batches, each with the position after it.

    Args:
        reader: Reads them.
        indices: Which batches.
        buffer_size: How many of them may wait or be in the making.
        pace: How many reads go side by side, and how long one record takes.
        position_after: From the index of a batch to the position after it.
        reread_slow: Whether a source may be asked a second time for what comes late.
        faults: What becomes of records that cannot be had.
    """

    def __init__(
        self,
        reader: BatchMapDataset,
        indices: range,
        buffer_size: int,
        pace: ReadPace,
        position_after: Callable[[int], Any],
        *,
        reread_slow: bool,
        faults: Faults,
    ):
        self._reader, self._indices, self._buffer_size = reader, indices, buffer_size
        self._pace, self._position_after, self._faults = pace, position_after, faults
        self._reads_many, self._batch_size = reader.reads_many, max(1, reader.records_per_batch)
        self._ahead: deque[MadeBatch] = deque()  # those that come next, found already
        self._begun = 0  # batches
        self._next: _Part | None = None  # what is not drawn yet of the last batch begun
        self._at_a_time = 1  # `most_at_a_time` of the last one
        self._batches_in_a_call = 1  # the first comes alone, to be there soon; then they double
        self._failure: BaseException | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._left: list[_Part] = []  # what reads have left to others
        self._under_way: set[_Read] = set()
        self.lateness = Lateness()
        self._asks_again = reread_slow and reader.only_asks_sources
        self._look_at = 0.0  # when one of those that are under way may be late, at the earliest
        self._late: _Request | None = None  # to be asked for again by whoever draws next

    @property
    def room_wanted(self) -> int:
        if self._asks_again:
            self._look_for_late()
        if self._late is not None:
            return 0
        batches_left = len(self._indices) - self._begun
        if self._left or (self._next is not None and not self._ended):
            return 0
        if self._ended or self._failure is not None or not batches_left:
            # The end, unless a read that is under way leaves something.
            return self._buffer_size + 1 if self._is_under_way() else 0
        if not self._reads_many:
            return 1
        # A large call is worth waiting for, until three quarters of the buffer are free for it. The
        # rest, and what waits on the devices, feeds the training loop while the call lasts.
        batches = self._records_at_a_time() // self._batch_size
        return min(batches_left, max(1, min(batches, 3 * self._buffer_size // 4)))

    @property
    def look_again_s(self) -> float | None:
        if not (self._asks_again and self._under_way):
            return None
        return max(0.0, self._look_at - time.perf_counter())

    def draw(self, room: int) -> Task[tuple[Batch, Any]]:
        begun = self._begun
        late, self._late = self._late, None
        if late is not None:
            # Of one that has been answered in the meantime there is nothing to do.
            task = _Read(self._reader, late.parts if late.ask_again() else [], 0, late)
        else:
            with self._lock:
                parts = self._draw_left()
            parts = parts or self._draw_next(room)
            if not parts:
                raise self._failure or StopIteration
            task = _Read(self._reader, parts, self._begun - begun)
        with self._lock:
            self._under_way.add(task)
        return task

    def done(self, task: _Read) -> bool:
        with self._lock:
            self._left += task.left
            self._under_way.remove(task)
            for answer in task.answers:
                self.lateness.took(*answer)
            return bool(task.left) or not self._is_under_way()

    def _is_under_way(self) -> bool:
        """Whether a read may still give something."""
        return any(not read.has_lost for read in self._under_way)

    def _look_for_late(self) -> None:
        """Looks whether a read has taken too long, and so should be asked for again."""
        now = time.perf_counter()
        if now < self._look_at or self._late is not None:
            return
        with self._lock:
            requests = [read.request for read in self._under_way]
            asked = [r for r in requests if r is not None and r.can_ask_again]
            late = [r for r in asked if self.lateness.is_late(r.start, now)]
            if late:
                # The one that the loop waits for first.
                self._late = min(late, key=lambda r: (r.parts[0].batch.number, r.parts[0].start))
                self.lateness.asks_again()
            else:
                patience_s = self.lateness.patience_s
                earliest = min((r.start for r in asked), default=now) + patience_s
                self._look_at = max(earliest, now + patience_s / 4)

    def end(self) -> None:
        self._ended = True

    def stop(self) -> None:
        self._faults.stop()

    def _draw_left(self) -> list[_Part]:
        """Something that another read has left, the earliest first: an equal share of it."""
        if not self._left:
            return []
        part = min(self._left, key=lambda part: (part.batch.number, part.start))
        self._left.remove(part)
        share = -(-(part.stop - part.start) // self._pace.threads)
        drawn, rest = part.cut(min(share, self._records_in_time()))
        self._left += rest
        return [drawn]

    def _draw_next(self, room: int) -> list[_Part]:
        """The next records of the sequence. It may be fewer than wanted, and with them a failure.

        They belong to batches that come before the failure, so it is kept until they are drawn.
        """
        parts: list[_Part] = []
        most, begins = self._records_at_a_time(), 0
        while most > 0 and not self._ended and self._failure is None:
            if self._next is None:
                if begins == room or self._begun == len(self._indices):
                    break
                try:
                    self._next = self._begin()
                except BaseException as error:
                    self._failure = Raised.of(error).error
                    break
                begins += 1
            drawn, rest = self._next.cut(most)
            self._next = rest[0] if rest else None
            most -= drawn.stop - drawn.start
            parts.append(drawn)
        self._batches_in_a_call = min(2 * self._batches_in_a_call, self._buffer_size)
        return parts

    def _begin(self) -> _Part:
        if not self._ahead:
            self._ahead.extend(self._found())
        made, number = self._ahead.popleft(), self._begun
        self._at_a_time, self._begun = made.most_at_a_time, number + 1
        position = self._position_after(self._indices[number])
        return _Part(_Counted(made, number, position), 0, made.size)

    def _found(self) -> list[MadeBatch]:
        """The next few batches; if they can't be found, the next one alone, which may be."""
        indices = self._indices[self._begun :][: max(1, _RECORDS_AHEAD // self._batch_size)]
        if len(indices) > 1:
            with contextlib.suppress(Exception):
                return self._reader.begin(indices, self._faults)
        return self._reader.begin(indices[:1], self._faults)

    def _records_at_a_time(self) -> int:
        """How many records the next read is to take."""
        if not self._reads_many:
            return min(self._records_in_time(), self._at_a_time)
        # A call takes as long for many as for few, or nearly so: an equal part for each thread.
        threads = self._pace.threads
        if threads > self._buffer_size:
            part = -(-self._batch_size * self._buffer_size // threads)
        else:
            part = self._batch_size * min(self._buffer_size // threads, self._batches_in_a_call)
        return max(1, min(part, _RECORDS_PER_CALL))

    def _records_in_time(self) -> int:
        each = self._pace.seconds_per_record
        return max(1, int(_READ_S / each)) if each else 1


class _Counted:
    """A batch in the making, and how many of its records are missing."""

    def __init__(self, made: MadeBatch, number: int, position: Any):
        self.made, self.number, self.position = made, number, position
        self._missing, self._lock = made.size, threading.Lock()

    def wrote(self, count: int) -> bool:
        """Counts what was written; whether that was the last of it."""
        with self._lock:
            self._missing -= count
            return not self._missing


@dataclass(frozen=True)
class _Part:
    """Some records of one batch, and what was read of them, if it was."""

    batch: _Counted
    start: int
    stop: int
    elements: list[Any] | None = None

    def cut(self, count: int) -> tuple[_Part, list[_Part]]:
        """The first few records, and the rest if there is one."""
        middle, elements = self.start + count, self.elements
        if middle >= self.stop:
            return self, []
        first, rest = (elements[:count], elements[count:]) if elements else (None, None)
        return (
            replace(self, stop=middle, elements=first),
            [replace(self, start=middle, elements=rest)],
        )

    @property
    def piece(self) -> Piece:
        return Piece(self.batch.made, self.start, self.stop)


class _Request:
    """Some parts, of which the first are asked for. A second read may ask for them again.

    One of the two goes on with all of the parts: the one that is answered first. An error counts
    as an answer only if the other has failed, too.
    """

    def __init__(self, parts: Sequence[_Part]):
        self.parts, self.start = list(parts), time.perf_counter()
        self.winner: _Read | None = None
        self._asking, self._was_asked_again = 1, False
        self._lock = threading.Lock()

    @property
    def can_ask_again(self) -> bool:
        return self.winner is None and self._asking == 1 and not self._was_asked_again

    def ask_again(self) -> bool:
        """A second read asks from now on; False if it need not, or must not."""
        with self._lock:
            if not self.can_ask_again:
                return False
            self._asking, self._was_asked_again = 2, True
            return True

    def answer(self, read: _Read, failed: bool) -> bool:
        """A read has its answer; whether it goes on with the parts."""
        with self._lock:
            self._asking -= 1
            if self.winner is not None or (failed and self._asking):
                return False
            self.winner = read
            return True


class _Read(Task[tuple[Batch, Any]]):
    """One read, of one batch or of several.

    Args:
        reader: Reads them.
        parts: What to read.
        begins: How many batches it is the first to work on.
        again: A request that this read makes a second time.

    Attributes:
        request: What it asks the source for now, if anything.
        answers: After the run, of each answer of the source: when it was asked for, when it came,
            and for how long a processor was busy with it.
        left: After the run, what it has left to others.
    """

    def __init__(
        self,
        reader: BatchMapDataset,
        parts: list[_Part],
        begins: int,
        again: _Request | None = None,
    ):
        self._reader, self._parts, self.begins, self.size = reader, list(parts), begins, 0
        self.request, self._again = again, again
        self.answers: list[tuple[float, float, float]] = []
        self.left: list[_Part] = []

    @property
    def has_lost(self) -> bool:
        """Whether another read goes on with what this one had."""
        request = self.request
        return request is not None and request.winner not in (None, self)

    def run(self) -> Iterator[tuple[int, tuple[Batch, Any] | Raised]]:
        until = time.perf_counter() + 2 * _READ_S
        parts, self._parts = self._parts, []
        if len(parts) > 1 and self._reader.reads_many:
            # If it fails, each is read alone, so that the error comes with the batch that has it.
            with contextlib.suppress(BaseException):
                if (read := self._ask(parts, len(parts), until)) is None:
                    return
                parts = [replace(p, elements=e) for p, e in zip(parts, read, strict=True)]
                until = time.perf_counter() + 2 * _READ_S
        while parts:
            part = parts.pop(0)
            try:
                if not self._complete(part, parts, until):
                    continue
                result = part.batch.made.finish(), part.batch.position
            except BaseException as error:
                yield part.batch.number, Raised.of(error)
            else:
                yield part.batch.number, result
                del result

    def _complete(self, part: _Part, others: list[_Part], until: float) -> bool:
        """Reads and writes what there is time for; whether that was the last of the batch."""
        if part.start == part.stop:
            return True  # all padding
        if self.size and time.perf_counter() > until:
            self.left.append(part)
            return False
        elements = part.elements
        if elements is None:
            if (read := self._ask([part, *others], 1, until)) is None:
                others.clear()
                return False
            (elements,) = read
            until = time.perf_counter() + 2 * _READ_S
        read, unread = part.cut(len(elements))
        count = part.batch.made.write(elements, part.start, until)
        self.size += count
        self.left += [*replace(read, elements=elements).cut(count)[1], *unread]
        return part.batch.wrote(count)

    def _ask(self, parts: list[_Part], count: int, until: float) -> list[list[Any]] | None:
        """What the source gives for the first few of some parts.

        Returns:
            The elements of each; None if another read goes on with all of the parts.
        """
        request, self._again = self._again or _Request(parts), None
        self.request = request
        start, processor_start = time.perf_counter(), time.thread_time()
        try:
            elements = self._reader.read([part.piece for part in parts[:count]], until)
        except BaseException:
            if not request.answer(self, failed=True):
                return None
            self.request = None
            raise
        self.answers.append((start, time.perf_counter(), time.thread_time() - processor_start))
        if not request.answer(self, failed=False):
            return None
        self.request = None
        return elements
