"""`HostFeeds`: this host's batches of feeds, whose state any number of hosts can restore."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from grain_shard.errors import ShardingError
from grain_shard.feeding.feed_batches import FeedBatches, FeedIterator, FeedRun
from grain_shard.feeding.feed_position import FeedsPosition
from grain_shard.feeding.feed_reader import ENDED
from grain_shard.feeding.feed_rows import row_stacker
from grain_shard.feeding.feed_sample import FeedSample
from grain_shard.feeding.feed_turns import FeedTurns, TurnSettings
from grain_shard.grain_inside.flags import let_grain_read_its_flags
from grain_shard.grain_inside.read_ahead import begins_with_records
from grain_shard.hosts.compare import OF_FEEDS
from grain_shard.hosts.feed_files import OwnFeeds
from grain_shard.hosts.state_files import FEEDS
from grain_shard.iteration.compared_batches import Reread
from grain_shard.iteration.host_batches import HostBatches, Opened, opened_in_order
from grain_shard.reading.contents import Contents
from grain_shard.reading.faults import FaultRules, Faults, read_by_several
from grain_shard.reading.rereads import Maker
from grain_shard.sharding.layout import BatchLayout
from grain_shard.trees import Batch


class HostFeeds(HostBatches):
    """This host's batches of feeds.

    A position has the number of batches handed out and the state of each feed. So a checkpoint can
    be divided by feed, and other hosts can read the feeds that they run.

    Args:
        ds: The batches, padded and cut to this host's rows.
        run: The options with which the feeds run. At most `run.buffer_size` batches wait on the
            host or are unfinished. With worker processes, it may be one batch more.
        saved_feeds: The feeds that this host writes into a checkpoint; None for all of its feeds.
    """

    kind = FEEDS
    ends_by_vote = True
    rows = OF_FEEDS

    def __init__(
        self,
        ds: FeedBatches,
        run: FeedRun = FeedRun(),  # noqa: B008 (it is frozen)
        saved_feeds: Sequence[int] | None = None,
    ):
        self._ds, self._run = ds, run
        self.fingerprint = dict(ds.feeds.fingerprint)
        first_feed = ds.feeds.make(0)
        self.contents = Contents(first_feed)
        self._rereads = Reread.of_stream(first_feed) if run.num_threads != 1 else ()
        own = list(ds.rows.by_feed)
        self.own_feeds = OwnFeeds(own, own if saved_feeds is None else saved_feeds)
        if ds.rows.padding is not None:
            self.padding = ds.rows.padding
            self.fingerprint |= ds.rows.padding.fingerprint()
        self.compared = {**self.fingerprint, "global_batch_size": ds.rows.global_batch_size}

    def open(self, position: FeedsPosition | None) -> Opened:
        let_grain_read_its_flags()  # an .mp_prefetch in a feed reads them
        iterator, rereads = FeedIterator(self._ds, self._run, position), self._rereads
        if self._run.num_workers:
            first_rows = functools.partial(
                FeedSample, self._ds, self._run.fault_rules, iterator.position()
            )
            rereads = (Reread(first_rows, Maker("a worker process", False)), *rereads)
        # Worker processes have a buffer of their own. So with workers, only one batch waits in this
        # process.
        buffer_size = 1 if self._run.num_workers else self._run.buffer_size
        return opened_in_order(
            iterator,
            self.kind,
            buffer_size,
            iterator.faults,
            contents=self.contents,
            rereads=rereads,
        )

    def first(self) -> Batch:
        """Returns a host batch that is all padding, for its shapes and dtypes.

        One row is read to learn them. It comes from the feed with the smallest number that has a
        row, even if this host does not run that feed.

        Raises:
            ShardingError: No feed has a row.
        """
        settings = TurnSettings(self._ds.feeds, 1, 1, Faults(self._run.fault_rules))
        for feed in range(settings.feeds.num_feeds):
            with contextlib.closing(FeedTurns(settings, {feed: {}})) as turns:
                (turn,) = next(turns)
            if turn.rows:
                self._ds.look_at(turn)
                return self._ds.rows.join((), row_stacker(turn))
        raise ShardingError(
            "no feed has a row, so the shapes of a batch are unknown.",
            remedy="check that the source has records, and that a .filter in make_feed keeps some.",
        )

    def next_batch(self, position: FeedsPosition) -> Mapping[str, Any]:
        return {"next batch": position.step}

    def repeated(self, times: int) -> NoReturn:
        raise ShardingError(
            "ds.epochs(n) needs random access: the length of an epoch of feeds is not known.",
            remedy="let make_feed return all epochs of a feed, each in an order of its own. If"
            " make_feed begins with a MapDataset, call .seed(s).shuffle().repeat(n) on it. Or"
            " put the streams of the epochs into an InterleaveIterDataset with cycle_length=1."
            " docs/streams.md#several-epochs shows both.",
        )

    def past_end(self, position: FeedsPosition, batches: int) -> FeedsPosition:
        return FeedsPosition.at(position.step + batches, position.pickled_states, ENDED)

    def why_unsaved(self) -> str:
        return self._ds.why_unsaved

    def to_state(self, position: FeedsPosition) -> dict[str, Any]:
        return position.to_state(self.fingerprint)

    def from_state(self, state: dict[str, Any]) -> FeedsPosition:
        return FeedsPosition.of_state(state, self.fingerprint, self._ds.rows.by_feed)


def feeds_to_save(ds: FeedBatches, layouts: Mapping[int, BatchLayout], host: int) -> list[int]:
    """Returns the feeds that a host writes into a checkpoint.

    Several hosts may run the same feed. The host with the smallest number writes the feed.

    Example:
        >>> from grain_shard import feeds
        >>> ds = feeds(lambda feed: ..., num_feeds=4).batch(8)
        >>> halves = {host: BatchLayout(divisor=2, shards=(host % 2,)) for host in range(4)}
        >>> [feeds_to_save(ds, halves, host) for host in halves]
        [[0, 1], [2, 3], [], []]

    Args:
        ds: The batches of all feeds.
        layouts: The rows of each host, by the host's number.
        host: The number of the host.
    """
    # Hosts often hold the same shards. The dict keeps one layout for all of these hosts.
    before = {layout.shards: layout for other, layout in layouts.items() if other < host}
    saved_before = {feed for layout in before.values() for feed in ds.rows.rows_of(layout)}
    return [feed for feed in ds.rows.rows_of(layouts[host]) if feed not in saved_before]


def fault_rules_of(
    ds: FeedBatches, layouts: Mapping[int, BatchLayout], rules: FaultRules
) -> FaultRules:
    """Returns the rules for failed reads: the user's, or a copy for rows that several hosts read.

    The copy is returned if bad records are left out and more than one host runs the same feed.

    Args:
        ds: The batches of the feeds.
        layouts: The rows of each host, by the host's number.
        rules: The user's rules.

    Raises:
        ShardingError: `on_bad_record` is "mask", and feed 0 does not begin with a
            `grain.MapDataset`.
    """
    if not rules.masks:
        return rules
    if not begins_with_records(ds.feeds.make(0)):
        raise ShardingError(
            'on_bad_record="mask" needs feeds that begin with a grain.MapDataset, and feed 0 does'
            " not.",
            remedy="begin make_feed with a grain.MapDataset. Call the .map that may fail before"
            " .to_iter_dataset(), and call .filter after it. Or catch the error inside the .map,"
            " return a marker such as None, and .filter the markers out.",
        )
    of_hosts = [ds.rows.rows_of(layout) for layout in layouts.values()]
    is_shared = sum(map(len, of_hosts)) > len(set().union(*of_hosts))
    return read_by_several(rules) if is_shared else rules


def check_feeds(ds: FeedBatches, layouts: Mapping[int, BatchLayout]) -> None:
    """Raises an error if the hosts of a mesh cannot divide the feeds among them.

    Args:
        ds: The batches of all feeds.
        layouts: The rows of each host, by the host's number.

    Raises:
        ShardingError: There are fewer feeds than hosts that hold different rows, or all rows of a
            host would be padding.
    """
    layout = next(iter(layouts.values()))  # all layouts have the same mesh axes and divisor
    groups = len({of_host.shards for of_host in layouts.values()})
    mesh_axes, up = layout.mesh_axes, layout.padded(ds.rows.global_batch_size)
    if ds.rows.num_feeds < groups:
        raise ShardingError(
            f"num_feeds={ds.rows.num_feeds} is too small for {groups} hosts with different rows.",
            mesh_axes=mesh_axes,
            remedy="start the run with a num_feeds of at least the largest number of hosts that it"
            " will ever use. num_feeds cannot change during a run.",
        )
    for host, of_host in layouts.items():
        if of_host.shards[0] * (up // layout.divisor) >= ds.rows.global_batch_size:
            raise ShardingError(
                f"host {host} would hold only rows of padding: a batch of"
                f" {ds.rows.global_batch_size} rows is split into"
                f" {layout.divisor} shards.",
                mesh_axes=mesh_axes,
                remedy="use a batch size that is a multiple of"
                f" {math.lcm(layout.divisor, ds.rows.num_feeds)}.",
            )
