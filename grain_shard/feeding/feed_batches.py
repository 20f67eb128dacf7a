"""Feeds: a stream cut into parts, so that its batches do not depend on how many hosts there are.

Which host runs a feed never changes what the feed yields. So with rows that belong to feeds by
their place in the batch, the global batch follows from the pipeline, the number of feeds and the
step alone, although nobody can read a stream by index.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grain

from grain_shard.errors import ShardingError, StateError, require_int
from grain_shard.feeding.feed_rows import Entry, FeedReader, FeedStacker, is_entry, named
from grain_shard.hosts.state_json import from_json, to_json
from grain_shard.reading.fingerprint import Fingerprint, check_fingerprint, pipeline_digests
from grain_shard.trees import Batch

_UNCHANGED = "  remedy: pass what get_state() gave, unchanged."
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
            What it yields must depend on these two alone, not on the host that calls it.
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

    def __post_init__(self):
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
    it runs all of them, one after the other. A batch is shorter by the rows that feeds lack which
    have ended, and the last one is that in which the last feed ends.

    A transformation that follows makes an ordinary stream of it, of which every host runs all
    feeds: put what is to be done to a row into `make_feed`.

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
    """

    def __init__(self, feeds: Feeds, global_batch_size: int):
        super().__init__()
        require_int("global_batch_size", global_batch_size, 1)
        self._feeds, self._global_batch_size = feeds, global_batch_size
        if global_batch_size % feeds.num_feeds:
            down = global_batch_size // feeds.num_feeds * feeds.num_feeds
            sizes = " or ".join(str(n) for n in (down, down + feeds.num_feeds) if n)
            raise ShardingError(
                f"a batch of {global_batch_size} rows does not split into {feeds.num_feeds} feeds"
                " of as many rows each.",
                remedy=f"use a batch size of {sizes}, or a number of feeds that divides it.",
            )

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
        """What a state must agree with: of the pipeline, what Grain shows of feed 0."""
        with named(0, self.num_feeds):
            feed_0 = self._make(0)
        return {
            "num_feeds": self.num_feeds,
            "global_batch_size": self._global_batch_size,
            **pipeline_digests(feed_0),
        }

    def readers(self, entries: Mapping[int, Entry]) -> dict[int, FeedReader]:
        """Readers of some feeds, each from where it stands."""
        return {
            feed: FeedReader(functools.partial(self._make, feed), entry)
            for feed, entry in entries.items()
        }

    def to_state(self, step: int, entries: Mapping[int, Entry]) -> dict[str, Any]:
        """The state of some feeds as plain JSON.

        Args:
            step: How many batches they have given.
            entries: Where they stand then.
        """
        of_feeds = {str(feed): to_json(entry) for feed, entry in entries.items()}
        return {"step": step, **self.fingerprint, "feeds": of_feeds}

    def from_state(self, state: Mapping[str, Any], feeds: Iterable[int]) -> dict[int, Entry]:
        """Where these feeds stood when a state was saved; it may hold others, too.

        Raises:
            StateError: The state was saved by other feeds, or lacks one of these.
        """
        check_fingerprint(state, self.fingerprint, kind="feeds", keys=("step", "feeds"))
        if type(state["step"]) is not int or state["step"] < 0:
            raise StateError(f"the state stands at batch {state['step']!r}.\n{_UNCHANGED}")
        if not isinstance(state["feeds"], Mapping):
            raise StateError(f"the state's feeds are {state['feeds']!r}.\n{_UNCHANGED}")
        missing = [feed for feed in feeds if str(feed) not in state["feeds"]]
        if missing:
            raise StateError(
                f"the state has no entry for feeds {', '.join(map(str, missing))}, which this host"
                " runs.\n  remedy: each host's get_state() has the feeds that it runs; join the"
                ' "feeds" of all, as CheckpointRestore does.'
            )
        entries = {feed: from_json(state["feeds"][str(feed)]) for feed in feeds}
        for feed, entry in entries.items():
            if not is_entry(entry):
                raise StateError(f"the state has {entry!r} for feed {feed}.\n{_UNCHANGED}")
        return entries

    def __iter__(self) -> grain.DatasetIterator:
        return _WholeBatches(self)

    def __repr__(self) -> str:
        return f"FeedBatches({self.num_feeds} feeds, {self._global_batch_size} rows)"

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> NoReturn:
        """Refused; Grain calls it to divide a dataset among its workers."""
        raise ShardingError(
            "feeds cannot be divided among worker processes.",
            remedy="call .mp_prefetch in make_feed, on the stream of one feed.",
        )

    def _make(self, feed: int) -> grain.IterDataset:
        ds: Any = self._feeds.make_feed(
            grain.sharding.ShardOptions(shard_index=feed, shard_count=self.num_feeds)
        )
        if not isinstance(ds, grain.IterDataset):
            raise ShardingError(
                f"make_feed returned a {type(ds).__name__}.",
                remedy="return a grain.IterDataset: end a grain.MapDataset with"
                " .to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)).",
            )
        return ds


class _WholeBatches(grain.DatasetIterator):
    """Batches of all feeds, made one after the other."""

    def __init__(self, ds: FeedBatches):
        super().__init__()
        self._ds, self._stacker, self._step = ds, FeedStacker(), 0
        self._readers = ds.readers({feed: {} for feed in range(ds.num_feeds)})

    def __next__(self) -> Batch:
        self._assert_not_closed()
        rows, feeds = [], []
        for feed, reader in self._readers.items():
            with named(feed, self._ds.num_feeds):
                rows += reader.take(self._ds.feed_batch_size)
            feeds += [feed] * (len(rows) - len(feeds))
        if not rows:
            raise StopIteration
        self._stacker.learn(rows[0])
        self._step += 1
        return self._stacker.stack(rows, feeds)

    def get_state(self) -> dict[str, Any]:
        entries = {feed: reader.entry() for feed, reader in self._readers.items()}
        return self._ds.to_state(self._step, entries)

    def set_state(self, state: dict[str, Any]) -> None:
        self._assert_not_closed()
        entries = self._ds.from_state(state, range(self._ds.num_feeds))
        self._close_readers()
        self._readers, self._step = self._ds.readers(entries), state["step"]

    def close(self) -> None:
        self._closed = True
        self._close_readers()

    def _close_readers(self) -> None:
        for reader in self._readers.values():
            reader.close()
