"""One read of records, from one batch, several batches, or a feed, with a time limit."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from grain_shard.grain_inside.routes import Elements, Route, read_together
from grain_shard.reading.faults import Faults
from grain_shard.spans import READ, span
from grain_shard.tasks import Raised, Task

# Records that are read one by one are grouped into reads of about this many seconds. Shorter reads
# would cost too much, since each costs some microseconds; longer ones would keep slow records from
# being read side by side. After twice this time, a read leaves its remaining records to others.
_READ_S = 4e-3


def records_in_time(seconds_per_record: float | None) -> int:
    """Returns the number of records for one read, if they are read one by one."""
    return max(1, int(_READ_S / max(seconds_per_record, 1e-9))) if seconds_per_record else 1


class Sink(Protocol):
    """The receiver of records that were read: a `BatchBuilder`, or the line of a feed.

    Attributes:
        number: Its position among other sinks; earlier ones are needed first.
        faults: The rules for failed reads.
    """

    number: int
    faults: Faults

    def way(self, start: int, stop: int) -> Route:
        """Returns the route to the records from `start` up to `stop`."""
        ...

    def write(self, elements: Elements, start: int, until: float) -> int:
        """Writes elements that were read; returns the number written in time."""
        ...

    def wrote(self, count: int) -> Iterable[tuple[int, Any]]:
        """Counts written elements; after the last one, returns the result, if there is one."""
        ...

    def failed(self, start: int, error: Raised) -> Iterable[tuple[int, Raised]]:
        """Returns the error of a record in place of the result, if there is one."""
        ...


class Part(NamedTuple):
    """Some records of a sink, and their elements once they were read."""

    sink: Sink
    start: int
    stop: int
    elements: Elements | None = None

    def cut(self, count: int) -> tuple[Part, list[Part]]:
        """Returns the first `count` records, and a list with the rest, which may be empty."""
        middle, elements = self.start + count, self.elements
        if middle >= self.stop:
            return self, []
        first, rest = (elements[:count], elements[count:]) if elements else (None, None)
        return (
            self._replace(stop=middle, elements=first),
            [self._replace(start=middle, elements=rest)],
        )


class Read(Task[Any]):
    """One read, as a task of a thread.

    Args:
        parts: The records to read, all from one pipeline.
        reads_many: True if the source reads many records in one call.
        begins: Results that this read is the first to work on.

    Attributes:
        sink: The sink of the first part.
        is_new: True if no part was read before, by a read that left it.
        left: After the run, the parts that are left to other reads.
        seconds: After the run, its wall-clock time.
    """

    def __init__(self, parts: Sequence[Part], reads_many: bool, begins: int = 0):
        self._parts, self._reads_many = list(parts), reads_many
        self.sink: Sink = parts[0].sink
        self.begins: int = begins
        self.size: int = 0
        self.is_new: bool = all(part.elements is None for part in parts)
        self.left: list[Part] = []
        self.seconds = 0.0

    def run(self) -> Iterator[tuple[int, Any]]:
        began = time.perf_counter()
        until = began + 2 * _READ_S
        parts, self._parts = self._parts, []
        if len(parts) > 1 and self._reads_many:
            # If the call fails, each part is read alone, so that only the bad batch gets the error.
            with contextlib.suppress(BaseException):
                read = _read(parts, until)
                parts = [p._replace(elements=e or None) for p, e in zip(parts, read, strict=True)]
                until = time.perf_counter() + 2 * _READ_S
        for part in parts:
            try:
                yield from part.sink.wrote(self._written(part, until))
            except BaseException as error:
                yield from part.sink.failed(part.start, Raised.of(error))
        self.seconds = time.perf_counter() - began

    def _written(self, part: Part, until: float) -> int:
        """Reads and writes a part until the time is over; returns the number of records written."""
        if part.start == part.stop:
            return 0  # the batch is all padding
        if self.size and time.perf_counter() > until:
            self.left.append(part)
            return 0
        elements = part.elements
        if elements is None:
            (elements,) = _read([part], until)
            until = time.perf_counter() + 2 * _READ_S
        read, unread = part.cut(len(elements))
        count = part.sink.write(elements, part.start, until)
        self.size += count
        self.left += [*read._replace(elements=elements).cut(count)[1], *unread]
        return count


def _read(parts: Sequence[Part], until: float) -> list[Elements]:
    """Reads the elements of each part, in one call if the source can."""
    with span(READ):
        ways = [sink.way(start, stop) for sink, start, stop, _ in parts]
        return read_together(ways, until, parts[0].sink.faults)
