"""The readers that all feeds of a host share, and one bound on the memory that they read ahead.

Each stream of records is a line of parts, in order. A reader takes the next part of the line that
is least ahead of its consumer, and evaluates its records. So the feed that needs records most is
served first, and the number of threads does not grow with the number of feeds.
"""

from __future__ import annotations

import collections
import math
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, cast

import grain
import jax
import numpy as np

from grain_shard.background import TaskStage
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import Elements, Route, route
from grain_shard.interrupts import Bell
from grain_shard.pace import ReadPace
from grain_shard.reading.faults import Faults
from grain_shard.reading.read import Part, Read, records_in_time
from grain_shard.tasks import Raised, Tasks

# Most records that wait or are unfinished, in all lines together. Grain has 500 for each.
_MOST_AHEAD = 2048
# Most bytes of these, if a batch is smaller. Otherwise as many bytes as a batch has.
_BYTES_AHEAD = 2**23
# The number of records in the first part of a line, if the source reads many in a call. Each next
# part is twice as large. A large first part would keep the first rows waiting.
_FIRST_CALL = 4
# Handing a part to another thread and back costs more than evaluating records that take less than
# this, in seconds. The consumer of such records evaluates them itself.
_CHEAP_S = 20e-6
# If the records of a part are not cheap, the consumer leaves the rest to the readers after this
# time, in seconds.
_LONGEST_S = 8e-3
# More readers never gave enough speed to be worth their memory.
_MOST_READERS = 64


class SharedReads(TaskStage[None]):
    """Reads ahead for any number of streams. Its threads start when the first stream is read.

    Args:
        faults: The rules for failed reads.
        num_rows: Rows of a batch that are made of these streams.
        num_threads: Readers; None finds their number while they read.
    """

    def __init__(self, faults: Faults, num_rows: int, num_threads: int | None = None):
        self.faults: Faults = faults
        self._lines = _Lines(faults, num_rows)
        pace = ReadPace(num_threads, most=_MOST_READERS)
        super().__init__(self._lines, buffer_size=1, pace=pace, name="grain-shard-feed-read")

    def learn_row(self, row: Any) -> None:
        """Learns the size of a batch from one of its rows."""
        self._lines.row_bytes = _num_bytes(row)

    def elements(self, records: grain.MapDataset, start: int, *, ahead: bool) -> Generator[Any]:
        """Yields records from an index on.

        Args:
            records: The records.
            start: The index of the first one.
            ahead: True reads ahead from the first ``next`` on. False evaluates each record when it
                is asked for; only a source that reads many records in a call reads them ahead.

        Raises:
            RuntimeError: The reads were stopped.
        """
        line = self._lines.open(records, start, ahead)
        try:
            if ahead:
                self.start()
            while line.taken < line.length:
                if (part := self._lines.begin(line)) is not None:
                    yield from line.evaluated(part)
                    continue
                if not self.wait_for(lambda: line.taken in line.come):
                    raise RuntimeError("the reads of this feed were stopped, as its loop ended")
                elements = self._lines.take(line)
                if isinstance(elements[0], Raised):
                    elements[0].throw()
                while elements:  # `pop` lets go of each record, which may be large
                    yield elements.pop()
        finally:
            self._lines.close_line(line)


class _Line:
    """A stream's records that were begun and not yet taken, and their speed and size: a `Sink`.

    Attributes:
        length: The number of records.
        begun: The index of the next record to begin.
        taken: The index of the next record that the consumer takes.
        come: Evaluated records, or an error as `Raised`, by the index of the first.
        left: Parts that a reader or the consumer has left to the readers.
        record_bytes: Bytes of a record; 0 before the first one.
        reads_many: True if the source reads many records in one call.
    """

    number = 0

    def __init__(self, records: grain.MapDataset, start: int, faults: Faults, ahead: bool):
        self._records, self.length, self.faults = records, len(records), faults
        self.begun = self.taken = start
        self.come: dict[int, list[Any]] = {}
        self.left: list[Part] = []
        self.record_bytes = 0.0
        self.reads_many = route(records, np.arange(0)).reads_many
        self._next_call, self._ahead = _FIRST_CALL, ahead
        self._seconds = collections.deque[float](maxlen=2)  # per record, in the last two reads

    def way(self, start: int, stop: int) -> Route:
        return route(self._records, np.arange(start, stop))

    def write(self, elements: Elements, start: int, until: float) -> int:
        way = self.way(start, start + len(elements))
        rows = list(way.finish(elements, until, self.faults))
        self._learn(rows[0])
        self.come[start] = rows
        return len(rows)

    def wrote(self, count: int) -> tuple[()]:
        return ()

    def failed(self, start: int, error: Raised) -> tuple[()]:
        self.come[start] = [error]
        return ()

    def evaluated(self, part: Part) -> Iterator[Any]:
        """Yields the records of a part, each evaluated when the consumer asks for it.

        If they turn out to be slow, the rest of the part is left to the readers.
        """
        began = time.perf_counter()
        elements = iter(self.way(part.start, part.stop).each(self.faults))
        seconds, most_s = 0.0, math.inf if self.reads_many or not self._ahead else _LONGEST_S
        while self.taken < part.stop and seconds < most_s:
            element = next(elements)
            seconds += time.perf_counter() - began
            if self.taken == part.start:
                self._learn(element)
            self.taken, most_s = self.taken + 1, most_s + _CHEAP_S
            yield element
            began = time.perf_counter()
        self.took(seconds, self.taken - part.start)
        if self.taken < part.stop:
            self.left.insert(0, part._replace(start=self.taken))

    def _learn(self, element: Any) -> None:
        """Updates the bytes per record."""
        if type(element) is not Unreadable and element is not None:
            size = _num_bytes(element)
            self.record_bytes = (self.record_bytes + size) / 2 if self.record_bytes else size

    @property
    def ahead(self) -> int:
        """Number of records that were begun and not yet taken."""
        return self.begun - self.taken

    @property
    def is_for_readers(self) -> bool:
        """True if records are to be read ahead, and are not cheap.

        One slow read among cheap ones does not count, because it may be chance.
        """
        return self._ahead and min(self._seconds, default=_CHEAP_S) >= _CHEAP_S

    def took(self, seconds: float, count: int) -> None:
        """Updates the time per record from another read."""
        self._seconds.append(seconds / max(1, count))

    def next_size(self, most: int) -> int:
        """Returns the number of records of the next part, at most this many."""
        return max(1, min(most, self._next_call if self.reads_many else self.most_in_time))

    def begin(self, size: int) -> Part:
        """Begins the next part, of at most this many records."""
        start, self.begun = self.begun, min(self.begun + size, self.length)
        self._next_call = min(2 * self._next_call, _MOST_AHEAD)
        return Part(self, start, self.begun)

    @property
    def most_in_time(self) -> int:
        """Most records of a read, by the time that they take."""
        return records_in_time(self._seconds[-1] if self._seconds else None)


class _Lines(Tasks[None]):
    """The lines, from which readers draw parts.

    Attributes:
        row_bytes: Bytes of a row; 0 before the first one.
    """

    def __init__(self, faults: Faults, num_rows: int):
        self.row_bytes = 0
        self._lines: dict[_Line, None] = {}
        self._faults, self._num_rows = faults, num_rows
        self._lock = threading.Lock()
        self._wanted = Bell()  # rung when a part may have become ready to draw
        self._stopped = False

    def open(self, records: grain.MapDataset, start: int, ahead: bool) -> _Line:
        line = _Line(records, start, self._faults, ahead)
        self._lines[line] = None
        self._wanted.ring()
        return line

    def close_line(self, line: _Line) -> None:
        # In one step without the lock: the garbage collector may end a stream in any thread, also
        # in one that holds the lock.
        self._lines.pop(line, None)

    def _share(self, line: _Line) -> int:
        """Returns the number of a line's records that may be ahead."""
        most, size = self._num_rows, line.record_bytes
        if size:
            most = int(max(_BYTES_AHEAD, self._num_rows * (self.row_bytes or size)) // size)
        return max(1, min(_MOST_AHEAD, most) // max(1, len(self._lines)))

    def take(self, line: _Line) -> list[Any]:
        """Takes the next records of a line, which must be ready: the last one first."""
        with self._lock:
            elements = line.come.pop(line.taken)
            line.taken += len(elements)
        if line.is_for_readers:
            self._wanted.ring()
        return elements[::-1]

    def begin(self, line: _Line) -> Part | None:
        """Begins a part for the line's consumer to evaluate; None if readers evaluate the next."""
        with self._lock:
            if not (self._stopped or line.is_for_readers or line.ahead):
                return line.begin(line.next_size(self._share(line)))
        self._wanted.ring()  # the consumer may have found its records slow
        return None

    def draw(self, room: int) -> Read:
        part = self._wanted.wait_for(lambda: self._stopped or self._drawn())
        if not isinstance(part, Part):
            raise StopIteration
        return Read([part], cast(_Line, part.sink).reads_many)

    def _drawn(self) -> Part | None:
        with self._lock:
            for line in sorted(self._lines, key=lambda line: line.ahead):
                if (part := self._next_part(line)) is not None:
                    return part
        return None

    def _next_part(self, line: _Line) -> Part | None:
        """Draws a part of a line, if readers should read one."""
        if line.left:
            part, rest = line.left.pop(0).cut(line.most_in_time)
            line.left[:0] = rest
            return part
        if line.begun == line.length or not line.is_for_readers:
            return None
        # A third of what may be ahead: one part is used, while one waits and one is read. The part
        # in use holds up to size - 1 records that were not yet asked for.
        share = self._share(line)
        size = line.next_size((share + 1) // 3)
        return line.begin(size) if line.ahead + 2 * size - 1 <= share else None

    def done(self, task: Read) -> bool:
        with self._lock:
            line = task.sink
            assert isinstance(line, _Line)
            line.left[:0] = task.left
            if task.is_new:
                line.took(task.seconds, task.size)
        if line.left or line.is_for_readers:
            self._wanted.ring()
        return False

    def end(self) -> None:
        """Never called: an error goes to the line that it belongs to."""

    def stop(self) -> None:
        self._faults.stop()
        self._stopped = True
        self._wanted.ring()


def _num_bytes(element: Any) -> int:
    """Returns the bytes of an element's leaves.

    An object that is no array counts without the objects that it refers to.
    """
    leaves = jax.tree.leaves(element)
    return sum(getattr(leaf, "nbytes", None) or sys.getsizeof(leaf) for leaf in leaves)
