"""This host's batches of feeds: a stream whose state any number of hosts can take up."""

from __future__ import annotations

import contextlib
import pickle
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from grain_shard.errors import ShardingError
from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.feeding.feed_iterator import FeedIterator
from grain_shard.feeding.feed_position import FeedsPosition
from grain_shard.feeding.feed_reader import naming_feed
from grain_shard.feeding.feed_turns import row_stacker
from grain_shard.hosts.compare import OF_FEEDS
from grain_shard.hosts.feed_files import OwnFeeds
from grain_shard.hosts.state_files import FEEDS
from grain_shard.iteration.stream import Stream
from grain_shard.reading.faults import FaultRules, Faults, read_by_several
from grain_shard.reading.pad_batch import Remainder
from grain_shard.sharding.layout import BatchLayout, describe_parts
from grain_shard.trees import Batch


class HostFeeds(Stream):
    """The rows of `FeedBatches` that this host holds.

    What is different from any other stream: its position is that of each feed and the number of
    batches, so its state can be taken apart and put together again for other hosts.

    Args:
        ds: The batches, padded and cut to this host's rows.
        buffer_size: Batches that may wait on the host or be in the making.
        num_threads: Threads that run feeds side by side; None for one, as Python's interpreter runs
            one at a time, and switching between them costs a tenth of what packing takes.
        num_workers: Worker processes that run the feeds, if not 0. Grain keeps four batches ahead
            at least, whatever their number, so that many may be on the host.
        saved_feeds: Those of its feeds that this host writes into a checkpoint; None for all.
        fault_rules: What becomes of reads that fail.
    """

    kind: str = FEEDS
    rows: str = OF_FEEDS

    def __init__(
        self,
        ds: FeedBatches,
        *,
        buffer_size: int,
        num_threads: int | None,
        num_workers: int = 0,
        saved_feeds: Sequence[int] | None = None,
        fault_rules: FaultRules = FaultRules(),  # noqa: B008 (it is frozen)
    ):
        self._fault_rules = fault_rules
        self._ds, self._num_threads, self._num_workers = ds, num_threads or 1, num_workers
        # Of batches that workers make, one waits here, out of their shared memory.
        self._buffer_size = 1 if num_workers else buffer_size
        self._buffer_of_workers = buffer_size
        self.fingerprint = ds.fingerprint
        run = list(ds.rows.by_feed)
        self.own_feeds = OwnFeeds(run, run if saved_feeds is None else saved_feeds)
        self.compared = {**ds.fingerprint, "global_batch_size": ds.global_batch_size}
        if ds.rows.padding is not None:
            self.padding = ds.rows.padding.rows

    def _iterate(self) -> FeedIterator:
        return self._ds.iterate(
            self._num_threads, self._num_workers, self._buffer_of_workers, self._fault_rules
        )

    def first(self) -> Batch:
        """A batch of padding, for a host of which no feed has had a row yet.

        Raises:
            ShardingError: No feed of any host has one.
        """
        faults = Faults(self._fault_rules)
        for feed in range(self._ds.num_feeds):
            with (
                naming_feed(feed, self._ds.num_feeds),
                contextlib.closing(self._ds.open_feed(feed, {}, faults)) as reader,
            ):
                rows = reader.take(1)
            if rows:
                return self._ds.rows.join((), row_stacker(rows[0]))
        raise ShardingError(
            "no feed has a row, so nothing tells what a batch looks like.",
            remedy="check the source, and what make_feed filters out.",
        )

    def next_batch(self, position: bytes) -> Mapping[str, Any]:
        return {"next batch": _loaded(position).step}

    def repeated(self, times: int) -> NoReturn:
        raise ShardingError(
            "epochs needs random access: where an epoch of feeds ends, only its end tells.",
            remedy="let make_feed give all epochs of its part, each with an order of its own:"
            " .shuffle().repeat(n) on the MapDataset that it begins with, or an"
            " InterleaveIterDataset of the epochs' streams with cycle_length=1. Both are written"
            " out under docs/streams.md#several-epochs.",
        )

    def past_end(self, position: bytes) -> bytes:
        return pickle.dumps(_loaded(position).past_end())

    def to_state(self, position: bytes) -> dict[str, Any]:
        return _loaded(position).to_state(self._ds.fingerprint)

    def from_state(self, state: dict[str, Any]) -> bytes:
        ds = self._ds
        return pickle.dumps(FeedsPosition.of_state(state, ds.fingerprint, ds.rows.by_feed))


def feeds_to_save(ds: FeedBatches, layouts: Mapping[int, BatchLayout], host: int) -> list[int]:
    """The feeds that a host writes into a checkpoint: those that it runs and no host before it.

    Example:
        >>> from grain_shard import feeds
        >>> ds = feeds(lambda feed: ..., num_feeds=4).batch(8)
        >>> halves = {host: BatchLayout(divisor=2, shards=(host % 2,)) for host in range(4)}
        >>> [feeds_to_save(ds, halves, host) for host in halves]
        [[0, 1], [2, 3], [], []]

    Args:
        ds: The batches of all feeds.
        layouts: Which rows each host holds.
        host: Which host.
    """
    # Hosts often hold the same shards; of these one is looked at.
    before = {layout.shards: layout for other, layout in layouts.items() if other < host}
    saved_before = {feed for layout in before.values() for feed in ds.rows.feeds_of(layout)}
    return [feed for feed in ds.rows.feeds_of(layouts[host]) if feed not in saved_before]


def fault_rules_of(
    ds: FeedBatches, layouts: Mapping[int, BatchLayout], rules: FaultRules
) -> FaultRules:
    """What becomes of reads that fail, of these feeds on these hosts.

    Args:
        ds: The batches.
        layouts: Which rows each host holds.
        rules: What the user says.

    Raises:
        ShardingError: Records are to be left out, and nobody knows what a record is.
    """
    if not rules.masks:
        return rules
    if not ds.begins_with_records:
        raise ShardingError(
            'on_bad_record="mask" needs feeds that begin with records that can be had by index, and'
            " feed 0 begins with something else.",
            remedy="begin make_feed with a grain.MapDataset, .map what may fail there, and let"
            " .to_iter_dataset() and any .filter follow; or catch the error in the .map that raises"
            " it, and .filter what that returns.",
        )
    of_hosts = [ds.of_host(layout).rows.by_feed for layout in layouts.values()]
    if sum(map(len, of_hosts)) > len(set().union(*of_hosts)):
        return read_by_several(rules)
    return rules


def warn_of_shared_feeds(ds: FeedBatches, layouts: Mapping[int, BatchLayout]) -> None:
    """Warns if this host runs feeds for a part of their rows, which microbatches have made so.

    Args:
        ds: The batches of the feeds that this host runs.
        layouts: Which rows each host holds.
    """
    run, kept = len(ds.rows.by_feed), sum(map(len, ds.rows.by_feed.values()))
    microbatches = next(iter(layouts.values())).microbatches
    if microbatches > 1 and kept < run * ds.rows.per_feed:
        groups = len({of_host.shards for of_host in layouts.values()})
        warnings.warn(
            f"this host runs {run} of {ds.num_feeds} feeds, and keeps {kept} of the"
            f" {run * ds.rows.per_feed} rows that these give to a batch: in each of"
            f" {microbatches} microbatches other feeds have its rows. With a multiple of"
            f" {microbatches * groups} feeds (microbatches times hosts that hold different rows)"
            " each feed runs on one of these hosts.",
            stacklevel=2,
        )


def _loaded(position: bytes) -> FeedsPosition:
    return pickle.loads(position)


def check_feeds(ds: FeedBatches, layouts: Mapping[int, BatchLayout], remainder: Remainder) -> None:
    """Refuses what the hosts of a mesh cannot share among them.

    Args:
        ds: The batches of all feeds.
        layouts: Which rows each host holds.
        remainder: Whether rows of padding may be added to each batch ("pad").

    Raises:
        ShardingError: There are fewer feeds than hosts that hold different rows, a host has no row
            but padding, or the shards do not divide the batch and it must not be padded.
    """
    layout = next(iter(layouts.values()))  # of any host
    groups = len({of_host.shards for of_host in layouts.values()})
    mesh_axes, up = layout.mesh_axes, layout.padded(ds.global_batch_size)
    parts = describe_parts(layout.divisor, layout.microbatches)
    if remainder != "pad" and up != ds.global_batch_size:
        raise ShardingError(
            f"a batch of {ds.global_batch_size} rows does not split into {parts}.",
            mesh_axes=mesh_axes,
            remedy=f'use a batch size of {up}, or remainder="pad".',
        )
    if ds.num_feeds < groups:
        raise ShardingError(
            f"{ds.num_feeds} feeds are too few for {groups} hosts that hold different rows.",
            mesh_axes=mesh_axes,
            remedy="start with as many feeds as the most hosts that the run will ever see; their"
            " number is fixed for the life of a run.",
        )
    for host, of_host in layouts.items():
        if of_host.shards[0] * (up // layout.multiple) >= ds.global_batch_size:
            raise ShardingError(
                f"host {host} would hold nothing but padding: {parts} of a batch of"
                f" {ds.global_batch_size} rows.",
                mesh_axes=mesh_axes,
                remedy=f"use a batch size that is a multiple of {layout.multiple}.",
            )
