"""The readers that all feeds of a host share, and one bound on what they read ahead.

Each stream of records is a line of parts, in order. A reader takes the next part of the line that
has the least ahead of its consumer, and evaluates its records. So a feed that is in want is served
first, however many feeds there are, and the number of threads does not grow with the feeds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from typing import Any

import grain
import numpy as np

from grain_shard.background import TaskStage
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import Route, route
from grain_shard.pace import ReadPace
from grain_shard.reading.faults import Faults
from grain_shard.spans import READ, span
from grain_shard.tasks import Raised, Task, Tasks

# Records that wait or are in the making, of all lines together. Grain has 500 for each.
_MOST_AHEAD = 2048
# Of one line, at the beginning. It doubles each time that its consumer has to wait.
_FIRST_AHEAD = 4
# Records are read together for about so long, since handing over a part costs some microseconds.
# A part that has taken twice as long leaves the rest of its records to others.
_READ_S = 4e-3
# Of a source that reads many records in a call, so long for all that follows the call.
_AFTER_CALL_S = 50e-3
# To hand a part to another thread and back costs more than to evaluate records that take less than
# this: whoever takes such records evaluates them itself.
_CHEAP_S = 20e-6
# More readers never helped so much that they would be worth their memory.
_MOST_READERS = 64


class SharedReads:
    """Reads ahead for any number of streams. Its threads start when the first of them is read.

    Args:
        faults: What becomes of records that cannot be had.
    """

    def __init__(self, faults: Faults):
        # The threads refer to the lines and not to this object, which can thus be collected.
        self._lines, self.faults = _Lines(faults), faults
        self._stage: TaskStage[None] = TaskStage(
            self._lines,
            buffer_size=1,
            pace=ReadPace(most=_MOST_READERS),
            name="grain-shard-feed-read",
        )

    def elements(self, records: grain.MapDataset, start: int) -> Generator[Any]:
        """Yields records from an index on; they are read ahead from the first ``next``.

        Raises:
            RuntimeError: The reads were stopped.
        """
        line = self._lines.open(records, start)
        try:
            self._stage.start()
            while True:
                if not line.has_come and (read := self._lines.draw_cheap(line)) is not None:
                    read.evaluate()
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
        """Ends the threads as soon as what they are in returns."""
        self._stage.stop()

    def close(self) -> None:
        """Stops, and waits until the threads have ended, or some seconds for the user's code."""
        self._stage.close()


class _Part:
    """Some records of a line, and what became of them once that is known."""

    def __init__(self, start: int, stop: int):
        self.start, self.stop = start, stop
        self.elements: list[Any] | None = None  # an error, as `Raised`, is the last one


class _Line:
    """The parts of a stream that were begun and not yet taken, and how fast it is."""

    def __init__(self, records: grain.MapDataset, start: int):
        self.records, self.length = records, len(records)
        self.begun = self.taken = start  # records
        self.most_ahead = _FIRST_AHEAD
        self.parts: list[_Part] = []
        self.left: list[_Part] = []  # those of them that a reader has left to others
        self.seconds_per_record: float | None = None
        self._seconds_before = self._seconds = _CHEAP_S  # a record of the last two parts, all of it
        self.reads_many = route(records, np.arange(0)).reads_many

    @property
    def has_come(self) -> bool:
        """Whether the next part can be taken."""
        return bool(self.parts) and self.parts[0].elements is not None

    @property
    def ahead(self) -> int:
        """Records that were begun and not yet taken."""
        return self.begun - self.taken

    @property
    def is_cheap(self) -> bool:
        """Whether a record took next to no time. One part that took longer may be chance."""
        return min(self._seconds, self._seconds_before) < _CHEAP_S

    def way(self, part: _Part) -> Route:
        """Finds the way to the records of a part."""
        return route(self.records, np.arange(part.start, part.stop))

    def took(self, seconds: float, after_call_s: float | None) -> None:
        """A record of another part took so long, and so long without the call for many."""
        self._seconds_before, self._seconds = self._seconds, seconds
        if after_call_s is not None:
            self.seconds_per_record = after_call_s

    def next_size(self, most_ahead: int) -> int:
        """How many records the next part should have."""
        # Half of what may be ahead, so that one part is read while the other is used.
        size, each = max(1, most_ahead // 2), self.seconds_per_record
        if each is None:
            return size if self.reads_many else 1
        seconds = _AFTER_CALL_S if self.reads_many else _READ_S
        return max(1, min(size, int(seconds / max(each, 1e-9))))


class _Lines(Tasks[None]):
    """The lines, of which readers draw parts."""

    def __init__(self, faults: Faults):
        self._lines: list[_Line] = []
        self._faults = faults
        self._wanted = threading.Condition()  # signalled when there may be something to draw
        self._stopped = False

    def open(self, records: grain.MapDataset, start: int) -> _Line:
        line = _Line(records, start)
        with self._wanted:
            self._lines.append(line)
            self._wanted.notify()
        return line

    def close_line(self, line: _Line) -> None:
        with self._wanted:
            if line in self._lines:  # not if all of this was stopped
                self._lines.remove(line)
            self._wanted.notify()  # there is more room for the others

    def starves(self, line: _Line) -> None:
        """Its consumer has to wait: from now on more of it may be ahead."""
        with self._wanted:
            line.most_ahead = min(2 * line.most_ahead, _MOST_AHEAD)
            self._wanted.notify()

    def take(self, line: _Line) -> list[Any]:
        """What became of the records of the next part, which has come."""
        with self._wanted:
            part = line.parts.pop(0)
            line.taken = part.stop
            if not line.is_cheap:
                self._wanted.notify()
        return part.elements or []

    def draw_cheap(self, line: _Line) -> _Read | None:
        """The next part of a line whose consumer evaluates it itself; None if readers do that."""
        with self._wanted:
            if self._stopped or not line.is_cheap or line.parts or line.begun == line.length:
                return None
            return self._draw_next(line, line.next_size(self._share()))

    def draw(self, room: int) -> _Read:
        with self._wanted:
            while not self._stopped:
                if (drawn := self._draw()) is not None:
                    return drawn
                self._wanted.wait()
        raise StopIteration

    def _draw(self) -> _Read | None:
        share = self._share()
        for line in sorted(self._lines, key=lambda line: line.ahead):
            most_ahead = min(line.most_ahead, share)
            size = line.next_size(most_ahead)
            if line.left:
                return self._draw_left(line, size)
            is_wanted = line.ahead + size <= most_ahead and not line.is_cheap
            if is_wanted and line.begun < line.length:
                return self._draw_next(line, size)
        return None

    def _share(self) -> int:
        """How many records of each line may be ahead."""
        return max(1, _MOST_AHEAD // max(1, len(self._lines)))

    def _draw_next(self, line: _Line, size: int) -> _Read:
        part = _Part(line.begun, min(line.begun + size, line.length))
        line.begun = part.stop
        line.parts.append(part)
        return _Read(line, part, self._faults)

    def _draw_left(self, line: _Line, size: int) -> _Read:
        """Something of what another reader has left."""
        part = line.left.pop(0)
        self._cut(line, part, part.start + size)
        return _Read(line, part, self._faults)

    def done(self, task: _Read) -> bool:
        with self._wanted:
            line, part = task.line, task.part
            self._cut(line, part, part.start + len(task.elements))
            line.took(task.seconds / max(1, len(task.elements)), task.after_call_s)
            part.elements = task.elements
            if line.left or not line.is_cheap:
                self._wanted.notify()
        return False

    def _cut(self, line: _Line, part: _Part, stop: int) -> None:
        """Shortens a part, and leaves the rest to others."""
        if stop < part.stop:
            rest, part.stop = _Part(stop, part.stop), stop
            line.parts.insert(line.parts.index(part) + 1, rest)
            line.left.insert(0, rest)

    def end(self) -> None:
        """Not called: an error is handed to the line that it belongs to."""

    def stop(self) -> None:
        self._faults.stop()
        with self._wanted:
            self._stopped = True
            self._wanted.notify_all()

    def close(self) -> None:
        with self._wanted:
            self._lines.clear()


class _Read(Task[None]):
    """Evaluates the records of a part, or as many of them as there is time for.

    Attributes:
        elements: After the run, what became of them; the last one may be an error.
        seconds: After the run, what all of it took.
        after_call_s: What a record took, of a source that reads many in a call without the call;
            None if there was too little to tell.
    """

    begins = 0

    def __init__(self, line: _Line, part: _Part, faults: Faults):
        self.line, self.part, self.size = line, part, 0
        self._faults = faults
        self.elements: list[Any] = []
        self.seconds = 0.0
        self.after_call_s: float | None = None

    def run(self) -> tuple[()]:
        with span(READ):
            self.evaluate()
        return ()

    def evaluate(self) -> None:
        """Does it, in the calling thread."""
        began = time.perf_counter()
        try:
            self._evaluate(began)
        except BaseException as error:
            self.elements.append(Raised.of(error))
        self.size, self.seconds = len(self.elements), time.perf_counter() - began

    def _evaluate(self, began: float) -> None:
        since, counted, reads_many = began, 0, self.line.reads_many
        for element in self.line.way(self.part).each(self._faults):
            self.elements.append(element)
            if type(element) is Unreadable and not self._faults.masks:
                break
            now = time.perf_counter()
            if reads_many and since == began:
                since = now  # the first one came with the call
                continue
            counted += 1
            if not reads_many and now > began + 2 * _READ_S:
                break
        if counted:
            self.after_call_s = (time.perf_counter() - since) / counted
