"""`FeedRows`: which rows of a batch come from which feed, and how they become a batch.

All feeds give the same number of rows to a batch. The rows of feed 0 come first, then the rows of
feed 1, and so on. A host runs only the feeds whose rows it holds.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grain_shard.errors import ShardingError, require_int
from grain_shard.grain_inside.read_ahead import begins_with_records
from grain_shard.reading.faults import FaultRules, Faults, read_by_several
from grain_shard.reading.padding import SHORT_REMEDY, Padding, pad_batch
from grain_shard.reading.stack import RowStacker
from grain_shard.sharding.layout import BatchLayout
from grain_shard.spans import BATCH, span
from grain_shard.streams.stream_rows import Joiner, StreamRows
from grain_shard.streams.streams import StreamReads, Turn
from grain_shard.streams.turns import Turns
from grain_shard.trees import Batch

# The layout of a process that keeps all rows.
_ALL_ROWS = BatchLayout(divisor=1, shards=(0,))


@dataclass(frozen=True, kw_only=True)
class FeedRows(StreamRows):
    """The rows of a batch, divided among feeds.

    Attributes:
        num_feeds: Number of feeds.
        global_batch_size: Rows of a batch, of all hosts together.
        padding: The padding in place of the missing rows of feeds that have ended. None leaves the
            missing rows out, so that the batch is shorter.

    Raises:
        ShardingError: The batch size is not a multiple of the number of feeds.
    """

    num_feeds: int
    global_batch_size: int

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
    def num_streams(self) -> int:
        return self.num_feeds

    @property
    def unpadded_size(self) -> int:
        return self.global_batch_size

    @property
    def rows_in_turn(self) -> int:
        return self.global_batch_size // self.num_feeds

    @property
    def numbers(self) -> Sequence[int]:
        return list(self.by_feed)

    @functools.cached_property
    def by_feed(self) -> dict[int, list[int]]:
        """Maps each feed that this host runs to the rows that the host keeps; see `rows_of`.

        Example:
            >>> import grain_shard
            >>> rows = grain_shard.feeds(lambda feed: ..., num_feeds=4).batch(8).host_rows
            >>> rows.of_host(BatchLayout(divisor=8, shards=(2, 3, 4))).by_feed
            {1: [0, 1], 2: [0]}
        """
        return self.rows_of(self.layout or _ALL_ROWS)

    def rows_of(self, layout: BatchLayout) -> dict[int, list[int]]:
        """Maps each feed that a host runs to the rows that the host keeps of that feed.

        The number of a row counts the rows that the feed gives to one batch, from 0. Each host
        calls this for all hosts, so it works on ranges of rows, which is fast.

        Args:
            layout: The rows of a global batch that the host holds.

        Example:
            >>> import grain_shard
            >>> rows = grain_shard.feeds(lambda feed: ..., num_feeds=4).batch(8).host_rows
            >>> rows.rows_of(BatchLayout(divisor=2, shards=(1,)))
            {2: [0, 1], 3: [0, 1]}
        """
        # Feed f gives the rows from f * size on. The rows after the last feed's are padding.
        size, found = self.rows_in_turn, dict[int, list[int]]()
        for start, stop in layout.ranges(self.padded_size(self.global_batch_size)):
            for feed in range(start // size, min(-(-stop // size), self.num_feeds)):
                rows = range(max(0, start - feed * size), min(size, stop - feed * size))
                found.setdefault(feed, []).extend(rows)
        return found

    def of_host(self, layout: BatchLayout) -> FeedRows:
        padding = self.padding or Padding(divisor=layout.divisor)
        own = replace(self, padding=padding, layout=layout)
        _ = own.by_feed  # raises an error if the shards do not divide the batch size
        return own

    def begin(self, learned: Mapping[str, int]) -> FeedJoiner:
        return FeedJoiner(self)

    def first(self, rules: FaultRules) -> Batch:
        """Returns a host batch that is all padding, for its shapes and dtypes.

        One row is read to learn them: the first row of the first feed that has one. The feed may be
        one that this host does not run.

        Raises:
            ShardingError: No feed has a row.
        """
        reads, joiner = StreamReads(Faults(rules)), self.begin({})
        for feed in range(self.num_feeds):
            with contextlib.closing(Turns(self.streams, reads, {feed: {}})) as turns:
                (turn,) = next(turns)
            if turn.rows:
                self.streams.look_at(turn.state)
                return joiner.padding_like(turn)
        raise ShardingError(
            "no feed has a row, so the shapes of a batch are unknown.",
            remedy="check that the source has records, and that a .filter in make_feed keeps some.",
        )

    def check_hosts(self, layouts: Mapping[int, BatchLayout]) -> None:
        # All layouts have the same mesh axes and divisor. `up` is the size of a padded batch.
        layout = next(iter(layouts.values()))
        # Number of groups of hosts that hold the same rows.
        groups = len({of_host.shards for of_host in layouts.values()})
        mesh_axes, up = layout.mesh_axes, layout.padded(self.global_batch_size)
        if self.num_feeds < groups:
            raise ShardingError(
                f"num_feeds={self.num_feeds} is too small for {groups} hosts with different rows.",
                mesh_axes=mesh_axes,
                remedy="start the run with a num_feeds of at least the largest number of hosts that"
                " it will ever use. num_feeds cannot change during a run.",
            )
        for host, of_host in layouts.items():
            # The host's first row. `up // divisor` is the number of rows in a shard.
            if of_host.shards[0] * (up // layout.divisor) >= self.global_batch_size:
                raise ShardingError(
                    f"host {host} would hold only rows of padding: a batch of"
                    f" {self.global_batch_size} rows is split into {layout.divisor} shards.",
                    mesh_axes=mesh_axes,
                    remedy="use a batch size that is a multiple of"
                    f" {math.lcm(layout.divisor, self.num_feeds)}.",
                )

    def to_save(self, layouts: Mapping[int, BatchLayout], host: int) -> list[int]:
        """Returns the feeds that a host writes into a checkpoint.

        If several hosts run the same feed, the host with the smallest number writes it.

        Example:
            >>> import grain_shard
            >>> rows = grain_shard.feeds(lambda feed: ..., num_feeds=4).batch(8).host_rows
            >>> halves = {host: BatchLayout(divisor=2, shards=(host % 2,)) for host in range(4)}
            >>> [rows.to_save(halves, host) for host in halves]
            [[0, 1], [2, 3], [], []]
        """
        # Hosts often hold the same shards. Only one layout of such hosts is looked at.
        before = {layout.shards: layout for other, layout in layouts.items() if other < host}
        saved_before = {feed for layout in before.values() for feed in self.rows_of(layout)}
        return [feed for feed in self.rows_of(layouts[host]) if feed not in saved_before]

    def fault_rules(self, layouts: Mapping[int, BatchLayout], rules: FaultRules) -> FaultRules:
        if not rules.masks:
            return rules
        if not begins_with_records(self.streams.make(0)):
            raise ShardingError(
                'on_bad_record="mask" needs feeds that begin with a grain.MapDataset, and feed 0'
                " does not.",
                remedy="begin make_feed with a grain.MapDataset. Call the .map that may fail before"
                " .to_iter_dataset(), and call .filter after it. Or catch the error inside the"
                " .map, return a marker such as None, and .filter the markers out.",
            )
        of_hosts = [self.rows_of(layout) for layout in layouts.values()]
        is_shared = sum(map(len, of_hosts)) > len(set().union(*of_hosts))
        return read_by_several(rules) if is_shared else rules


class FeedJoiner(Joiner):
    """Stacks the rows that the feeds of a host give to each batch.

    Args:
        rows: Divides the rows of a batch among the feeds.
    """

    def __init__(self, rows: FeedRows):
        self._by_feed, self._padding, self._wanted = rows.by_feed, rows.padding, rows.rows_in_turn
        padded_size = rows.padded_size(rows.global_batch_size)
        self._size = len((rows.layout or _ALL_ROWS).rows(padded_size))  # rows of a host batch
        self._stacker: RowStacker | None = None

    def has_ended(self, turns: Sequence[Turn]) -> bool:
        if not any(turn.rows for turn in turns):
            return True
        padding, wanted = self._padding, self._wanted
        if padding is None or padding.pads_short:
            return False
        short = [turn for turn in turns if len(turn.rows) < wanted]
        if short and padding.refuses_short:
            raise ShardingError(
                f"feed {short[0].number} has only {len(short[0].rows)} rows left for the last"
                f" batch, which takes {wanted} rows of each feed.",
                remedy=SHORT_REMEDY,
            )
        return bool(short)

    def join(self, turns: Sequence[Turn]) -> Batch:
        if self._stacker is None:
            self._stacker = _stacker(next(turn for turn in turns if turn.rows))
        with span(BATCH):
            return self._joined(turns, self._stacker)

    def padding_like(self, turn: Turn) -> Batch:
        """Returns a batch that is all padding, with the shapes and dtypes of a turn's first row."""
        return self._joined((), _stacker(turn))

    def _joined(self, turns: Sequence[Turn], stacker: RowStacker) -> Batch:
        """Returns this host's batch of the rows that the feeds give.

        A row that its feed does not give is padding; without `padding` it is left out.

        Args:
            turns: The turns of the feeds. A feed without a turn gives no row.
            stacker: Stacks the rows.

        Raises:
            ShardingError: A row has another tree, shape or dtype than the stacker's row.
        """
        given = {turn.number: turn.rows for turn in turns}
        padding = self._padding
        # The rows, the feed of each row for error messages, and where rows of padding stand.
        rows, feeds, missing = list[Any](), list[int](), list[int]()
        for feed, kept in self._by_feed.items():
            of_feed = given.get(feed, [])
            rows += [of_feed[i] for i in kept if i < len(of_feed)]
            if padding is not None and (count := sum(i >= len(of_feed) for i in kept)):
                missing += range(len(rows), len(rows) + count)
                rows += [stacker.placeholder] * count
            feeds += [feed] * (len(rows) - len(feeds))  # for each row that was just added
        arrays = stacker.empty(len(rows))
        stacker.write(arrays, rows, 0, feeds)
        batch = stacker.batch(arrays)
        if padding is None:
            return batch.tree
        return pad_batch(batch, self._size, padding, missing)


def _stacker(turn: Turn) -> RowStacker:
    """Returns a stacker for rows with the tree, shapes and dtypes of a turn's first row.

    Args:
        turn: A turn with at least one row.

    Raises:
        ShardingError: The row cannot be stacked.
    """
    return RowStacker(turn.rows[0], "a row of feed {}".format, turn.number)
