"""What feeds give to a batch, taken from one feed after the other or from several side by side."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from grain_shard.background import Background
from grain_shard.feeding.feed_reader import FeedReader, naming_feed
from grain_shard.feeding.shared_reads import SharedReads
from grain_shard.reading.faults import Faults
from grain_shard.reading.stack import RowStacker
from grain_shard.spans import READ, span
from grain_shard.tasks import Producer, naming_closed


class Piece(NamedTuple):
    """What one feed gives to one batch: its rows, and where it stands after them, pickled."""

    feed: int
    rows: list[Any]
    entry: bytes


def row_stacker(row: Any) -> RowStacker:
    """Stacks rows that look like this one.

    Raises:
        ShardingError: It cannot be a row.
    """
    return RowStacker(row, "a row of feed {}")


class FeedTurns:
    """Takes from each feed what it gives to a batch: in turn, or in several threads.

    With threads, a turn of each feed is handed out when a batch is asked for, and not before, so
    that no feed is read farther ahead than the batch that is being made. As many turns as there are
    feeds are under way at most, so no feed is read by two threads at once.

    Args:
        readers: Of each feed, in the order of their rows.
        reads: What reads ahead for them; ended with this.
        num_feeds: How many feeds there are on all hosts together, for messages.
        rows_per_feed: What each feed gives to a batch, in rows.
        num_threads: How many threads take turns.
    """

    def __init__(
        self,
        readers: Mapping[int, FeedReader],
        reads: SharedReads,
        *,
        num_feeds: int,
        rows_per_feed: int,
        num_threads: int,
    ):
        self._num_feeds, self._rows_per_feed, self._reads = num_feeds, rows_per_feed, reads
        self._turns, self._threads = _Turns(readers), None
        if min(num_threads, len(readers)) > 1:
            self._threads = Background(
                self._take,
                self._turns,
                buffer_size=len(readers),
                num_threads=num_threads,
                name="grain-shard-feed",
            )

    @property
    def faults(self) -> Faults:
        """What becomes of records that cannot be had, and how many there were."""
        return self._reads.faults

    def of_one_batch(self) -> list[Piece]:
        """What every feed gives to the next batch."""
        count = self._turns.ask()
        if self._threads is None:
            return [self._take(next(self._turns)) for _ in range(count)]
        return [next(self._threads) for _ in range(count)]

    def _take(self, turn: tuple[int, FeedReader]) -> Piece:
        feed, reader = turn
        with span(READ), naming_feed(feed, self._num_feeds):
            rows = reader.take(self._rows_per_feed)
            return Piece(feed, rows, pickle.dumps(reader.entry()))  # Grain may change the entry

    def stop(self) -> None:
        """Ends the threads as soon as what they are in returns."""
        self._reads.stop()
        if self._threads is not None:
            self._threads.stop()

    def close(self) -> None:
        """Closes the feeds, once no thread is at work any more."""
        self._reads.stop()  # first, as a feed may wait for it
        try:
            (self._turns if self._threads is None else self._threads).close()
        finally:
            self._reads.close()


class _Turns(Producer[tuple[int, FeedReader]]):
    """The feeds in order, again and again; as many of them as were asked for."""

    def __init__(self, readers: Mapping[int, FeedReader]):
        self._readers = dict(readers)
        self._cycle: Iterator[tuple[int, FeedReader]] = itertools.cycle(self._readers.items())
        self._asked, self._stopped = 0, False
        # Reentrant, since the garbage collector may run `stop` in a thread that holds it.
        self._asked_or_stopped = threading.Condition()

    def ask(self) -> int:
        """Asks for a turn of each feed, and says how many these are."""
        with self._asked_or_stopped:
            self._asked += len(self._readers)
            self._asked_or_stopped.notify_all()
        return len(self._readers)

    def __next__(self) -> tuple[int, FeedReader]:
        with self._asked_or_stopped:
            while not (self._asked or self._stopped):
                self._asked_or_stopped.wait()
            if self._stopped:
                raise StopIteration
            self._asked -= 1
            return next(self._cycle)

    def stop(self) -> None:
        with self._asked_or_stopped:
            self._stopped = True
            self._asked_or_stopped.notify_all()

    def close(self) -> None:
        # Every feed is closed, also if closing one of them fails.
        with contextlib.ExitStack() as closing:
            for feed, reader in self._readers.items():
                closing.callback(_close, feed, reader)


def _close(feed: int, reader: FeedReader) -> None:
    with naming_closed(f"feed {feed}"):
        reader.close()
