"""Feeds: a stream cut into parts, so that its batches do not depend on the number of hosts.

A stream cannot be read by index. But a feed yields the same rows on every host, and each feed fills
fixed rows of every batch. So the global batch depends only on the pipeline, the number of feeds and
the step.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NoReturn

import grain
import numpy as np
from absl import logging

from grain_shard.digest import MANY_DIGITS, element_digest
from grain_shard.errors import ShardingError
from grain_shard.feeding.feed_position import FeedsPosition
from grain_shard.feeding.feed_reader import FeedStreams, FeedTurn, MakeFeed
from grain_shard.feeding.feed_rows import FeedRows, row_stacker
from grain_shard.feeding.feed_turns import FeedTurns, FeedWorkers, TurnSettings
from grain_shard.grain_inside import nodes
from grain_shard.reading.contents import without_digest
from grain_shard.reading.faults import FaultCounts, FaultRules, Faults
from grain_shard.reading.padding import Padding
from grain_shard.reading.stack import RowStacker
from grain_shard.reading.stream_dataset import BatchIterator
from grain_shard.sharding.layout import BatchLayout
from grain_shard.spans import BATCH, span
from grain_shard.state_json import from_storage, warn_unsaved, why_unsaved
from grain_shard.threads.tasks import Items, Producer, Raised
from grain_shard.trees import Batch, flatten


def feeds(make_feed: MakeFeed, *, num_feeds: int) -> Feeds:
    """Cuts a stream into feeds, which any number of hosts can run.

    Example:
        >>> import grain
        >>> def numbers(feed):  # the records of one feed, without the multiples of 3
        ...     records = grain.MapDataset.range(20)[feed.shard_index :: feed.shard_count]
        ...     options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        ...     ds = records.map(lambda i: {"x": i}).to_iter_dataset(options)
        ...     return ds.filter(lambda record: record["x"] % 3 != 0)
        >>> for batch in feeds(numbers, num_feeds=4).batch(8):
        ...     print(batch["x"])
        [ 4  8  1  5  2 10  7 11]
        [16 13 17 14 19]

    Args:
        make_feed: Returns the stream of rows of one feed: an ordinary Grain pipeline over one part
            of the source. Its argument has ``shard_index``, the number of the feed, and
            ``shard_count``, the number of feeds. The rows must depend on these two numbers only,
            not on the host. The feeds of a host share the threads that read ahead, so the numbers
            in `grain.ReadOptions` are not used. Only 0 threads or a buffer of 0 matter: then no
            record of the feed is read ahead.
        num_feeds: Number of feeds. It cannot change during a run, so it must be at least the
            largest number of hosts that the run will ever have.

    Returns:
        The feeds. Their method ``batch`` makes batches of them.

    Raises:
        ShardingError: `num_feeds` is not a positive integer, or `make_feed` cannot be called.
    """
    return Feeds(make_feed, num_feeds)


class Feeds(FeedStreams):
    """A stream cut into parts, called feeds. The function `feeds` makes it.

    Example:
        >>> import grain
        >>> Feeds(lambda feed: grain.MapDataset.range(9).to_iter_dataset(), num_feeds=4).batch(8)
        FeedBatches(4 feeds, 8 rows)

    Attributes:
        make_feed: Returns the stream of one feed.
        num_feeds: Number of feeds, on all hosts together.
    """

    def batch(self, global_batch_size: int, **options: Any) -> FeedBatches:
        """Returns global batches with the same number of rows of each feed.

        The rows of feed 0 come first, then the rows of feed 1, and so on.

        Args:
            global_batch_size: Rows of a batch, of all hosts together.
            **options: Refused. Feeds do not support the options of Grain's ``.batch``.

        Raises:
            ShardingError: The batch size is not a multiple of the number of feeds, or an option is
                given.
        """
        if options:
            raise ShardingError(
                f"the .batch of feeds takes no {', '.join(options)}.",
                remedy='call .batch(global_batch_size). In place of drop_remainder pass remainder="'
                'drop" to .shard_to, and in place of batch_fn pad or pack rows in make_feed.',
            )
        return FeedBatches(self, FeedRows(self.num_feeds, global_batch_size))

    def shard_to(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a `ShardingError`: ``.batch`` must come before ``.shard_to``."""
        raise ShardingError(
            "the feeds have no .batch, and .shard_to(mesh) places batches.",
            remedy="call .batch(global_batch_size) on the feeds before .shard_to:"
            " feeds(...).batch(B).shard_to(mesh).",
        )

    if not TYPE_CHECKING:  # so that type checkers, too, refuse an attribute that feeds lack

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"feeds have no .{name}.\n"
                "  remedy: transform rows in make_feed. After feeds(make_feed, num_feeds=...) write"
                " only .batch(global_batch_size).shard_to(mesh)."
            )


@dataclass(frozen=True)
class FeedRun:
    """The options with which a host runs its feeds.

    Attributes:
        num_threads: Number of threads that read ahead for the feeds, in this process or in each
            worker process. None adapts the number while the feeds run.
        num_workers: Number of worker processes that run the feeds. 0 runs them in this process.
        buffer_size: Number of batches that are made ahead. With workers it is at least four,
            because Grain makes no smaller buffer.
        fault_rules: The rules for failed reads.
    """

    num_threads: int | None = None
    num_workers: int = 0
    buffer_size: int = 1
    fault_rules: FaultRules = FaultRules()  # noqa: RUF009 (it is frozen)


class FeedBatches(grain.IterDataset):
    """Global batches of feeds. ``.shard_to(mesh)`` puts them on the devices of a mesh.

    After ``.shard_to`` each host runs only the feeds whose rows its devices hold. Without
    ``.shard_to``, as in a test, one process runs all feeds, and nothing is padded. A feed that has
    ended then gives no more rows, so the last batches are smaller.

    No transformation may stand between ``.batch`` and ``.shard_to``, not even on a single host.
    Transformations of rows belong into `make_feed`.

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
        rows: Divides the rows of a batch among the feeds.
    """

    def __init__(self, feeds: FeedStreams, rows: FeedRows):
        super().__init__()
        self.feeds: FeedStreams = feeds
        self.rows: FeedRows = rows
        self.has_compared_rows = False  # True once the first rows of all feeds were compared
        self.why_unsaved = ""  # the reason why no state of the feeds can be saved, and the remedy

    def padded(self, padding: Padding) -> FeedBatches:
        """Returns batches of a fixed size, with padding for missing rows, and with a mask.

        Args:
            padding: The content of rows of padding, and the key of the mask.
        """
        return FeedBatches(self.feeds, replace(self.rows, padding=padding))

    def of_host(self, layout: BatchLayout) -> FeedBatches:
        """Returns the batches of one host, which runs only the feeds that give its rows.

        Args:
            layout: The rows that the host holds. The size of a padded batch has to be a multiple of
                `layout.divisor`.
        """
        padding = self.rows.padding or Padding(divisor=layout.divisor)
        return FeedBatches(self.feeds, replace(self.rows, padding=padding, layout=layout))

    def look_at(self, turn: FeedTurn) -> None:
        """Logs a warning if the state of a feed cannot be saved, and keeps the reason."""
        if not self.why_unsaved:
            self.why_unsaved = why_unsaved(pickle.loads(turn.feed_state))
            if self.why_unsaved:
                warn_unsaved(self.why_unsaved)

    def __iter__(self) -> FeedIterator:
        return FeedIterator(self, FeedRun())

    def __repr__(self) -> str:
        return f"FeedBatches({self.rows.num_feeds} feeds, {self.rows.global_batch_size} rows)"


def _warn_of_same_rows(turns: Sequence[FeedTurn]) -> None:
    """Logs a warning if two feeds give the same rows, as when `make_feed` ignores its argument.

    Args:
        turns: The rows of each feed in the first batch.
    """
    turn_of: dict[str, FeedTurn] = {}
    with contextlib.suppress(TypeError):  # raised if an object in a row has no digest
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


def _warn_of_batches(ds: FeedBatches, row: Any) -> None:
    """Logs a warning if `make_feed` ends with ``.batch``, so that each row is a batch itself.

    Nothing is logged if each leaf of the row has one dim: so ``.batch`` cuts tokens into rows.

    Args:
        ds: The batches of the feeds.
        row: A row of a feed.
    """
    shapes = ((path, np.shape(leaf)) for path, leaf in zip(*flatten(row)[:2], strict=True))
    path, shape = next(((path, shape) for path, shape in shapes if len(shape) > 1), ("", ()))
    # `make_feed` is the user's code, so it is called only if the row may be a batch.
    if not path or (size := nodes.records_per_row(ds.feeds.make(0))) is None:
        return
    rows = ds.rows.global_batch_size
    logging.warning(
        "grain_shard: make_feed ends with .batch(%d), so each row of a feed is a batch of"
        " %d records: %s has shape %s. remedy: leave this .batch out of make_feed, because"
        " the .batch(%d) of the feeds makes batches. If a row is meant to hold %d records,"
        " nothing is wrong.",
        *(size, size, path, (rows, *shape), rows, size),
    )


class FeedIterator(BatchIterator):
    """An iterator over the batches of feeds.

    Args:
        ds: The batches of feeds, for one host or for all.
        run: The options with which the feeds run.
        position: The position at which the feeds start; None for the beginning.
    """

    # Grain calls `close` even if `__init__` failed.
    _turns: Producer[list[FeedTurn]] = Items(iter(()))

    def __init__(self, ds: FeedBatches, run: FeedRun, position: FeedsPosition | None = None):
        super().__init__()
        # `close` may run at the interpreter's exit, when the names of this module are gone. So the
        # error is made here.
        closed = "this is a closed iterator: call iter(ds) for a new one."
        self._closed = self._end = Raised(ValueError(closed), None)
        self._ds, self._run = ds, run
        self._stacker: RowStacker | None = None
        self._go_to(position or FeedsPosition.at(0, ds.rows.by_feed, {}))

    def _go_to(self, position: FeedsPosition) -> None:
        ds, run, states = self._ds, self._run, position.feed_states()
        self._position = position
        self._end: Raised | None = None
        self._faults = Faults(run.fault_rules)
        settings = TurnSettings(ds.feeds, ds.rows.per_feed, run.num_threads, self._faults)
        if run.num_workers:
            self._turns = FeedWorkers(settings, states, run.num_workers, run.buffer_size)
        else:
            self._turns = FeedTurns(settings, states)

    def __next__(self) -> Batch:
        if self._end is not None:
            self._end.throw()
        try:
            turns = next(self._turns)
            if self._ds.rows.end_with(turns):
                raise StopIteration
            with span(BATCH):
                if self._stacker is None:
                    first = next(turn for turn in turns if turn.rows)
                    if not self._ds.has_compared_rows:
                        self._ds.has_compared_rows = True
                        _warn_of_same_rows(turns)
                        _warn_of_batches(self._ds, first.rows[0])
                        self._ds.look_at(first)
                    self._stacker = row_stacker(first)
                batch = self._ds.rows.join(turns, self._stacker)
        except Exception as error:
            # The feeds have already given the rows of this batch. A further ``next`` would skip
            # these rows, so it raises the error again.
            self._end = Raised(error, error.__traceback__)
            raise
        states = {turn.feed: turn.feed_state for turn in turns}
        self._position = FeedsPosition(self._position.step + 1, states)
        return batch

    def faults(self) -> FaultCounts:
        """Returns the counts of failed reads since this iterator was made or its state was set."""
        return self._faults.counts()

    def position(self) -> FeedsPosition:
        return self._position

    def get_state(self) -> dict[str, Any]:
        return self._position.to_state(self._ds.feeds.fingerprint)

    def set_state(self, state: dict[str, Any]) -> None:
        ds, before, (state, _) = self._ds, self._turns, without_digest(from_storage(state))
        # The new feeds replace the old ones before the old ones are closed. If closing raises an
        # error, the iterator is at the new position already, and uses no closed feed.
        self._go_to(FeedsPosition.of_state(state, ds.feeds.fingerprint, ds.rows.by_feed))
        before.close()

    def stop(self) -> None:
        self._turns.stop()

    def close(self) -> None:
        self._end = self._closed
        self._turns.close()
