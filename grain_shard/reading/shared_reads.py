"""`SharedReads`: the threads that read ahead for streams or feeds, within one bound on memory.

The threads are called readers. The records of each stream form a line, which is cut into parts. A
free reader chooses the line that has the fewest records ready or unfinished, and evaluates the next
part of that line. So the feed that needs records most is served first. The number of readers does
not grow with the number of feeds.
"""

from __future__ import annotations

import collections
import functools
import math
import sys
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple, cast

import grain
import jax
import numpy as np

from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import Elements, Route, route
from grain_shard.reading.faults import Faults
from grain_shard.reading.read import Part, Read, records_in_time
from grain_shard.spans import READ, span
from grain_shard.threads.bell import Bell
from grain_shard.threads.crew import Crew
from grain_shard.threads.pace import ReadPace
from grain_shard.threads.tasks import Raised, Tasks

# In this file a line is the records of one stream, and a part is the range of a line's records that
# one read evaluates.
#
# Most records that are being read, or are read and not yet taken, in all lines together. Grain
# alone reads up to 500 records ahead for each stream.
_MOST_AHEAD = 2048
# Bytes of records that may always wait or be unfinished, in all lines together, so that small
# batches do not limit the number of readers. For larger batches the limit is the size of a batch.
BYTES_AHEAD = 2**23
# Number of records in the first part of a line, if the source reads many records in a call. Each
# further part may be twice as large. A large first part would delay the first rows.
_FIRST_CALL = 4
# Seconds. A record that takes less time is cheap: to hand it to another thread and back would take
# longer. The consumer (the thread that asks for rows) evaluates cheap records itself.
_CHEAP_S = 20e-6
# Seconds. If the records of a part turn out not to be cheap, the consumer evaluates them for this
# long, and leaves the other records of the part to the readers (the threads that read ahead).
_LONGEST_S = 8e-3
# The indices of this many records are computed together, because a shuffle of one index takes about
# as long as a shuffle of 256 indices: 0.14 ms.
_BLOCK = 256
# The largest number of readers. More readers never gave enough speed to be worth their memory.
_MOST_READERS = 64


class Limits(NamedTuple):
    """Limits of reading the records of a stream ahead; None for no limit.

    Attributes:
        threads: Most threads that evaluate records at the same time.
        ahead: Most records ahead of the consumer.
        reads_ahead: True reads ahead from the first ``next`` on. False evaluates each record when
            it is asked for. Only a source that reads many records in one call is then ahead, by the
            records of one call.
    """

    threads: int | None = None
    ahead: int | None = None
    reads_ahead: bool = True


class SharedReads:
    """The threads (readers) that read ahead for the streams of all feeds of a host.

    The readers start when the first stream that reads ahead is read.

    Args:
        faults: The rules for failed reads.
        num_rows: Records that may be ahead: the rows of a batch that come from all these streams
            together.
        num_threads: Number of readers; None adapts it while they read.
        num_feeds: Number of feeds that have these streams.
        bytes_ahead: More than `num_rows` records may be ahead if they have at most this many bytes.
    """

    def __init__(
        self,
        faults: Faults,
        num_rows: int,
        num_threads: int | None = None,
        num_feeds: int = 1,
        bytes_ahead: int = BYTES_AHEAD,
    ):
        self.faults: Faults = faults
        self._lines = _Lines(faults, num_rows, num_feeds, bytes_ahead)
        self._readers = Crew(
            self._lines,
            pace=ReadPace(num_threads, most=_MOST_READERS),
            name="grain-shard-feed-read",
            progress=Bell(),
        )

    def elements(
        self,
        records: grain.MapDataset,
        start: int,
        limits: Limits = Limits(),  # noqa: B008 (it is immutable)
    ) -> Generator[Any]:
        """Yields records from an index on.

        Args:
            records: The records.
            start: Index of the first record to yield.
            limits: The limits of reading ahead that the user has set for these records.

        Raises:
            RuntimeError: The reads were stopped.
        """
        line = self._lines.open(records, start, limits)
        try:
            if limits.reads_ahead:
                self._readers.start()
            while line.taken < line.length:
                if (part := self._lines.begin(line)) is not None:
                    try:
                        yield from line.evaluated(part)
                    finally:
                        self._lines.has_evaluated(line)
                    continue
                # A reader may note only now that the records are cheap, and read no more of them.
                self._readers.wait_for(line.may_go_on)
                if (failure := self._readers.failure) is not None:
                    failure.throw()
                if self._readers.is_stopped:
                    raise RuntimeError("the reads of this feed were stopped: the loop has ended")
                if line.taken not in line.come:
                    continue
                elements = self._lines.take(line)
                if isinstance(elements[0], Raised):
                    elements[0].throw()
                while elements:  # `pop` drops the reference to each record, which may be large
                    yield elements.pop()
        finally:
            self._lines.close_line(line)

    def stop(self) -> None:
        """Tells the readers to end, without waiting."""
        self._readers.stop()

    def close(self) -> None:
        """Stops the readers and waits for them; see `Crew.close`."""
        self._readers.close()


class _Line:
    """The records of one stream that are read ahead: begun, and not yet taken by the consumer.

    It receives the records as a `Sink`, and measures their time and size.

    Attributes:
        length: Number of records in the stream.
        begun: Index of the next record to begin.
        taken: Index of the next record that the consumer takes.
        come: Lists of evaluated records, each by the index of its first record. A failed read is a
            list with the error as `Raised`.
        left: Parts that were begun and not finished, which the readers have to evaluate.
        limits: The limits of reading ahead that the user has set.
        readers: Number of readers that evaluate a part now.
        consumer_evaluates: True while the consumer evaluates a part.
        record_bytes: Running average of the bytes of a record; 0 before the first record.
        reads_many: True if the source reads many records in one call.
    """

    number = 0

    def __init__(self, records: grain.MapDataset, start: int, faults: Faults, limits: Limits):
        self.length, self.faults = len(records), faults
        self._records = records
        # The routes of the last few blocks of `_BLOCK` records, by the first record of each.
        self._block = functools.lru_cache(4)(functools.partial(_block, records))
        self.begun = self.taken = start
        self.come: dict[int, list[Any]] = {}
        self.left: list[Part] = []
        self.limits, self.readers, self.consumer_evaluates = limits, 0, False
        self.record_bytes = 0.0
        self.reads_many = route(records, np.arange(0)).reads_many
        self._next_call = _FIRST_CALL
        self._seconds = collections.deque[float](maxlen=2)  # seconds per record of the last 2 reads

    def way(self, start: int, stop: int) -> Route:
        first = start - start % _BLOCK
        if stop > first + _BLOCK:
            return route(self._records, np.arange(start, stop))
        return self._block(first).part(start - first, stop - first)

    def write(self, elements: Elements, start: int, until: float) -> int:
        way = self.way(start, start + len(elements))
        with span(READ):
            rows = list(way.finish(elements, until, self.faults))
        self._learn(rows[0])
        self.come[start] = rows
        return len(rows)

    def wrote(self, count: int) -> None:
        """Does nothing, because `write` has kept the records."""

    def failed(self, start: int, error: Raised) -> None:
        self.come[start] = [error]

    def evaluated(self, part: Part) -> Iterator[Any]:
        """Yields the records of a part. The consumer's thread evaluates each one.

        In a stream that reads ahead, this ends early if the records are slow. It then leaves the
        remaining records to the readers (threads that read ahead). If the source reads many records
        in one call, this never ends early.
        """
        began = time.perf_counter()
        elements = iter(self.way(part.start, part.stop).each(self.faults))
        may_leave = self.limits.reads_ahead and not self.reads_many
        seconds, most_s = 0.0, _LONGEST_S if may_leave else math.inf
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
        """Updates `record_bytes` by the size of one more record."""
        if type(element) is not Unreadable and element is not None:
            size = _num_bytes(element)
            self.record_bytes = (self.record_bytes + size) / 2 if self.record_bytes else size

    @property
    def ahead(self) -> int:
        """Number of records of this stream that were begun and not yet taken by the consumer."""
        return self.begun - self.taken

    @property
    def is_for_readers(self) -> bool:
        """True if readers, and not the consumer, should evaluate the records.

        That is so if the stream reads ahead, and neither of its last two reads was fast. Before the
        first read it is so, too. After a fast read, a single slow read may be chance.
        """
        return self.limits.reads_ahead and min(self._seconds, default=_CHEAP_S) >= _CHEAP_S

    @property
    def is_for_consumer(self) -> bool:
        """True if the consumer should evaluate the next record, which no reader has begun."""
        return not (self.is_for_readers or self.ahead)

    def took(self, seconds: float, count: int) -> None:
        """Notes the time of one more read.

        Args:
            seconds: Seconds of the read.
            count: Number of records that it evaluated.
        """
        self._seconds.append(seconds / max(1, count))

    def may_go_on(self) -> bool:
        """Returns True if the consumer can take the next record, or should evaluate it."""
        return self.taken in self.come or self.is_for_consumer

    def next_size(self, most: int) -> int:
        """Returns the number of records of the next part, from 1 to `most`."""
        return max(1, min(most, self._next_call if self.reads_many else self.most_in_time))

    def begin(self, size: int) -> Part:
        """Begins the next part, of at most `size` records, and returns it."""
        start, self.begun = self.begun, min(self.begun + size, self.length)
        self._next_call = min(2 * self._next_call, _MOST_AHEAD)
        return Part(self, start, self.begun)

    @property
    def most_in_time(self) -> int:
        """Most records of one read: as many as take about 4 ms, and at least one."""
        return records_in_time(self._seconds[-1] if self._seconds else None)


def _block(records: grain.MapDataset, first: int) -> Route:
    return route(records, np.arange(first, min(first + _BLOCK, len(records))))


class _Lines(Tasks):
    """The lines (the records of each stream), from which readers draw parts (ranges of records)."""

    def __init__(self, faults: Faults, num_rows: int, num_feeds: int, bytes_ahead: int):
        self._lines: dict[_Line, None] = {}
        self._faults, self._num_rows, self._num_feeds = faults, num_rows, num_feeds
        self._bytes_ahead = bytes_ahead
        self._lock = threading.Lock()
        self._wanted = Bell()  # rung when a reader may have a part to draw
        self._stopped = False

    def open(self, records: grain.MapDataset, start: int, limits: Limits) -> _Line:
        line = _Line(records, start, self._faults, limits)
        self._lines[line] = None
        self._wanted.ring()
        return line

    def close_line(self, line: _Line) -> None:
        # One atomic operation without the lock. The garbage collector may call this in a thread
        # that holds the lock, and waiting for the lock would never end.
        self._lines.pop(line, None)

    def _share(self, line: _Line) -> int:
        """Returns how many records of a line (the records of one stream) may be read ahead."""
        most, size = self._num_rows, line.record_bytes
        if size:
            most = max(most, int(self._bytes_ahead // size))
        # Feeds open their lines one after another. The first line must not fill the room of all.
        share = min(_MOST_AHEAD, most) // max(self._num_feeds, len(self._lines))
        return max(1, min(share, line.limits.ahead or share))

    def take(self, line: _Line) -> list[Any]:
        """Takes the next evaluated records of a line (the records of one stream).

        The records must be ready.

        Returns:
            A list of the records in reverse order, so that `pop` gives the first one. If the read
            failed, a list with the error as `Raised`.
        """
        with self._lock:
            elements = line.come.pop(line.taken)
            line.taken += len(elements)
        if line.is_for_readers:
            self._wanted.ring()
        return elements[::-1]

    def begin(self, line: _Line) -> Part | None:
        """Begins a part for the consumer of a stream, if the consumer should evaluate it.

        Args:
            line: The records of the stream.

        Returns:
            The part (a range of records); None if readers evaluate the next records.
        """
        with self._lock:
            if line.is_for_consumer and not self._stopped:
                line.consumer_evaluates = True
                return line.begin(line.next_size(self._share(line)))
        self._wanted.ring()  # if the line's records have turned out slow, readers may evaluate them
        return None

    def has_evaluated(self, line: _Line) -> None:
        """Notes that the consumer evaluates no part. It takes no lock, like `close_line`."""
        line.consumer_evaluates = False
        if line.limits.threads:  # a reader may have waited for the consumer
            self._wanted.ring()

    def draw(self) -> Read | None:
        part = self._wanted.wait_for(lambda: self._stopped or self._drawn())
        if not isinstance(part, Part):
            return None
        reads_many = cast(_Line, part.sink).reads_many
        return Read([part], reads_many, self.has_read)

    def _drawn(self) -> Part | None:
        with self._lock:
            for line in sorted(self._lines, key=lambda line: line.ahead):
                busy, most = line.readers + line.consumer_evaluates, line.limits.threads
                if (not most or busy < most) and (part := self._next_part(line)) is not None:
                    line.readers += 1
                    return part
            return None

    def _next_part(self, line: _Line) -> Part | None:
        """Returns the next part of a line (the records of one stream) for a reader.

        Returns:
            The part. None if all records of the line are begun, if the consumer evaluates them
            itself, or if there is no room for more records ahead.
        """
        if line.left:
            part, rest = line.left.pop(0).cut(line.most_in_time)
            line.left[:0] = rest
            return part
        if line.begun == line.length or not line.is_for_readers:
            return None
        # `share` is the limit on the line's records in memory. It has room for three parts: one
        # that the consumer uses, one that waits, and one that is being read. `ahead` does not count
        # the part in use, of which the consumer may still hold `size - 1` records. So with a new
        # part there are up to `ahead + (size - 1) + size` records in memory.
        share = self._share(line)
        size = line.next_size((share + 1) // 3)
        return line.begin(size) if line.ahead + 2 * size - 1 <= share else None

    def has_read(self, read: Read) -> None:
        """Takes over the ranges that a read has left, and the time that it took."""
        with self._lock:
            line = read.sink
            assert isinstance(line, _Line)
            line.readers -= 1
            line.left[:0] = read.left
            if read.is_new:
                line.took(read.seconds, read.size)
        if line.left or line.is_for_readers:
            self._wanted.ring()

    def stop(self) -> None:
        self._faults.stop()
        self._stopped = True
        self._wanted.ring()


def _num_bytes(element: Any) -> int:
    """Returns the number of bytes of an element's leaves.

    A leaf that is not an array counts without the objects that it refers to.
    """
    try:
        leaves = jax.tree.leaves(element)
    except ValueError:  # a dict has keys that JAX cannot sort, and a later function may change it
        leaves = [element]
    return sum(getattr(leaf, "nbytes", None) or sys.getsizeof(leaf) for leaf in leaves)
