"""One read of records: of one batch, of several, or of a feed; in the time that it has."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from grain_shard.grain_inside.routes import Route, read_together
from grain_shard.reading.faults import Faults
from grain_shard.spans import READ, span
from grain_shard.tasks import Raised, Task

# Records that are read one by one go together for about this long, in seconds, since each read
# costs some microseconds; not for longer, so that a few slow records are read side by side. A read
# that has taken twice as long leaves the rest of its records to whoever comes next.
_READ_S = 4e-3


def records_in_time(seconds_per_record: float | None) -> int:
    """Returns the number of records that one read is to take, if they are read one by one."""
    return max(1, int(_READ_S / max(seconds_per_record, 1e-9))) if seconds_per_record else 1


class Sink(Protocol):
    """The place of records once they are read: a `BatchBuilder`, or a line of a feed.

    Attributes:
        number: Its place among others; earlier ones are wanted first.
        faults: The rules for reads that fail.
    """

    number: int
    faults: Faults

    def way(self, start: int, stop: int) -> Route:
        """Returns the way to some of its records."""
        ...

    def write(self, elements: list[Any], start: int, until: float) -> int:
        """Takes elements that were read; returns their number, less those left to others."""
        ...

    def wrote(self, count: int) -> Iterable[tuple[int, Any]]:
        """Counts elements that it took; gives its result, if it has one, after the last of them."""
        ...

    def failed(self, start: int, error: Raised) -> Iterable[tuple[int, Raised]]:
        """Takes the error of a record; gives it in place of its result, if it has one."""
        ...


class Part(NamedTuple):
    """Some records of a sink, and their elements if they were read."""

    sink: Sink
    start: int
    stop: int
    elements: list[Any] | None = None

    def cut(self, count: int) -> tuple[Part, list[Part]]:
        """Returns the first few records, and the rest if there is one."""
        middle, elements = self.start + count, self.elements
        if middle >= self.stop:
            return self, []
        first, rest = (elements[:count], elements[count:]) if elements else (None, None)
        return (
            self._replace(stop=middle, elements=first),
            [self._replace(start=middle, elements=rest)],
        )


class Read(Task[Any]):
    """One read.

    Args:
        parts: The records to read, all of one pipeline.
        reads_many: Whether the source reads many in one call.
        begins: Results that it is the first to work on.

    Attributes:
        left: After the run, the parts that it has left to others.
    """

    def __init__(self, parts: Sequence[Part], reads_many: bool, begins: int = 0):
        self._parts, self._reads_many = list(parts), reads_many
        self.begins, self.size = begins, 0
        self.left: list[Part] = []

    def run(self) -> Iterator[tuple[int, Any]]:
        until = time.perf_counter() + 2 * _READ_S
        parts, self._parts = self._parts, []
        if len(parts) > 1 and self._reads_many:
            # If it fails, each is read alone, so that the error comes with the batch that has it.
            with contextlib.suppress(BaseException):
                read = _read(parts, until)
                parts = [p._replace(elements=e or None) for p, e in zip(parts, read, strict=True)]
                until = time.perf_counter() + 2 * _READ_S
        for part in parts:
            try:
                yield from part.sink.wrote(self._written(part, until))
            except BaseException as error:
                yield from part.sink.failed(part.start, Raised.of(error))

    def _written(self, part: Part, until: float) -> int:
        """Reads and writes as the time allows; returns the number of records written."""
        if part.start == part.stop:
            return 0  # all padding
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


def _read(parts: Sequence[Part], until: float) -> list[list[Any]]:
    """Reads the elements of each part, in one call if the source can."""
    with span(READ):
        ways = [sink.way(start, stop) for sink, start, stop, _ in parts]
        return read_together(ways, until, parts[0].sink.faults)
