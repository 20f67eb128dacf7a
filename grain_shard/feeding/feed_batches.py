"""Feeds: a stream cut into parts, so that its batches do not depend on how many hosts there are.

Which host runs a feed never changes what the feed yields, and each feed has fixed rows of every
batch. So the global batch follows from the pipeline, the number of feeds and the step alone,
although nobody can read a stream by index.
"""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grain
import numpy as np

from grain_shard.errors import ShardingError, require_int
from grain_shard.feeding.feed_position import FeedsPosition
from grain_shard.feeding.feed_reader import Entry, FeedReader, naming_feed
from grain_shard.feeding.feed_turns import FeedTurns, Piece, row_stacker
from grain_shard.feeding.feed_workers import FeedWorkers
from grain_shard.feeding.record_stream import RecordStream, evaluated_in_turn
from grain_shard.feeding.shared_reads import SharedReads
from grain_shard.grain_inside.read_ahead import begins_with_records, replace_read_ahead
from grain_shard.hosts.feed_files import NUM_FEEDS
from grain_shard.reading.faults import FaultCounts, FaultRules, Faults, Skipped
from grain_shard.reading.fingerprint import Fingerprint, pipeline_digests
from grain_shard.reading.pad_batch import Remainder, pad_batch
from grain_shard.reading.pad_rows import PadRows
from grain_shard.reading.stack import RowStacker, Stack
from grain_shard.reading.stream_dataset import BatchIterator
from grain_shard.sharding.layout import BatchLayout, round_up
from grain_shard.spans import BATCH, span
from grain_shard.trees import Batch

_MISSING = object()  # instead of a row that a feed no longer has
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


@dataclass(frozen=True)
class Padding:
    """What becomes of the rows that feeds lack which have ended.

    Attributes:
        divisor: What the number of rows of a batch must be a multiple of.
        remainder: What becomes of a batch for which a feed has not rows enough: "pad" it, until
            the last feed has ended; "drop" it, and end; or "error".
        rows: What these rows hold, and where the mask is.
    """

    divisor: int
    remainder: Remainder = "pad"
    rows: PadRows = PadRows()  # noqa: RUF009 (it is frozen)


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
        require_int("global_batch_size", global_batch_size, 1)
        self._feeds, self._global_batch_size = feeds, global_batch_size
        self.padding: Padding | None = padding
        self.layout: BatchLayout | None = layout
        if global_batch_size % feeds.num_feeds:
            down = global_batch_size // feeds.num_feeds * feeds.num_feeds
            sizes = " or ".join(str(n) for n in (down, down + feeds.num_feeds) if n)
            raise ShardingError(
                f"a batch of {global_batch_size} rows does not split into {feeds.num_feeds} feeds"
                " of as many rows each.",
                remedy=f"use a batch size of {sizes}, or a number of feeds that divides it.",
            )

    def padded(self, padding: Padding) -> FeedBatches:
        """Batches of one size: zeros, and False in the mask, where a feed has no row any more."""
        return FeedBatches(self._feeds, self._global_batch_size, padding, self.layout)

    def of_host(self, layout: BatchLayout) -> FeedBatches:
        """The rows of one host, from the feeds that they belong to and no others.

        Args:
            layout: Which rows the host holds. The padded batch has to be its `multiple`.
        """
        padding = self.padding or Padding(divisor=layout.multiple)
        return FeedBatches(self._feeds, self._global_batch_size, padding, layout)

    @property
    def num_feeds(self) -> int:
        """How many feeds there are."""
        return self._feeds.num_feeds

    @property
    def global_batch_size(self) -> int:
        """Rows of a batch, of all hosts together."""
        return self._global_batch_size

    @property
    def feed_batch_size(self) -> int:
        """Rows of a batch that come from one feed."""
        return self._global_batch_size // self.num_feeds

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

    @functools.cached_property
    def rows_by_feed(self) -> dict[int, list[int]]:
        """The feeds to run, and which of each feed's rows of a batch are wanted of it.

        Example:
            >>> ds = feeds(lambda feed: ..., num_feeds=4).batch(8)
            >>> ds.of_host(BatchLayout(divisor=8, shards=(2, 3, 4))).rows_by_feed
            {1: [0, 1], 2: [0]}
        """
        rows = np.arange(self._global_batch_size)
        if self.layout is not None:
            rows = self.layout.rows(self._padded_size)
        feeds, rows_of_feed = np.divmod(rows[rows < self._global_batch_size], self.feed_batch_size)
        return {int(feed): rows_of_feed[feeds == feed].tolist() for feed in np.unique(feeds)}

    def feeds_of(self, layout: BatchLayout) -> list[int]:
        """The feeds that a host runs, ascending; quickly, since there may be many hosts.

        Example:
            >>> ds = feeds(lambda feed: ..., num_feeds=4).batch(8)
            >>> ds.feeds_of(BatchLayout(divisor=8, shards=(2, 3, 4)))
            [1, 2]
        """
        size, found = self.feed_batch_size, set[int]()
        for start, stop in layout.ranges(self._padded_size):
            found.update(range(start // size, min(-(-stop // size), self.num_feeds)))
        return sorted(found)

    @property
    def _padded_size(self) -> int:
        divisor = 1 if self.padding is None else self.padding.divisor
        return round_up(self._global_batch_size, divisor)

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
        skipped = Skipped(faults, feed) if faults.leaves_out else None

        def record_stream(records: grain.MapDataset, is_read_ahead: bool) -> RecordStream:
            elements = in_turn if reads is None or not is_read_ahead else reads.elements
            return RecordStream(records, elements, skipped)

        return FeedReader(lambda: replace_read_ahead(self._make(feed), record_stream), entry)

    def open_turns(
        self, entries: Mapping[int, Entry], num_threads: int, faults: Faults
    ) -> FeedTurns:
        """What takes from feeds, in this process, what they give to each batch.

        Args:
            entries: Of each feed to run, where it is to start.
            num_threads: Threads that run feeds side by side.
            faults: What becomes of records that cannot be had.
        """
        reads = SharedReads(faults)
        return FeedTurns(
            {feed: self.open_feed(feed, entry, faults, reads) for feed, entry in entries.items()},
            reads,
            num_feeds=self.num_feeds,
            rows_per_feed=self.feed_batch_size,
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
        return FeedIterator(self, num_threads, num_workers, buffer_size, fault_rules)

    def __iter__(self) -> FeedIterator:
        return self.iterate()

    def join(self, pieces: Sequence[Piece], stacker: RowStacker) -> Batch:
        """The batch of what the feeds gave.

        If it is to be padded, there is padding where feeds lack some rows, and the mask.

        Args:
            pieces: What they gave; a feed that is missing gave nothing.
            stacker: What a row looks like.

        Raises:
            ShardingError: A row has another tree, shape or dtype.
        """
        given = {piece.feed: piece.rows for piece in pieces}
        found = [
            (feed, given[feed][i] if i < len(given.get(feed, ())) else _MISSING)
            for feed, rows in self.rows_by_feed.items()
            for i in rows
        ]
        if self.padding is None:
            found = [(feed, row) for feed, row in found if row is not _MISSING]
        padding = PadRows() if self.padding is None else self.padding.rows
        pad_row, stack = padding.row_like(stacker.like), Stack(stacker, len(found))
        rows = [pad_row if row is _MISSING else row for _, row in found]
        stack.write(rows, 0, [feed for feed, _ in found])
        if self.padding is None:
            return stack.batch()
        size, mask_key = self._padded_size, padding.mask_key
        if self.layout is not None:
            size = len(self.layout.rows(size))
        padded = pad_batch(stack.batch(), size, padding)  # if the shards do not divide the batch
        if mask_key is not None:
            padded[mask_key][: len(found)] = [row is not _MISSING for _, row in found]
        return padded

    def __repr__(self) -> str:
        return f"FeedBatches({self.num_feeds} feeds, {self._global_batch_size} rows)"

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


class FeedIterator(BatchIterator):
    """The batches of the feeds of a dataset.

    Args:
        ds: The dataset.
        num_threads: As for `FeedBatches.iterate`.
        num_workers: As for `FeedBatches.iterate`.
        buffer_size: As for `FeedBatches.iterate`.
        fault_rules: As for `FeedBatches.iterate`.
    """

    def __init__(
        self,
        ds: FeedBatches,
        num_threads: int,
        num_workers: int,
        buffer_size: int,
        fault_rules: FaultRules,
    ):
        super().__init__()
        self._fault_rules = fault_rules
        self._ds, self._num_threads = ds, num_threads
        self._num_workers, self._buffer_size = num_workers, buffer_size
        self._stacker: RowStacker | None = None
        self._is_closed = self._ended = False
        self._failure: BaseException | None = None
        self._position = FeedsPosition.at_start(ds.rows_by_feed)
        self._turns = self._turns_from(self._position)

    def _turns_from(self, position: FeedsPosition) -> FeedTurns | FeedWorkers:
        entries = position.opened()
        self._faults = Faults(self._fault_rules)
        open_turns = functools.partial(
            self._ds.open_turns, num_threads=self._num_threads, faults=self._faults
        )
        if self._num_workers:
            workers, buffer_size = self._num_workers, self._buffer_size
            return FeedWorkers(open_turns, entries, workers, buffer_size, self._faults)
        return open_turns(entries)

    def _move(self, position: FeedsPosition) -> None:
        # Moved also if closing what was open fails: a closed feed would begin anew.
        before, self._turns = self._turns, self._turns_from(position)
        self._position, self._ended, self._failure = position, False, None
        before.close()

    def __next__(self) -> Batch:
        self._require_open()
        if self._ended:
            raise StopIteration
        if self._failure is not None:
            raise self._failure
        try:
            pieces = self._turns.of_one_batch()
            self._ended = self._ends_with(pieces)
            batch = None if self._ended else self._joined(pieces)
        except Exception as error:
            # The feeds have given their rows already: a next batch would lack them.
            self._failure = error
            raise
        if self._ended:
            raise StopIteration
        entries = {piece.feed: piece.entry for piece in pieces}
        self._position = FeedsPosition(self._position.step + 1, entries)
        return batch

    def _joined(self, pieces: Sequence[Piece]) -> Batch:
        with span(BATCH):
            rows = (row for piece in pieces for row in piece.rows)
            self._stacker = self._stacker or row_stacker(next(rows))
            return self._ds.join(pieces, self._stacker)

    def _ends_with(self, pieces: Sequence[Piece]) -> bool:
        """Whether there is no batch to make of what the feeds gave.

        Raises:
            ShardingError: A feed gave fewer rows than it should, which is to be an error.
        """
        if not any(piece.rows for piece in pieces):
            return True
        full, padding = self._ds.feed_batch_size, self._ds.padding
        short = [piece for piece in pieces if len(piece.rows) < full]
        if short and padding is not None and padding.remainder == "error":
            raise ShardingError(
                f"feed {short[0].feed} has {len(short[0].rows)} rows left, of the {full} that each"
                " feed gives to a batch.",
                remedy='pass remainder="pad" (zeros and a mask) or remainder="drop".',
            )
        return bool(short) and padding is not None and padding.remainder == "drop"

    def faults(self) -> FaultCounts:
        """What was counted of reads that failed."""
        return self._faults.counts()

    def position(self) -> bytes:
        return pickle.dumps(self._position)

    def go_to(self, position: bytes) -> None:
        self._move(pickle.loads(position))

    def get_state(self) -> dict[str, Any]:
        return self._position.to_state(self._ds.fingerprint)

    def set_state(self, state: dict[str, Any]) -> None:
        self._require_open()
        self._move(FeedsPosition.of_state(state, self._ds.fingerprint, self._ds.rows_by_feed))

    def stop(self) -> None:
        self._turns.stop()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._turns.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("this is a closed iterator; make another by iter(ds).")
