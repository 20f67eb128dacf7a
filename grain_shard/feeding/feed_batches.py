"""Feeds: a stream cut into parts, so that its batches do not depend on how many hosts there are.

Which host runs a feed never changes what the feed yields, and each feed has fixed rows of every
batch. So the global batch follows from the pipeline, the number of feeds and the step alone,
although nobody can read a stream by index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grain

from grain_shard.errors import ShardingError, require_int
from grain_shard.feeding.feed_iterator import FeedIterator
from grain_shard.feeding.feed_reader import Entry, FeedReader, naming_feed
from grain_shard.feeding.feed_rows import FeedRows, Padding
from grain_shard.feeding.feed_turns import FeedTurns
from grain_shard.feeding.record_stream import RecordStream, evaluated_in_turn
from grain_shard.feeding.shared_reads import SharedReads
from grain_shard.grain_inside.read_ahead import begins_with_records, replace_read_ahead
from grain_shard.hosts.feed_files import NUM_FEEDS
from grain_shard.reading.faults import FaultRules, Faults, Skipped
from grain_shard.reading.fingerprint import Fingerprint, pipeline_digests
from grain_shard.sharding.layout import BatchLayout

MakeFeed = Callable[[grain.sharding.ShardOptions], grain.IterDataset]


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
            What it yields must depend on these two alone, not on the host that calls it. The
            feeds of a host share what reads ahead for them, whatever `grain.ReadOptions` they
            begin with; with no thread or no buffer in these, nothing is read ahead.
        num_feeds: How many feeds there are, for the life of the run: at least as many as the most
            hosts that it will ever see.

    Returns:
        The feeds, to be batched.

    Raises:
        ShardingError: `num_feeds` is no positive integer, or `make_feed` cannot be called.
    """
    return Feeds(make_feed, num_feeds)


@dataclass(frozen=True)
class Feeds:
    """A stream cut into parts; `feeds` makes it.

    Example:
        >>> import grain
        >>> Feeds(lambda feed: grain.MapDataset.range(9).to_iter_dataset(), num_feeds=4).batch(8)
        FeedBatches(4 feeds, 8 rows)

    Attributes:
        make_feed: Makes the stream of one feed.
        num_feeds: How many there are.
    """

    make_feed: MakeFeed
    num_feeds: int

    def __post_init__(self) -> None:
        require_int("num_feeds", self.num_feeds, 1)
        if not callable(self.make_feed):
            raise ShardingError(
                f"a {type(self.make_feed).__name__} cannot make a feed.",
                remedy="pass a function from grain.sharding.ShardOptions to a grain.IterDataset.",
            )

    def batch(self, global_batch_size: int) -> FeedBatches:
        """Batches that take as many rows from each feed: those of feed 0, of feed 1, and so on.

        Args:
            global_batch_size: Rows of a batch, of all hosts together.

        Raises:
            ShardingError: The feeds do not divide the batch.
        """
        return FeedBatches(self, global_batch_size)


class FeedBatches(grain.IterDataset):
    """Global batches of feeds, to be ended with ``.shard_to(mesh)``.

    A host then runs only the feeds whose rows its devices hold. Iterated by itself, as in a test,
    it runs all of them, one after the other, without padding: a feed that has ended gives no more
    rows, so that batches shrink, down to the one in which the last feed ends.

    No transformation may stand between the two, on one host as on many: put what is to be done to a
    row into `make_feed`.

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
        global_batch_size: Rows of a batch, of all hosts together.
        padding: What becomes of rows that feeds lack; None makes the batch shorter by them.
        layout: Which rows to keep; None for all.
    """

    def __init__(
        self,
        feeds: Feeds,
        global_batch_size: int,
        padding: Padding | None = None,
        layout: BatchLayout | None = None,
    ):
        super().__init__()
        self._feeds = feeds
        self._rows = FeedRows(feeds.num_feeds, global_batch_size, padding, layout)

    @property
    def rows(self) -> FeedRows:
        """Which rows of a batch each feed gives."""
        return self._rows

    def padded(self, padding: Padding) -> FeedBatches:
        """Batches of one size: zeros, and False in the mask, where a feed has no row any more."""
        return FeedBatches(self._feeds, self.global_batch_size, padding, self.rows.layout)

    def of_host(self, layout: BatchLayout) -> FeedBatches:
        """The rows of one host, from the feeds that they belong to and no others.

        Args:
            layout: Which rows the host holds. The padded batch has to be its `multiple`.
        """
        padding = self.rows.padding or Padding(divisor=layout.multiple)
        return FeedBatches(self._feeds, self.global_batch_size, padding, layout)

    @property
    def num_feeds(self) -> int:
        """How many feeds there are."""
        return self._feeds.num_feeds

    @property
    def global_batch_size(self) -> int:
        """Rows of a batch, of all hosts together."""
        return self.rows.global_batch_size

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """What a state must agree with: of the pipeline, what Grain shows of feed 0.

        Not the batch size: each feed goes on at its own next row, however many a batch takes.
        """
        with naming_feed(0, self.num_feeds):
            feed_0 = self._make(0)
        return {
            NUM_FEEDS: self.num_feeds,
            **pipeline_digests(feed_0),
        }

    @property
    def begins_with_records(self) -> bool:
        """Whether feeds begin with random access; feed 0 tells."""
        return begins_with_records(self._make(0))

    def open_feed(
        self, feed: int, entry: Entry, faults: Faults, reads: SharedReads | None = None
    ) -> FeedReader:
        """A reader of one feed.

        Args:
            feed: Which.
            entry: Where it is to start.
            faults: What becomes of records that cannot be had.
            reads: What reads ahead for it; None if nothing is to be read ahead.
        """
        in_turn = functools.partial(evaluated_in_turn, faults=faults)
        skipped = Skipped(faults, feed) if faults.masks else None

        def record_stream(records: grain.MapDataset, is_read_ahead: bool) -> RecordStream:
            elements = in_turn if reads is None or not is_read_ahead else reads.elements
            return RecordStream(records, elements, skipped)

        return FeedReader(lambda: replace_read_ahead(self._make(feed), record_stream), entry)

    def open_turns(
        self, faults: Faults, entries: Mapping[int, Entry], num_threads: int
    ) -> FeedTurns:
        """What takes from feeds, in this process, what they give to each batch.

        Args:
            faults: What becomes of records that cannot be had.
            entries: Of each feed to run, where it is to start.
            num_threads: Threads that run feeds side by side.
        """
        reads = SharedReads(faults)
        return FeedTurns(
            {feed: self.open_feed(feed, entry, faults, reads) for feed, entry in entries.items()},
            reads,
            num_feeds=self.num_feeds,
            rows_per_feed=self.rows.per_feed,
            num_threads=num_threads,
        )

    def iterate(
        self,
        num_threads: int = 1,
        num_workers: int = 0,
        buffer_size: int = 1,
        fault_rules: FaultRules = FaultRules(),  # noqa: B008 (it is frozen)
    ) -> FeedIterator:
        """An iterator over the batches.

        Args:
            num_threads: Threads that run feeds side by side, of each worker if there are some.
            num_workers: Worker processes that run the feeds; 0 for none.
            buffer_size: Batches that these make ahead. Grain lets them make four at least.
            fault_rules: What becomes of reads that fail.
        """
        return FeedIterator(
            self.rows,
            functools.partial(self.open_turns, num_threads=num_threads),
            lambda: self.fingerprint,
            num_workers=num_workers,
            buffer_size=buffer_size,
            fault_rules=fault_rules,
        )

    def __iter__(self) -> FeedIterator:
        return self.iterate()

    def __repr__(self) -> str:
        return f"FeedBatches({self.num_feeds} feeds, {self.global_batch_size} rows)"

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> NoReturn:
        """Refused; Grain calls it to divide a dataset among its workers."""
        raise ShardingError(
            "batches of feeds cannot be divided among worker processes.",
            remedy="pass num_workers to .shard_to: each worker then runs some of the feeds.",
        )

    def _make(self, feed: int) -> grain.IterDataset:
        ds: Any = self._feeds.make_feed(
            grain.sharding.ShardOptions(shard_index=feed, shard_count=self.num_feeds)
        )
        if not isinstance(ds, grain.IterDataset):
            raise ShardingError(
                f"make_feed returned a {type(ds).__name__}.",
                remedy="return a grain.IterDataset: end a grain.MapDataset with"
                " .to_iter_dataset().",
            )
        return ds
