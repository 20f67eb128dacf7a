"""Batches joined from the rows of feeds, one feed after the other or several side by side."""

from __future__ import annotations

import contextlib
import itertools
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from grain_shard.background import Background, Producer
from grain_shard.feeding.feed_reader import ENDED, Entry, FeedReader, naming_feed
from grain_shard.reading.stack import RowStacker, Stack
from grain_shard.reading.stream_dataset import BatchIterator
from grain_shard.spans import BATCH, READ, span
from grain_shard.trees import Batch

MISSING = object()  # in the place of a row that a feed no longer has


class FeedsPosition(NamedTuple):
    """How many batches were handed out, and where each feed then stood, pickled."""

    step: int
    entries: Mapping[int, bytes]

    def past_end(self) -> FeedsPosition:
        """The position after one more batch, for which none of these feeds had a row any more."""
        return FeedsPosition(self.step + 1, dict.fromkeys(self.entries, pickle.dumps(ENDED)))


class Piece(NamedTuple):
    """What one feed gives to one batch: its rows, and where it stands after them, pickled."""

    feed: int
    rows: list[Any]
    entry: bytes


class FeedJoin:
    """Joins the rows of feeds to batches. All rows must look like the first one that was seen."""

    def __init__(self):
        self._stacker: RowStacker | None = None

    def learn(self, row: Any) -> None:
        """Takes a row for the one that all must look like, if there is none yet.

        Raises:
            ShardingError: It cannot be a row.
        """
        if self._stacker is None:
            self._stacker = RowStacker(row, "a row of feed {}")

    def stack(self, rows: Sequence[Any], feeds: Sequence[int]) -> Batch:
        """A batch of the rows, in arrays ``[len(rows), ...]`` that nothing else refers to.

        Args:
            rows: Trees of arrays and scalars; `MISSING` for a row of zeros.
            feeds: The feed that each comes from.

        Raises:
            ShardingError: A row has another tree, shape or dtype than the first one.
        """
        for row in rows:
            if row is not MISSING:
                self.learn(row)
                break
        assert self._stacker is not None, "no row has been seen yet"
        zeros, stack = self._stacker.zeros(), Stack(self._stacker, len(rows))
        stack.add([zeros if row is MISSING else row for row in rows], feeds)
        return stack.batch()


class FeedIterator(BatchIterator):
    """The batches of some feeds.

    Args:
        open_feed: Makes the reader of a feed, from where it is to start.
        feeds: Those to run, in the order of their rows.
        num_feeds: How many feeds there are on all hosts together, for messages.
        rows_per_feed: What each feed gives to a batch, in rows.
        join: From what each feed gave to a batch; None if that makes no batch any more.
        to_state: From a position to a state as plain JSON.
        from_state: Back again.
        num_threads: Threads that run feeds side by side.
    """

    def __init__(
        self,
        open_feed: Callable[[int, Entry], FeedReader],
        feeds: Sequence[int],
        *,
        num_feeds: int,
        rows_per_feed: int,
        join: Callable[[Sequence[Piece]], Batch | None],
        to_state: Callable[[FeedsPosition], dict[str, Any]],
        from_state: Callable[[Mapping[str, Any]], FeedsPosition],
        num_threads: int,
    ):
        super().__init__()
        self._open_feed, self._num_feeds, self._rows_per_feed = open_feed, num_feeds, rows_per_feed
        self._join, self._to_state, self._from_state = join, to_state, from_state
        self._num_threads = min(num_threads, len(feeds))
        self._is_closed, self._pieces = False, None
        self._open(FeedsPosition(0, dict.fromkeys(feeds, pickle.dumps({}))))

    def _open(self, position: FeedsPosition) -> None:
        self._position, self._ended = position, False
        readers = {
            feed: self._open_feed(feed, pickle.loads(entry))
            for feed, entry in position.entries.items()
        }
        if self._pieces is not None:
            self._pieces.close()
        self._pieces = _Pieces(readers, self._take, self._num_threads)

    def _take(self, feed: int, reader: FeedReader) -> Piece:
        with span(READ), naming_feed(feed, self._num_feeds):
            rows = reader.take(self._rows_per_feed)
            return Piece(feed, rows, pickle.dumps(reader.entry()))  # Grain may change the entry

    def __next__(self) -> Batch:
        self._require_open()
        if self._ended:
            raise StopIteration
        assert self._pieces is not None
        pieces = self._pieces.of_one_batch()
        with span(BATCH):
            batch = self._join(pieces)
        if batch is None:
            self._ended = True
            raise StopIteration
        entries = {piece.feed: piece.entry for piece in pieces}
        self._position = FeedsPosition(self._position.step + 1, entries)
        return batch

    def position(self) -> bytes:
        return pickle.dumps(self._position)

    def go_to(self, position: bytes) -> None:
        self._open(pickle.loads(position))

    def get_state(self) -> dict[str, Any]:
        return self._to_state(self._position)

    def set_state(self, state: dict[str, Any]) -> None:
        self._require_open()
        self._open(self._from_state(state))

    def stop(self) -> None:
        if self._pieces is not None:
            self._pieces.stop()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            if self._pieces is not None:
                self._pieces.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("this is a closed iterator; make another by iter(ds).")


class _Pieces:
    """Takes from each feed what it gives to a batch: in turn, or in several threads.

    With threads, a turn of each feed is handed out when a batch is asked for, and not before, so
    that no feed is read farther ahead than the batch that is being made. As many turns as there are
    feeds are under way at most, so no feed is read by two threads at once.

    Args:
        readers: Of each feed, in the order of their rows.
        take: What is done in a turn.
        num_threads: How many threads take turns.
    """

    def __init__(
        self,
        readers: Mapping[int, FeedReader],
        take: Callable[[int, FeedReader], Piece],
        num_threads: int,
    ):
        self._turns = _Turns(readers)
        self._take, self._stage = take, None
        if num_threads > 1:
            self._stage = Background(
                lambda turn: take(*turn),
                self._turns,
                buffer_size=len(readers),
                num_threads=num_threads,
                name="grain-shard-feed",
            )

    def of_one_batch(self) -> list[Piece]:
        """What every feed gives to the next batch."""
        count = self._turns.ask()
        if self._stage is None:
            return [self._take(*next(self._turns)) for _ in range(count)]
        return [next(self._stage) for _ in range(count)]

    def stop(self) -> None:
        """Ends the threads as soon as what they are in returns."""
        if self._stage is not None:
            self._stage.stop()

    def close(self) -> None:
        """Closes the feeds, once no thread is at work any more."""
        (self._turns if self._stage is None else self._stage).close()


class _Turns(Producer[tuple[int, FeedReader]]):
    """The feeds in order, again and again; as many of them as were asked for."""

    def __init__(self, readers: Mapping[int, FeedReader]):
        self._readers = dict(readers)
        self._cycle: Iterator[tuple[int, FeedReader]] = itertools.cycle(self._readers.items())
        self._asked, self._stopped = threading.Semaphore(0), False

    def ask(self) -> int:
        """Asks for a turn of each feed, and says how many these are."""
        self._asked.release(len(self._readers))
        return len(self._readers)

    def __next__(self) -> tuple[int, FeedReader]:
        self._asked.acquire()
        if self._stopped:
            raise StopIteration
        return next(self._cycle)

    def stop(self) -> None:
        self._stopped = True
        self._asked.release()

    def close(self) -> None:
        # Every feed is closed, also if closing one of them fails.
        with contextlib.ExitStack() as closing:
            for reader in self._readers.values():
                closing.callback(reader.close)
