"""`Read`: a task that reads some records, for batches or for a feed, in one thread."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from grain_shard.grain_inside.routes import Elements, Route, read_together
from grain_shard.reading.faults import Faults
from grain_shard.spans import READ, span
from grain_shard.threads.tasks import Raised, Task

# If records are read one by one, a `Read` takes as many records as it can read in about this many
# seconds. Shorter reads would cost too much, because each read costs some microseconds. In a longer
# read, slow records would wait for each other, although other threads could read them. After twice
# this time, a read leaves its unread records to later reads.
_READ_S = 4e-3


def records_in_time(seconds_per_record: float | None) -> int:
    """Returns the number of records for one `Read`, if the source reads records one by one.

    These records take about 4 ms together. A record that takes longer is read alone.

    Args:
        seconds_per_record: The time that one record takes; None if unknown.

    Returns:
        At least 1; 1 if the time is unknown.
    """
    return max(1, int(_READ_S / max(seconds_per_record, 1e-9))) if seconds_per_record else 1


class Sink(Protocol):
    """The consumer of records that a `Read` has read: a `BatchBuilder`, or the stream of a feed.

    Attributes:
        number: Place among all sinks. The records of a sink with a lower number are needed sooner.
        faults: The rules for failed reads.
    """

    number: int
    faults: Faults

    def way(self, start: int, stop: int) -> Route:
        """Returns the `Route` that reads the sink's records from `start` up to `stop`."""
        ...

    def write(self, elements: Elements, start: int, until: float) -> int:
        """Applies the user's functions to elements, and keeps the results.

        Args:
            elements: The elements that were read.
            start: Position of the first element among the sink's records.
            until: The time, by `time.perf_counter`, after which no further element is kept.

        Returns:
            The number of elements that were kept, at least one.
        """
        ...

    def wrote(self, count: int) -> None:
        """Counts `count` elements as written, and passes on the batch that they complete."""
        ...

    def failed(self, start: int, error: Raised) -> None:
        """Passes on the error of the record at `start`."""
        ...


class Part(NamedTuple):
    """A range of the records of one sink.

    Attributes:
        sink: The batch or feed that needs the records.
        start: Position of the first record.
        stop: Position after the last record.
        elements: The elements of the records, if they were read already; None otherwise.
    """

    sink: Sink
    start: int
    stop: int
    elements: Elements | None = None

    def cut(self, count: int) -> tuple[Part, list[Part]]:
        """Splits the range: returns its first `count` records, and a list with the remaining range.

        The list is empty if no record remains.
        """
        middle, elements = self.start + count, self.elements
        if middle >= self.stop:
            return self, []
        first, rest = (elements[:count], elements[count:]) if elements else (None, None)
        return (
            Part(self.sink, self.start, middle, first),
            [Part(self.sink, middle, self.stop, rest)],
        )


class Read(Task):
    """The task of reading some records, which one thread runs.

    Args:
        parts: Ranges of records to read, all from one pipeline.
        reads_many: True if the source reads many records in one call.
        done: Called with the read after its run.

    Attributes:
        sink: The sink of the first range.
        is_new: True if no element of these ranges was read before. False if an earlier read got
            elements of them, and had no time to write them.
        left: After the run, the ranges that are left to later reads.
        seconds: After the run, its wall-clock time in seconds.
    """

    def __init__(
        self,
        parts: Sequence[Part],
        reads_many: bool,
        done: Callable[[Read], None],
    ):
        self._parts, self._reads_many, self._done = list(parts), reads_many, done
        self.sink: Sink = parts[0].sink
        self.size: int = 0
        self.is_new: bool = parts[0].elements is None
        self.left: list[Part] = []
        self.seconds = 0.0

    def run(self) -> None:
        began = time.perf_counter()
        until = began + 2 * _READ_S
        parts, self._parts = self._parts, []
        if len(parts) > 1 and self._reads_many:
            # If the call for all parts fails, each part is read alone below. So only the batch with
            # the bad record gets the error.
            with contextlib.suppress(BaseException):
                read = self._read(parts, until)
                parts = [p._replace(elements=e or None) for p, e in zip(parts, read, strict=True)]
                until = time.perf_counter() + 2 * _READ_S
        for part in parts:
            try:
                part.sink.wrote(self._written(part, until))
            except BaseException as error:
                part.sink.failed(part.start, Raised.of(error))
        self.seconds = time.perf_counter() - began
        self._done(self)

    def _written(self, part: Part, until: float) -> int:
        """Reads and writes records of a part until a time; returns the number of records written.

        The other records of the part are added to `left`.
        """
        if part.start == part.stop:
            return 0  # every row of the batch is padding
        if self.size and time.perf_counter() > until:
            self.left.append(part)
            return 0
        elements = part.elements
        if elements is None:
            (elements,) = self._read([part], until)
            until = time.perf_counter() + 2 * _READ_S
        count = part.sink.write(elements, part.start, until)
        self.size += count
        if part.start + count < part.stop:
            read, unread = part.cut(len(elements))
            self.left += [*read._replace(elements=elements).cut(count)[1], *unread]
        return count

    def _read(self, parts: Sequence[Part], until: float) -> list[Elements]:
        """Returns the elements of each part, read in one call if the source can.

        If the time is over or a read failed, elements at the end are missing.
        """
        with span(READ):
            ways = [sink.way(start, stop) for sink, start, stop, _ in parts]
            return read_together(ways, until, parts[0].sink.faults)
