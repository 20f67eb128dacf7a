"""A host's feeds at work, in one thread or in several.

A thread makes one batch: it takes the rows of feed after feed. The next thread is behind it, with
the next batch, and takes a feed's rows once the thread ahead has taken its own. So every feed is
read in order, and one that is slow holds the threads up one by one, not the feeds before it.
"""

from __future__ import annotations

import itertools
import math
import pickle
import threading
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.feeding.feed_rows import Entry, name_feed
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
        self._last: float = math.inf  # the last batch that anybody will take

    def __next__(self) -> int:
        return next(self._numbers)

    def take(self, number: int) -> list[Piece]:
        """What every feed gives to a batch. For each batch, a thread calls this once.

        Raises:
            PoolStoppedError: Nobody wants it any more.
        """
        pieces = []
        with span(READ):
            for feed, reader in self._readers.items():
                self._wait_for_turn(feed, number)
                try:
                    rows = reader.take(self._feed_batch_size)
                    entry = pickle.dumps(reader.entry())  # a copy: Grain may go on to change it
                except BaseException as error:
                    # The threads behind would wait for this one; those ahead have batches to make.
                    self._end_after(number)
                    name_feed(error, feed, self._num_feeds)
                    raise
                self._end_turn(feed)
                pieces.append(Piece(feed, rows, entry))
        return pieces

    def _wait_for_turn(self, feed: int, number: int) -> None:
        with self._condition:
            while self._taken[feed] != number and number <= self._last:
                self._condition.wait()
            if number > self._last:
                raise PoolStoppedError

    def _end_turn(self, feed: int) -> None:
        with self._condition:
            self._taken[feed] += 1
            self._condition.notify_all()

    def stop(self) -> None:
        """Ends the threads as soon as what they are in returns."""
        self._end_after(-1)

    def _end_after(self, number: int) -> None:
        with self._condition:
            self._last = min(self._last, number)
            self._condition.notify_all()

    def close(self) -> None:
        """Closes the feeds, when no thread is at work any more."""
        for reader in self._readers.values():
            reader.close()


class PoolStoppedError(Exception):
    """Ends a thread of the pool; no consumer sees it."""
