"""The feeds' turns, taken by one feed after the other or by several feeds side by side."""

from __future__ import annotations

import contextlib
import functools
import pickle
from collections.abc import Mapping

from grain_shard.background import Background
from grain_shard.feeding.feed_streams import (
    FeedReader,
    FeedState,
    FeedStreams,
    FeedTurn,
    naming_feed,
)
from grain_shard.feeding.shared_reads import SharedReads
from grain_shard.reading.faults import Faults
from grain_shard.spans import READ, span
from grain_shard.tasks import Queue, naming_closed


class FeedTurns:
    """Takes a turn of each feed for a batch: one after the other, or in several threads.

    With threads, turns begin when a batch is asked for, and not before, so that no feed is read
    farther ahead than the batch that is being made. Each feed has one turn of a batch, so two
    threads never read the same feed.

    Args:
        feeds: The feeds of all hosts.
        faults: Decides on records that cannot be read, and counts them.
        rows_per_feed: Rows of a turn.
        num_threads: Threads that take turns.
        feed_states: The feeds to run, in the order of their rows, and their states at the start.
    """

    def __init__(
        self,
        feeds: FeedStreams,
        faults: Faults,
        rows_per_feed: int,
        num_threads: int,
        feed_states: Mapping[int, FeedState],
    ):
        self._reads = SharedReads(faults)
        self._asked = _AskedTurns(
            {
                feed: feeds.reader(feed, state, faults, self._reads)
                for feed, state in feed_states.items()
            }
        )
        self._take = functools.partial(_take, feeds.num_feeds, rows_per_feed)
        self._threads: Background | None = None
        if min(num_threads, len(feed_states)) > 1:
            self._threads = Background(
                self._take,
                self._asked,
                buffer_size=len(feed_states),
                num_threads=num_threads,
                name="grain-shard-feed",
            )

    def of_one_batch(self) -> list[FeedTurn]:
        """Returns the next turn of every feed."""
        if self._threads is None:
            return [self._take(turn) for turn in self._asked.readers.items()]
        self._asked.ask()
        return [next(self._threads) for _ in self._asked.readers]

    def stop(self) -> None:
        """Ends the threads as soon as the user's code that they run returns."""
        self._reads.stop()
        if self._threads is not None:
            self._threads.stop()

    def close(self) -> None:
        """Closes the feeds, once no thread is at work any more."""
        self._reads.stop()  # first, because a feed may wait for it
        try:
            (self._asked if self._threads is None else self._threads).close()
        finally:
            self._reads.close()


def _take(num_feeds: int, rows_per_feed: int, turn: tuple[int, FeedReader]) -> FeedTurn:
    feed, reader = turn
    with span(READ), naming_feed(feed, num_feeds):
        rows = reader.take(rows_per_feed)
        return FeedTurn(feed, rows, pickle.dumps(reader.feed_state()))  # Grain may change it later


class _AskedTurns(Queue[tuple[int, FeedReader]]):
    """A queue of turns: each requested batch adds one turn of every feed, in order.

    Attributes:
        readers: Each feed's reader.
    """

    def __init__(self, readers: Mapping[int, FeedReader]):
        super().__init__()
        self.readers = readers

    def ask(self) -> None:
        """Asks for a turn of each feed."""
        for turn in self.readers.items():
            self.put(turn)

    def close(self) -> None:
        # An ExitStack closes the other feeds even if closing one of them fails.
        with contextlib.ExitStack() as closing:
            for feed, reader in self.readers.items():
                closing.callback(_close, feed, reader)


def _close(feed: int, reader: FeedReader) -> None:
    with naming_closed(f"feed {feed}"):
        reader.close()
