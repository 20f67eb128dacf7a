"""A host's feeds at work, in one thread or in several.

A thread makes one batch: it takes the rows of feed after feed. The next thread is behind it, with
the next batch, and takes a feed's rows once the thread ahead has taken its own. So every feed is
read in order, and one that is slow holds the threads up one by one, not the feeds before it.
"""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from grain_shard.feed_batches import FeedBatches
from grain_shard.feed_rows import Entry, named
from grain_shard.spans import READ, span


class Piece(NamedTuple):
    """What one feed gives to one batch: its rows, and where it stands after them, pickled."""

    feed: int
    rows: list[Any]
    entry: bytes


class FeedPool(Iterator[int]):
    """Numbers batches, and takes the rows of each: a `Background`'s tickets, and its work.

    Args:
        ds: The batches of all feeds.
        entries: The feeds to run, and where they start.
    """

    def __init__(self, ds: FeedBatches, entries: Mapping[int, Entry]):
        self._num_feeds, self._feed_batch_size = ds.num_feeds, ds.feed_batch_size
        self._readers = ds.readers(entries)
        self._numbers = itertools.count()
        self._condition = threading.Condition()
        self._taken = dict.fromkeys(self._readers, 0)  # batches whose rows each feed has given
        self._stopped = False

    def __next__(self) -> int:
        return next(self._numbers)

    def take(self, number: int) -> list[Piece]:
        """What every feed gives to a batch. For each batch, a thread calls this once.

        Raises:
            PoolStoppedError: Nobody wants it any more.
        """
        pieces = []
        for feed, reader in self._readers.items():
            with self._turn(feed, number), named(feed, self._num_feeds), span(READ):
                rows = reader.take(self._feed_batch_size)
                entry = pickle.dumps(reader.entry())  # pickled: Grain may go on to change it
            pieces.append(Piece(feed, rows, entry))
        return pieces

    @contextlib.contextmanager
    def _turn(self, feed: int, number: int) -> Iterator[None]:
        with self._condition:
            self._condition.wait_for(lambda: self._stopped or self._taken[feed] == number)
            if self._stopped:
                raise PoolStoppedError
        try:
            yield
        except BaseException:
            self.stop()  # this thread comes to no other feed, where the next one would wait for it
            raise
        with self._condition:
            self._taken[feed] += 1
            self._condition.notify_all()

    def stop(self) -> None:
        """Ends the threads as soon as what they are in returns."""
        with self._condition:
            self._stopped = True
            self._condition.notify_all()

    def close(self) -> None:
        """Closes the feeds, when no thread is at work any more."""
        for reader in self._readers.values():
            reader.close()


class PoolStoppedError(Exception):
    """Ends a thread of the pool; no consumer sees it."""
