"""Feeds: a stream cut into parts, so that its batches do not depend on how many hosts there are.

A feed yields the same rows on whichever host it runs, and has fixed rows of every batch. So the
global batch follows from the pipeline, the number of feeds and the step alone, although a stream
cannot be read by index.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grain
from absl import logging

from grain_shard.digest import MANY_DIGITS, element_digest
from grain_shard.errors import ShardingError
from grain_shard.feeding.feed_position import FeedsPosition
from grain_shard.feeding.feed_reader import FeedStreams, FeedTurn, MakeFeed
from grain_shard.feeding.feed_rows import FeedRows, row_stacker
from grain_shard.feeding.feed_turns import FeedTurns, FeedWorkers
from grain_shard.reading.contents import without_digest
from grain_shard.reading.faults import FaultCounts, FaultRules, Faults
from grain_shard.reading.padding import Padding
from grain_shard.reading.stack import RowStacker
from grain_shard.reading.stream_dataset import BatchIterator
from grain_shard.sharding.layout import BatchLayout
from grain_shard.spans import BATCH, span
from grain_shard.tasks import Items, Producer, Raised
from grain_shard.trees import Batch


def feeds(make_feed: MakeFeed, *, num_feeds: int) -> Feeds:
    """Cuts a stream into feeds, to be run by whichever hosts there are.

    Example:
        >>> import grain
        >>> def numbers(feed):  # its part of the records, without the multiples of 3
        ...     records = grain.MapDataset.range(20)[feed.shard_index :: feed.shard_count]
        ...     options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        ...     ds = records.map(lambda i: {"x": i}).to_iter_dataset(options)
        ...     return ds.filter(lambda record: record["x"] % 3 != 0)
        >>> for batch in feeds(numbers, num_feeds=4).batch(8):
        ...     print(batch["x"])
        [ 4  8  1  5  2 10  7 11]
        [16 13 17 14 19]

    Args:
        make_feed: Makes the stream of rows of one feed, from ``shard_index`` (which feed) and
            ``shard_count`` (of how many): an ordinary Grain pipeline over that part of the source.
            Its rows must depend on these two alone, not on the host that calls it. The feeds of a
            host share the threads that read ahead for them, whatever `grain.ReadOptions` they begin
            with; with no thread or no buffer in these, nothing is read ahead.
        num_feeds: The number of feeds, for the life of the run: at least as many as the most hosts
            that it will ever see.

    Returns:
        The feeds, to be batched.

    Raises:
        ShardingError: `num_feeds` is no positive integer, or `make_feed` cannot be called.
    """
    return Feeds(make_feed, num_feeds)


class Feeds(FeedStreams):
    """A stream cut into parts; `feeds` makes it.

    Example:
        >>> import grain
        >>> Feeds(lambda feed: grain.MapDataset.range(9).to_iter_dataset(), num_feeds=4).batch(8)
        FeedBatches(4 feeds, 8 rows)

    Attributes:
        make_feed: Makes the stream of one feed.
        num_feeds: The number of feeds, on all hosts together.
    """

    def batch(self, global_batch_size: int) -> FeedBatches:
        """Returns batches with equally many rows of each feed: rows of feed 0, then of feed 1, ...

        Args:
            global_batch_size: Rows of a batch, of all hosts together.

        Raises:
            ShardingError: The feeds do not divide the batch.
        """
        return FeedBatches(self, FeedRows(self.num_feeds, global_batch_size))

    def shard_to(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuses feeds that are not batched yet."""
        raise ShardingError(
            "the feeds have no .batch, and .shard_to(mesh) places batches.",
            remedy="call .batch(global_batch_size) on the feeds before .shard_to:"
            " feeds(...).batch(B).shard_to(mesh).",
        )


@dataclass(frozen=True)
class FeedRun:
    """The way in which a host runs its feeds.

    Attributes:
        num_threads: Threads that read ahead for the feeds, in each worker if there are some; None
            finds their number.
        num_workers: Worker processes that run the feeds; 0 for none.
        buffer_size: Batches that the workers make ahead. Grain lets them make four at least,
            however many workers there are.
        fault_rules: The rules for failed reads.
    """

    num_threads: int | None = None
    num_workers: int = 0
    buffer_size: int = 1
    fault_rules: FaultRules = FaultRules()  # noqa: RUF009 (it is frozen)


class FeedBatches(grain.IterDataset):
    """Global batches of feeds, to be ended with ``.shard_to(mesh)``.

    A host then runs only the feeds whose rows its devices hold. Iterated by itself, as in a test,
    it runs all of them, one after the other, without padding: a feed that has ended gives no more
    rows, so that batches shrink, down to the one in which the last feed ends.

    No transformation may stand between the two, on one host as on many: put row transformations
    into `make_feed`.

    Example:
        >>> import grain, jax
        >>> import grain_shard
        >>> def make_feed(feed):
        ...     ids = grain.MapDataset.range(10 * feed.shard_index, 10 * feed.shard_index + 3)
        ...     return ids.map(lambda i: {"id": i}).to_iter_dataset()
        >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
        >>> for batch in grain_shard.feeds(make_feed, num_feeds=2).batch(4).shard_to(mesh):
        ...     print(batch["id"], batch["valid_mask"])
        [ 0  1 10 11] [ True  True  True  True]
        [ 2  0 12  0] [ True False  True False]

    Args:
        feeds: The feeds.
        rows: The rows of a batch that each feed gives.
    """

    def __init__(self, feeds: FeedStreams, rows: FeedRows):
        super().__init__()
        self.feeds: FeedStreams = feeds
        self.rows: FeedRows = rows
        self.has_compared_rows = False  # True once the first rows of all feeds were compared

    def padded(self, padding: Padding) -> FeedBatches:
        """Returns batches of one size: padding in place of rows that feeds lack, and the mask."""
        return FeedBatches(self.feeds, replace(self.rows, padding=padding))

    def of_host(self, layout: BatchLayout) -> FeedBatches:
        """Returns the rows of one host, from the feeds that they belong to and no others.

        Args:
            layout: The rows that the host holds. The padded batch has to be its `multiple`.
        """
        padding = self.rows.padding or Padding(divisor=layout.multiple)
        return FeedBatches(self.feeds, replace(self.rows, padding=padding, layout=layout))

    def __iter__(self) -> FeedIterator:
        return FeedIterator(self, FeedRun())

    def __repr__(self) -> str:
        return f"FeedBatches({self.rows.num_feeds} feeds, {self.rows.global_batch_size} rows)"

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> NoReturn:
        """Refused; Grain calls it to divide a dataset among its workers."""
        raise ShardingError(
            "batches of feeds cannot be divided among the worker processes of .mp_prefetch.",
            remedy="pass num_workers to .shard_to instead: each worker then runs some feeds.",
        )


def _warn_of_same_rows(turns: Sequence[FeedTurn]) -> None:
    """Warns if two feeds give the same rows, as they do if `make_feed` ignores its argument."""
    turn_of: dict[str, FeedTurn] = {}
    with contextlib.suppress(TypeError):  # an object in a row has no digest
        for turn in turns:
            same = turn_of.setdefault(element_digest(turn.rows[:1], MANY_DIGITS), turn)
            if same is turn or not turn.rows:
                continue
            if element_digest(same.rows, MANY_DIGITS) == element_digest(turn.rows, MANY_DIGITS):
                logging.warning(
                    "grain_shard: feeds %d and %d begin with the same rows, so both feeds most"
                    " likely read the same records. remedy: return a different part of the source"
                    " from make_feed for each shard_index, such as"
                    " records[feed.shard_index :: feed.shard_count].",
                    same.feed,
                    turn.feed,
                )
                return


class FeedIterator(BatchIterator):
    """The batches of feeds.

    Args:
        ds: The dataset.
        run: The way to run the feeds.
        position: The feeds' position at the start; None for the beginning.
    """

    _turns: Producer[list[FeedTurn]] = Items(iter(()))  # closed by Grain even if __init__ failed

    def __init__(self, ds: FeedBatches, run: FeedRun, position: FeedsPosition | None = None):
        super().__init__()
        # Made here, because the names of this module may be gone at the interpreter's exit.
        closed = "this is a closed iterator: call iter(ds) for a new one."
        self._closed = self._end = Raised(ValueError(closed), None)
        self._ds, self._run = ds, run
        self._stacker: RowStacker | None = None
        self._go_to(position or FeedsPosition.at_start(ds.rows.by_feed))

    def _go_to(self, position: FeedsPosition) -> None:
        ds, run, states = self._ds, self._run, position.feed_states()
        self._position = position
        self._end: Raised | None = None
        self._faults = Faults(run.fault_rules)
        open_turns = functools.partial(
            FeedTurns, ds.feeds, self._faults, ds.rows.per_feed, run.num_threads
        )
        if run.num_workers:
            workers = run.num_workers, run.buffer_size
            self._turns = FeedWorkers(open_turns, self._faults, states, *workers)
        else:
            self._turns = open_turns(states)

    def __next__(self) -> Batch:
        if self._end is not None:
            self._end.throw()
        try:
            turns = next(self._turns)
            if self._ds.rows.end_with(turns):
                raise StopIteration
            with span(BATCH):
                if self._stacker is None:
                    if not self._ds.has_compared_rows:
                        self._ds.has_compared_rows = True
                        _warn_of_same_rows(turns)
                    rows = ((row, turn.feed) for turn in turns for row in turn.rows)
                    self._stacker = row_stacker(*next(rows))
                batch = self._ds.rows.join(turns, self._stacker)
        except Exception as error:
            # The feeds have handed over this batch's rows, so a further ``next`` would skip them.
            self._end = Raised(error, error.__traceback__)
            raise
        states = {turn.feed: turn.feed_state for turn in turns}
        self._position = FeedsPosition(self._position.step + 1, states)
        return batch

    def faults(self) -> FaultCounts:
        """Returns the counts of reads that failed."""
        return self._faults.counts()

    def position(self) -> FeedsPosition:
        return self._position

    def get_state(self) -> dict[str, Any]:
        return self._position.to_state(self._ds.feeds.fingerprint)

    def set_state(self, state: dict[str, Any]) -> None:
        before, (state, _) = self._turns, without_digest(state)
        # The position moves before the old feeds are closed. Closing may fail, and a closed feed
        # would begin anew.
        self._go_to(
            FeedsPosition.of_state(state, self._ds.feeds.fingerprint, self._ds.rows.by_feed)
        )
        before.close()

    def stop(self) -> None:
        self._turns.stop()

    def close(self) -> None:
        self._end = self._closed
        self._turns.close()
