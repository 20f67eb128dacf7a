"""The streams of a run's feeds, made by the user's function, and the rows of each, in order."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import grain

from grain_shard.errors import ShardingError, require_int
from grain_shard.feeding.record_stream import RecordStream, evaluated_in_turn
from grain_shard.feeding.shared_reads import SharedReads
from grain_shard.grain_inside.read_ahead import begins_with_records, replace_read_ahead
from grain_shard.hosts.feed_files import NUM_FEEDS
from grain_shard.reading.faults import Faults, Skipped
from grain_shard.reading.fingerprint import Fingerprint, pipeline_digests
from grain_shard.reading.lost_epochs import refuse_lost_epochs
from grain_shard.reading.state_json import restore
from grain_shard.tasks import Raised

MakeFeed = Callable[[grain.sharding.ShardOptions], grain.IterDataset]

# The state of one feed, as plain JSON: {} at its beginning, {"state": the state of Grain's
# iterator} later, and `ENDED` once it has no row left.
FeedState = Mapping[str, Any]
ENDED: FeedState = {"ended": True}


def is_feed_state(state: Any) -> bool:
    """Returns whether a value is the state of a feed: a mistyped one must not start it anew."""
    return state in ({}, ENDED) or (isinstance(state, Mapping) and set(state) == {"state"})


class FeedTurn(NamedTuple):
    """The part of one feed in one batch: its rows, and its state after them, pickled."""

    feed: int
    rows: list[Any]
    feed_state: bytes


class FeedReader:
    """Takes rows of one feed. Opened by the first row that is taken, in the thread that takes it.

    Args:
        make: Makes the feed's dataset.
        feed_state: The state from which it starts.
    """

    def __init__(self, make: Callable[[], grain.IterDataset], feed_state: FeedState):
        self._make, self._feed_state = make, feed_state
        self._iterator: grain.DatasetIterator | None = None
        self._ended = feed_state == ENDED
        self._begun = bool(feed_state)  # whether it has given a row

    def take(self, num_rows: int) -> list[Any]:
        """Returns the next rows; fewer, or none, once the feed has ended.

        Raises:
            StateError: The feed cannot start from its state.
            IndexError: There are fewer files than feeds, most likely.
        """
        rows: list[Any] = []
        if self._ended or not num_rows:
            return rows
        try:
            if self._iterator is None:
                self._iterator = self._open()
            while len(rows) < num_rows:
                rows.append(next(self._iterator))
        except StopIteration:
            self._ended = True
            self.close()
        except IndexError as error:
            if self._begun or rows:
                raise
            raise IndexError(  # and no note: Grain's own would hide it
                f"the feed failed before its first row ({error}): are there fewer files than"
                " feeds?\n  remedy: make num_feeds no larger than the number of files, or divide"
                " the rows of the files among the feeds."
            ) from error
        self._begun = True
        return rows

    def feed_state(self) -> FeedState:
        """Returns the state of the feed now."""
        if self._ended:
            return ENDED
        return self._feed_state if self._iterator is None else {"state": self._iterator.get_state()}

    def close(self) -> None:
        """Ends the threads and processes of the feed's own pipeline."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            iterator.close()

    def _open(self) -> grain.DatasetIterator:
        try:
            iterator = iter(self._make())
            if "state" in self._feed_state:
                restore(iterator, self._feed_state["state"], "the feed")
        except StopIteration as error:  # which would pass for the end
            Raised.of(error).throw()
        return iterator


@dataclass(frozen=True)
class FeedStreams:
    """A stream cut into feeds.

    Attributes:
        make_feed: Makes the stream of one feed.
        num_feeds: The number of feeds, on all hosts together.

    Raises:
        ShardingError: `num_feeds` is no positive integer, or `make_feed` cannot be called.
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

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The fields that a state must agree with; feed 0 stands for the pipeline.

        The batch size is not among them: each feed goes on at its own next row, however many rows
        a batch takes.
        """
        with naming_feed(0, self.num_feeds):
            feed_0 = self.make(0)
        return {NUM_FEEDS: self.num_feeds, **pipeline_digests(feed_0)}

    @property
    def begin_with_records(self) -> bool:
        """True if feed 0, which stands for all, begins with random access."""
        return begins_with_records(self.make(0))

    def make(self, feed: int) -> grain.IterDataset:
        """Makes the stream of one feed.

        Raises:
            ShardingError: The user's function returned something else, or a stream that loses
                epochs.
        """
        part = grain.sharding.ShardOptions(shard_index=feed, shard_count=self.num_feeds)
        try:
            ds: Any = self.make_feed(part)
        except StopIteration as error:  # which would pass for the end of the caller's iterator
            Raised.of(error).throw()
        if not isinstance(ds, grain.IterDataset):
            raise ShardingError(
                f"make_feed returned a {type(ds).__name__}.",
                remedy="return a grain.IterDataset: end a grain.MapDataset with"
                " .to_iter_dataset().",
            )
        refuse_lost_epochs(ds)
        return ds

    def reader(
        self, feed: int, state: FeedState, faults: Faults, reads: SharedReads | None = None
    ) -> FeedReader:
        """Returns a reader of one feed.

        Args:
            feed: The feed's number.
            state: The state from which the feed starts.
            faults: Decides on records that cannot be read.
            reads: Reads ahead for the feed; None to read nothing ahead.
        """
        in_turn = functools.partial(evaluated_in_turn, faults=faults)
        skipped = Skipped(faults, feed) if faults.masks else None

        def record_stream(
            records: grain.MapDataset, options: grain.ReadOptions
        ) -> grain.IterDataset:
            elements = in_turn
            if reads is not None and wants_read_ahead(options):
                elements = reads.elements
            return RecordStream(records, elements, skipped)

        return FeedReader(lambda: replace_read_ahead(self.make(feed), record_stream), state)


def wants_read_ahead(options: Any) -> bool:
    """Returns whether `grain.ReadOptions` want records read ahead, with threads and a buffer."""
    return min(options.num_threads, options.prefetch_buffer_size) > 0


@contextlib.contextmanager
def naming_feed(feed: int, num_feeds: int) -> Iterator[None]:
    """Adds the number of a feed to its errors, which other hosts show, too."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"grain_shard: in feed {feed} of {num_feeds}")
        raise
