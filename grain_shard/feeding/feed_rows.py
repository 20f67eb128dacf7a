"""`FeedRows`: which rows of a batch come from which feed, and how they become a batch.

All feeds give the same number of rows to a batch. The rows of feed 0 come first, then the rows of
feed 1, and so on. A host runs only the feeds whose rows it holds.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grain_shard.errors import ShardingError, require_int
from grain_shard.feeding.feed_reader import FeedTurn
from grain_shard.reading.padding import SHORT_REMEDY, Padding, pad_batch
from grain_shard.reading.stack import RowStacker
from grain_shard.sharding.layout import BatchLayout, round_up
from grain_shard.trees import Batch


def row_stacker(turn: FeedTurn) -> RowStacker:
    """Returns a stacker for rows with the tree, shapes and dtypes of a feed's next row.

    Args:
        turn: The rows of the feed, at least one.

    Raises:
        ShardingError: The row cannot be stacked.
    """
    return RowStacker(turn.rows[0], "a row of feed {}", turn.feed)


# The layout of a process that keeps all rows.
_ALL_ROWS = BatchLayout(divisor=1, shards=(0,))


@dataclass(frozen=True)
class FeedRows:
    """The rows of a batch, divided among feeds.

    Attributes:
        num_feeds: Number of feeds.
        global_batch_size: Rows of a batch, of all hosts together.
        padding: The padding in place of the missing rows of feeds that have ended. None leaves the
            missing rows out, so that the batch is shorter.
        layout: The rows that this host keeps; None to keep all rows.

    Raises:
        ShardingError: The batch size is not a multiple of the number of feeds.
    """

    num_feeds: int
    global_batch_size: int
    padding: Padding | None = None
    layout: BatchLayout | None = None

    def __post_init__(self) -> None:
        require_int("global_batch_size", self.global_batch_size, 1)
        if self.global_batch_size % self.num_feeds:
            down = self.global_batch_size // self.num_feeds * self.num_feeds
            sizes = " or ".join(str(n) for n in (down, down + self.num_feeds) if n)
            raise ShardingError(
                f"a batch of {self.global_batch_size} rows does not split into the same number of"
                f" rows for each of {self.num_feeds} feeds.",
                remedy=f"use a batch size of {sizes}, or a num_feeds that divides the batch size.",
            )

    @property
    def per_feed(self) -> int:
        """Number of rows that each feed gives to a batch."""
        return self.global_batch_size // self.num_feeds

    @functools.cached_property
    def by_feed(self) -> dict[int, list[int]]:
        """Maps each feed that this host runs to the rows that the host keeps of that feed.

        Rows are counted among the rows that the feed gives to one batch, from 0.

        Example:
            >>> FeedRows(4, 8, layout=BatchLayout(divisor=8, shards=(2, 3, 4))).by_feed
            {1: [0, 1], 2: [0]}
        """
        return self.rows_of(self.layout or _ALL_ROWS)

    def rows_of(self, layout: BatchLayout) -> dict[int, list[int]]:
        """Maps each feed that a host runs to the rows that the host keeps of that feed.

        Rows are counted among the rows that the feed gives to one batch, from 0. Each host calls
        this for all hosts, so it uses ranges of rows, which is fast.

        Args:
            layout: The rows of the host.

        Example:
            >>> FeedRows(4, 8).rows_of(BatchLayout(divisor=2, shards=(1,)))
            {2: [0, 1], 3: [0, 1]}
        """
        size, found = self.per_feed, dict[int, list[int]]()
        for start, stop in layout.ranges(self._padded_size):
            for feed in range(start // size, min(-(-stop // size), self.num_feeds)):
                rows = range(max(0, start - feed * size), min(size, stop - feed * size))
                found.setdefault(feed, []).extend(rows)
        return found

    @property
    def _padded_size(self) -> int:
        divisor = 1 if self.padding is None else self.padding.divisor
        return round_up(self.global_batch_size, divisor)

    def end_with(self, turns: Sequence[FeedTurn]) -> bool:
        """Returns True if no further batch is made, because feeds have ended.

        That is so if no feed has a row, or if short batches are left out and a feed has too few.

        Args:
            turns: The rows that each feed has for the next batch.

        Raises:
            ShardingError: A feed has too few rows, and a batch may not be short.
        """
        if not any(turn.rows for turn in turns):
            return True
        if self.padding is None or self.padding.pads_short:
            return False
        short = [turn for turn in turns if len(turn.rows) < self.per_feed]
        if short and self.padding.refuses_short:
            raise ShardingError(
                f"feed {short[0].feed} has only {len(short[0].rows)} rows left for the last batch,"
                f" which takes {self.per_feed} rows of each feed.",
                remedy=SHORT_REMEDY,
            )
        return bool(short)

    def join(self, turns: Sequence[FeedTurn], stacker: RowStacker) -> Batch:
        """Returns the batch of the rows that the feeds give, on this host.

        If `padding` is set, missing rows are padding, and the batch has the mask.

        Args:
            turns: The rows of each feed. A feed that is not listed gives no row.
            stacker: Stacks the rows.

        Raises:
            ShardingError: A row has another tree, shape or dtype than the stacker's row.
        """
        given = {turn.feed: turn.rows for turn in turns}
        rows, feeds, missing = list[Any](), list[int](), list[int]()
        for feed, kept in self.by_feed.items():
            of_feed = given.get(feed, [])
            rows += [of_feed[i] for i in kept if i < len(of_feed)]
            if self.padding is not None and (count := sum(i >= len(of_feed) for i in kept)):
                missing += range(len(rows), len(rows) + count)
                rows += [stacker.empty_row] * count
            feeds += [feed] * (len(rows) - len(feeds))
        if missing and self.padding is not None:
            self.padding.warn_if_unmasked()
        arrays = stacker.empty(len(rows))
        stacker.write(arrays, rows, 0, feeds)
        batch = stacker.batch(arrays)
        if self.padding is None:
            return batch.tree
        size = len((self.layout or _ALL_ROWS).rows(self._padded_size))
        return pad_batch(batch, size, self.padding, missing)
