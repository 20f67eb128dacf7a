"""The readers that all feeds of a host share, and one bound on the records that they read ahead.

Each stream of records is a line of parts, in order. A reader takes the next part of the line that
is least ahead of its consumer, and evaluates its records. So the feed that needs records most is
served first, and the number of threads does not grow with the number of feeds.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import grain
import numpy as np

from grain_shard.background import TaskStage
from grain_shard.grain_inside.routes import NEVER, Route, route
from grain_shard.interrupts import Bell
from grain_shard.pace import ReadPace
from grain_shard.reading.faults import Faults
from grain_shard.reading.read import Part, Read, records_in_time
from grain_shard.tasks import Raised, Tasks

# Most records that wait or are unfinished, in all lines together. Grain has 500 for each.
_MOST_AHEAD = 2048
# Most records ahead in one line at the beginning. It doubles whenever the consumer has to wait.
_FIRST_AHEAD = 4
# Seconds of the functions that follow one call, for a source that reads many records in a call.
_AFTER_CALL_S = 50e-3
# Handing a part to another thread and back costs more than evaluating records that take less than
# this, in seconds. The consumer of such records evaluates them itself.
_CHEAP_S = 20e-6
# More readers never gave enough speed to be worth their memory.
_MOST_READERS = 64


class SharedReads:
    """Reads ahead for any number of streams. Its threads start when the first stream is read.

    Args:
        faults: The rules for failed reads.
    """

    def __init__(self, faults: Faults):
        # The threads hold the lines and not this object, so this object can be collected.
        self._lines, self.faults = _Lines(faults), faults
        self._stage: TaskStage[None] = TaskStage(
            self._lines,
            buffer_size=1,
            pace=ReadPace(most=_MOST_READERS),
            name="grain-shard-feed-read",
        )

    def elements(self, records: grain.MapDataset, start: int) -> Generator[Any]:
        """Yields records from an index on; reading ahead starts with the first ``next``.

        Raises:
            RuntimeError: The reads were stopped.
        """
        line = self._lines.open(records, start)
        try:
            self._stage.start()
            while True:
                if not line.has_come and (read := self._lines.draw_cheap(line)) is not None:
                    collections.deque(read.run(), maxlen=0)
                    self._lines.done(read)
                elif not line.has_come:
                    self._lines.starves(line)
                    if not self._stage.wait_for(lambda: line.has_come):
                        raise RuntimeError("the reads of this stream were stopped")
                for element in self._lines.take(line):
                    if isinstance(element, Raised):
                        element.throw()
                    yield element
        finally:
            self._lines.close_line(line)

    def stop(self) -> None:
        """Ends each thread as soon as its current call of the user's code returns."""
        self._stage.stop()

    def close(self) -> None:
        """Stops the threads and waits for them; for user code they are in, only some seconds."""
        self._stage.close()


class _Line:
    """A stream's records that were begun and not yet taken, and its speed: a `Sink`."""

    number = 0

    def __init__(self, records: grain.MapDataset, start: int, faults: Faults):
        self.records, self.length, self.faults = records, len(records), faults
        self.begun = self.taken = start  # records
        self.most_ahead = _FIRST_AHEAD
        self.left: list[Part] = []  # parts that readers have left to others
        self.seconds_per_record: float | None = None
        self.reads_many = route(records, np.arange(0)).reads_many
        self._come: dict[int, list[Any]] = {}  # evaluated records, by the index of the first
        self._seconds_before = self._seconds = _CHEAP_S  # per record, in the last two reads

    def way(self, start: int, stop: int) -> Route:
        return route(self.records, np.arange(start, stop))

    def write(self, elements: list[Any], start: int, until: float) -> int:
        began, way = time.perf_counter(), self.way(start, start + len(elements))
        rows = way.finish(elements, NEVER if self.reads_many else until, self.faults)
        if self.reads_many:
            self.seconds_per_record = (time.perf_counter() - began) / len(rows)
        self._come[start] = rows
        return len(rows)

    def wrote(self, count: int) -> tuple[()]:
        return ()

    def failed(self, start: int, error: Raised) -> tuple[()]:
        self._come[start] = [error]
        return ()

    @property
    def has_come(self) -> bool:
        """True if the next records can be taken."""
        return self.taken in self._come

    def take(self) -> list[Any]:
        """Takes the next records, which must be ready; an error, as `Raised`, is the last one."""
        elements = self._come.pop(self.taken)
        self.taken += len(elements)
        return elements

    @property
    def ahead(self) -> int:
        """Number of records that were begun and not yet taken."""
        return self.begun - self.taken

    @property
    def is_cheap(self) -> bool:
        """True if records are cheap. One slow read does not count, because it may be chance."""
        return min(self._seconds, self._seconds_before) < _CHEAP_S

    def took(self, seconds: float, count: int) -> None:
        """Updates the time per record from another read."""
        self._seconds_before, self._seconds = self._seconds, seconds / max(1, count)
        if not self.reads_many:
            self.seconds_per_record = self._seconds

    def next_size(self, most_ahead: int) -> int:
        """Returns the number of records that the next read should take."""
        # Half of the bound, so that one part is read while the other is used.
        size, each = max(1, most_ahead // 2), self.seconds_per_record
        if not self.reads_many:
            return min(size, records_in_time(each))
        return size if each is None else max(1, min(size, int(_AFTER_CALL_S / max(each, 1e-9))))


class _Lines(Tasks[None]):
    """The lines, from which readers draw parts."""

    def __init__(self, faults: Faults):
        self._lines: list[_Line] = []
        self._faults = faults
        self._lock = threading.Lock()
        self._wanted = Bell()  # rung when a part may have become ready to draw
        self._stopped = False

    def open(self, records: grain.MapDataset, start: int) -> _Line:
        line = _Line(records, start, self._faults)
        with self._lock:
            self._lines.append(line)
        self._wanted.ring()
        return line

    def close_line(self, line: _Line) -> None:
        with self._lock:
            if line in self._lines:  # it is not after `stop`
                self._lines.remove(line)
        self._wanted.ring()  # the other lines get more room

    def starves(self, line: _Line) -> None:
        """Lets a line read further ahead from now on, because its consumer has to wait."""
        with self._lock:
            line.most_ahead = min(2 * line.most_ahead, _MOST_AHEAD)
        self._wanted.ring()

    def take(self, line: _Line) -> list[Any]:
        """Takes the next records of a line, which must be ready."""
        with self._lock:
            elements = line.take()
        if not line.is_cheap:
            self._wanted.ring()
        return elements

    def draw_cheap(self, line: _Line) -> _LineRead | None:
        """Draws a read for a line's consumer to run itself; None if readers run it."""
        with self._lock:
            if self._stopped or not line.is_cheap or line.ahead or line.begun == line.length:
                return None
            return self._draw_next(line, line.next_size(self._share()))

    def draw(self, room: int) -> _LineRead:
        drawn = self._wanted.wait_for(lambda: self._stopped or self._draw())
        if not isinstance(drawn, _LineRead):
            raise StopIteration
        return drawn

    def _draw(self) -> _LineRead | None:
        with self._lock:
            share = self._share()
            for line in sorted(self._lines, key=lambda line: line.ahead):
                most_ahead = min(line.most_ahead, share)
                size = line.next_size(most_ahead)
                if line.left:
                    part, rest = line.left.pop(0).cut(size)
                    line.left[:0] = rest
                    return _LineRead(line, part)
                is_wanted = line.ahead + size <= most_ahead and not line.is_cheap
                if is_wanted and line.begun < line.length:
                    return self._draw_next(line, size)
        return None

    def _share(self) -> int:
        """Returns the number of records of each line that may be ahead."""
        return max(1, _MOST_AHEAD // max(1, len(self._lines)))

    def _draw_next(self, line: _Line, size: int) -> _LineRead:
        start, line.begun = line.begun, min(line.begun + size, line.length)
        return _LineRead(line, Part(line, start, line.begun))

    def done(self, task: _LineRead) -> bool:
        with self._lock:
            line = task.line
            line.left[:0] = task.left
            line.took(task.seconds, task.size)
        if line.left or not line.is_cheap:
            self._wanted.ring()
        return False

    def end(self) -> None:
        """Never called: an error goes to the line that it belongs to."""

    def stop(self) -> None:
        self._faults.stop()
        self._stopped = True
        self._wanted.ring()

    def close(self) -> None:
        with self._lock:
            self._lines.clear()


class _LineRead(Read):
    """A read of one line.

    Attributes:
        seconds: After the run, its wall-clock time.
    """

    def __init__(self, line: _Line, part: Part):
        super().__init__([part], line.reads_many)
        self.line, self.seconds = line, 0.0

    def run(self) -> Iterator[tuple[int, Any]]:
        began = time.perf_counter()
        yield from super().run()
        self.seconds = time.perf_counter() - began
