"""A host's feeds, run side by side in a small pool of threads.

A thread takes one feed's rows of one batch. A feed's next rows are taken once its last ones have
been, which keeps its order; and once there is room, so that no feed runs away from a slow one.
"""

from __future__ import annotations

import itertools
import pickle
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grain_shard.feed_batches import FeedBatches
from grain_shard.feed_rows import Entry, FeedReader, named
from grain_shard.prefetch import Background
from grain_shard.spans import READ, span


class Piece(NamedTuple):
    """What one feed gives to one batch: its rows, and where it stands after them, pickled."""

    feed: int
    rows: list[Any]
    entry: bytes


def run_feeds(
    ds: FeedBatches, entries: Mapping[int, Entry], *, buffer_size: int, num_threads: int
) -> Background[_Feed, Piece]:
    """The pieces of batch after batch, without end; in each the feeds in order.

    Args:
        ds: The batches of all feeds.
        entries: The feeds to run, and where they start.
        buffer_size: Pieces that may wait or be in the making.
        num_threads: Threads that run feeds side by side.
    """
    return Background(
        _Feed.piece,
        _Turns([_Feed(feed, reader, ds) for feed, reader in ds.readers(entries).items()]),
        buffer_size=buffer_size,
        num_threads=num_threads,
        name="grain-shard-feed",
    )


class _Feed:
    """One feed at work."""

    def __init__(self, number: int, reader: FeedReader, ds: FeedBatches):
        self._number, self.reader = number, reader
        self._num_feeds, self._feed_batch_size = ds.num_feeds, ds.feed_batch_size
        self.busy = threading.Lock()

    def piece(self) -> Piece:
        """The feed's rows of the next batch."""
        try:
            with named(self._number, self._num_feeds), span(READ):
                rows = self.reader.take(self._feed_batch_size)
                entry = pickle.dumps(self.reader.entry())  # pickled: Grain may go on to change it
            return Piece(self._number, rows, entry)
        finally:
            self.busy.release()


class _Turns(Iterator[_Feed]):
    """Gives every feed its turn, over and over."""

    def __init__(self, feeds: Sequence[_Feed]):
        self._feeds, self._turns = feeds, itertools.cycle(feeds)

    def __next__(self) -> _Feed:
        feed = next(self._turns)
        # Here, where one thread asks at a time, and not in the work: a lock is not handed to those
        # who wait for it in their order. Whoever draws this turn releases it.
        feed.busy.acquire()
        return feed

    def close(self) -> None:
        for feed in self._feeds:
            feed.reader.close()
