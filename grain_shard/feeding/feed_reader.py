"""`FeedStreams`, which makes the stream of each feed, and `FeedReader`, which reads its rows."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import grain

from grain_shard.errors import ShardingError, noting, require_int
from grain_shard.grain_inside.read_ahead import replace_read_ahead
from grain_shard.hosts.feed_files import NUM_FEEDS
from grain_shard.reading.fingerprint import Fingerprint, pipeline_digests
from grain_shard.reading.record_stream import RecordStream
from grain_shard.reading.shared_reads import SharedReads
from grain_shard.reading.stream_dataset import refuse_lost_epochs
from grain_shard.spans import READ, span
from grain_shard.state_json import restore
from grain_shard.threads.tasks import Raised

MakeFeed = Callable[[grain.sharding.ShardOptions], grain.IterDataset]

# The state of one feed, as plain JSON: {} before its first row, then {"state": the state of Grain's
# iterator}, and `ENDED` after its last row.
FeedState = Mapping[str, Any]
ENDED: FeedState = {"ended": True}


class FeedTurn(NamedTuple):
    """The rows that one feed gives to one batch.

    Attributes:
        feed: Number of the feed.
        rows: The rows, before stacking. Once the feed has ended, the list is shorter or empty.
        feed_state: The pickled state of the feed after these rows.
    """

    feed: int
    rows: list[Any]
    feed_state: bytes


@dataclass(frozen=True)
class FeedStreams:
    """A stream cut into feeds.

    Attributes:
        make_feed: Returns the stream of one feed.
        num_feeds: Number of feeds, on all hosts together.

    Raises:
        ShardingError: `num_feeds` is not a positive integer, or `make_feed` cannot be called.
    """

    make_feed: MakeFeed
    num_feeds: int

    def __post_init__(self) -> None:
        require_int("num_feeds", self.num_feeds, 1)
        if not callable(self.make_feed):
            raise ShardingError(
                f"make_feed is a {type(self.make_feed).__name__}, not a function.",
                remedy="pass a function that takes grain.sharding.ShardOptions and returns a"
                " grain.IterDataset.",
            )

    @functools.cached_property
    def fingerprint(self) -> Fingerprint:
        """The fields that must be the same when a state is saved and when it is restored.

        They are the number of feeds and digests of the pipeline of feed 0. The batch size is not a
        field: it may change, because each feed goes on at its own next row.
        """
        with noting(f"in feed 0 of {self.num_feeds}"):
            return {NUM_FEEDS: self.num_feeds, **pipeline_digests(self.make(0))}

    def make(self, feed: int) -> grain.IterDataset:
        """Returns the stream of one feed, which the user's function makes.

        Args:
            feed: Number of the feed.

        Raises:
            ShardingError: The function did not return a `grain.IterDataset`, or it returned a
                repeated interleave, of which Grain would lose epochs after a restore.
        """
        part = grain.sharding.ShardOptions(shard_index=feed, shard_count=self.num_feeds)
        try:
            ds: Any = self.make_feed(part)
        except StopIteration as error:  # which would end the caller's iterator without an error
            Raised.of(error).throw()
        if not isinstance(ds, grain.IterDataset):
            raise ShardingError(
                f"make_feed returned a {type(ds).__name__}, not a grain.IterDataset.",
                remedy="return a grain.IterDataset from make_feed: end a grain.MapDataset with"
                " .to_iter_dataset().",
            )
        refuse_lost_epochs(ds)
        return ds


class FeedReader:
    """Reads the rows of one feed, batch by batch. The first read opens the feed's stream.

    Args:
        feeds: The feeds of all hosts.
        feed: Number of the feed.
        feed_state: The state from which the feed starts.
        reads: The threads that read ahead for all feeds of the host.
    """

    def __init__(self, feeds: FeedStreams, feed: int, feed_state: FeedState, reads: SharedReads):
        self._feeds, self._feed, self._feed_state, self._reads = feeds, feed, feed_state, reads
        self._iterator: grain.DatasetIterator | None = None

    def turn(self, num_rows: int) -> FeedTurn:
        """Returns the rows of the feed for the next batch.

        Args:
            num_rows: Number of rows to return. Once the feed has ended, fewer rows or none come.

        Raises:
            StateError: The feed cannot start from its state.
            IndexError: The feed raised an IndexError before its first row. The usual cause is that
                there are fewer files than feeds.
        """
        rows: list[Any] = []
        with span(READ), noting(f"in feed {self._feed} of {self._feeds.num_feeds}"):
            if self._feed_state != ENDED:
                self._take(rows, num_rows)
            # Pickled, because Grain may change the state that its iterator returned.
            return FeedTurn(self._feed, rows, pickle.dumps(self._feed_state))

    def _take(self, rows: list[Any], num_rows: int) -> None:
        try:
            if self._iterator is None:
                self._iterator = self._open()
            while len(rows) < num_rows:
                rows.append(next(self._iterator))
            self._feed_state = {"state": self._iterator.get_state()}
        except StopIteration:
            self._feed_state = ENDED
            self.close()
        except IndexError as error:
            if self._feed_state or rows:
                raise
            raise IndexError(  # a new error: a note would be hard to see among Grain's own notes
                f"the feed failed before its first row ({error}). There may be fewer files than"
                " feeds.\n  remedy: pass a num_feeds that is at most the number of files, or divide"
                " the rows, instead of the files, among the feeds."
            ) from error

    def close(self) -> None:
        """Ends the threads and processes of this feed's stream."""
        iterator, self._iterator = self._iterator, None
        if iterator is not None:
            try:  # no `noting`, because the names of this module may be gone at the program's exit
                iterator.close()
            except BaseException as error:
                error.add_note(f"grain_shard: while closing feed {self._feed}")
                raise

    def _open(self) -> grain.DatasetIterator:
        read = functools.partial(RecordStream, self._reads, self._feed)
        try:
            iterator = iter(replace_read_ahead(self._feeds.make(self._feed), read))
            if self._feed_state:
                restore(iterator, self._feed_state["state"], "the feed")
        except StopIteration as error:  # which would look like the end of the feed
            Raised.of(error).throw()
        return iterator
