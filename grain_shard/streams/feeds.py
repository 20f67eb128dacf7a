"""Feeds: a stream cut into parts, so that its batches do not depend on the number of hosts.

A stream cannot be read by index. But a feed yields the same rows on every host, and each feed fills
fixed rows of every batch. So the global batch depends only on the pipeline, the number of feeds and
the step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import grain
import numpy as np
from absl import logging

from grain_shard.digest import element_digest
from grain_shard.errors import Raised, ShardingError, noting, require_int, text_of
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.read_ahead import replace_read_ahead
from grain_shard.hosts.compare import OF_FEEDS
from grain_shard.hosts.feed_files import FEED_ENTRIES, NUM_FEEDS
from grain_shard.hosts.state_files import FEEDS
from grain_shard.iteration.settings import Settings
from grain_shard.reading.fingerprint import Fingerprint, pipeline_digests
from grain_shard.reading.record_reads import record_stream
from grain_shard.sources.split import warn_of_reshuffled_slice
from grain_shard.state_json import warn_unsaved
from grain_shard.streams.feed_arrays import FeedIterator
from grain_shard.streams.feed_rows import FeedRows
from grain_shard.streams.stream_dataset import StreamDataset
from grain_shard.streams.streams import (
    READ_AHEAD_THREADS,
    StreamReads,
    Streams,
    Turn,
    refuse_lost_epochs,
)
from grain_shard.trees import flatten

MakeFeed = Callable[[grain.sharding.ShardOptions], grain.IterDataset]


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
            not on the host. Each feed reads ahead as many records as it gives rows to a batch, and
            the feeds of a host share 16 threads for that. Smaller numbers in `grain.ReadOptions`
            are kept.
        num_feeds: Number of feeds. It cannot change during a run, so it must be at least the
            largest number of hosts that the run will ever have.

    Returns:
        The feeds. Their method ``batch`` makes batches of them.

    Raises:
        ShardingError: `num_feeds` is not a positive integer, or `make_feed` cannot be called.
    """
    return Feeds(make_feed, num_feeds)


@dataclass(eq=False)
class Feeds(Streams):
    """A stream cut into parts, called feeds. The function `feeds` makes it.

    Example:
        >>> import grain
        >>> Feeds(lambda feed: grain.MapDataset.range(9).to_iter_dataset(), num_feeds=4).batch(8)
        <batches of 8 rows, of 4 feeds>

    Attributes:
        make_feed: Returns the stream of one feed.
        num_feeds: Number of feeds, on all hosts together.

    Raises:
        ShardingError: `num_feeds` is not a positive integer, or `make_feed` cannot be called.
    """

    kind, name_of_kind, one = FEEDS, "feeds", "feed"
    stays_open, learned = False, ()

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

    def batch(self, global_batch_size: int, **options: Any) -> StreamDataset:
        """Returns global batches with the same number of rows of each feed.

        The rows of feed 0 come first, then the rows of feed 1, and so on. ``.shard_to(mesh)`` puts
        the batches on the devices of a mesh, and each host then runs only the feeds whose rows its
        devices hold. No transformation may stand between ``.batch`` and ``.shard_to``, not even on
        a single host: put transformations of rows into `make_feed`.

        Without ``.shard_to``, as in a test, one process runs all feeds, and nothing is padded. A
        feed that has ended then gives no more rows, so the last batches are smaller.

        Example:
            >>> import grain, jax
            >>> import grain_shard
            >>> def make_feed(feed):
            ...     first = 10 * feed.shard_index
            ...     ids = grain.MapDataset.range(first, first + 3)
            ...     return ids.map(lambda i: {"id": i}).to_iter_dataset()
            >>> mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
            >>> for batch in grain_shard.feeds(make_feed, num_feeds=2).batch(4).shard_to(mesh):
            ...     print(batch["id"], batch["valid_mask"])
            [ 0  1 10 11] [ True  True  True  True]
            [ 2  0 12  0] [ True False  True False]

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
        rows = FeedRows(streams=self, num_feeds=self.num_feeds, global_batch_size=global_batch_size)
        name = f"batches of {global_batch_size} rows, of {self.num_feeds} feeds"
        return StreamDataset(rows, made_by=name)

    @property
    def fingerprint(self) -> Fingerprint:
        """The number of feeds, and digests of the pipeline of feed 0.

        The batch size is not a field. It may change, because each feed continues with its next row.
        """
        return {NUM_FEEDS: self.num_feeds, **self._digests}

    @functools.cached_property
    def _digests(self) -> Fingerprint:
        with noting(self.where(0)):
            ds = self.make(0)
            warn_of_reshuffled_slice(ds, num_slices=self.num_feeds)
            return pipeline_digests(ds)

    def make(self, number: int) -> grain.IterDataset:
        """Returns the stream of one feed, which the user's function makes.

        Raises:
            ShardingError: The function did not return a `grain.IterDataset`, or it returned a
                repeated interleave; see `refuse_lost_epochs`.
        """
        part = grain.sharding.ShardOptions(shard_index=number, shard_count=self.num_feeds)
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

    def open(self, number: int, reads: StreamReads) -> grain.DatasetIterator:
        threads = (reads.num_threads or READ_AHEAD_THREADS) // reads.num_streams
        made: list[grain.IterDataset] = []

        def read(records: grain.MapDataset, options: grain.ReadOptions) -> grain.IterDataset:
            stream = record_stream(
                records, options, reads.faults, threads=threads, ahead=reads.rows, feed=number
            )
            made.append(stream)
            return stream

        return FeedIterator(replace_read_ahead(self.make(number), read), made, reads.faults)

    def lacks(self, numbers: Sequence[int]) -> str:
        return (
            f"the state has no entry for feeds {', '.join(map(str, numbers))}, which this host"
            " runs.\n  remedy: restore with grain_shard.checkpoint.CheckpointRestore. Or join the"
            f' "{FEED_ENTRIES}" dicts of the states of all hosts, because get_state() returns only'
            " the feeds of the host on which it is called."
        )

    def name(self, number: int) -> str:
        return f"{self.one} {number}"

    def where(self, number: int) -> str:
        return f"in feed {number} of {self.num_feeds}"

    def failed_at_start(self, error: IndexError) -> str:
        return (
            f"the feed failed before its first row ({text_of(error)}). There may be fewer files"
            " than feeds. Or the process has reached its limit of open files: glob then finds no"
            " file, and raises no error.\n  remedy: pass a num_feeds that is at most the number of"
            " files, or divide the rows, instead of the files, among the feeds. If there are enough"
            " files, raise the limit of open files (ulimit -n)."
        )

    def warn_of(self, turns: Sequence[Turn], batch_size: int) -> None:
        first = next(turn for turn in turns if turn.rows)
        _warn_of_same_rows(turns)
        _warn_of_batches(self, first.rows[0], batch_size)
        self.look_at(first.state)
        if self.why_unsaved:
            warn_unsaved(self.why_unsaved)

    def check_options(self, settings: Settings) -> None:
        if settings.rows is not None:
            raise ShardingError(
                f"rows={settings.rows!r} is given, but feeds take no rows=.",
                remedy="leave rows out: each host runs the feeds whose rows it holds.",
            )

    def yields(self, settings: Settings) -> str:
        return OF_FEEDS

    def no_epochs(self) -> ShardingError:
        return ShardingError(
            "ds.epochs(n) needs random access: the length of an epoch of feeds is not known.",
            remedy="let make_feed return all epochs of a feed, each in an order of its own. If"
            " make_feed begins with a MapDataset, call .seed(s).shuffle().repeat(n) on it. Or"
            " put the streams of the epochs into an InterleaveIterDataset with cycle_length=1."
            " docs/streams.md#several-epochs shows both.",
        )

    def shard_to(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raises a `ShardingError`: ``.batch`` must come before ``.shard_to``."""
        raise ShardingError(
            "the feeds have no .batch, and .shard_to(mesh) places batches.",
            remedy="call .batch(global_batch_size) on the feeds before .shard_to:"
            " feeds(...).batch(B).shard_to(mesh).",
        )

    if not TYPE_CHECKING:  # so that type checkers refuse a missing attribute, too

        def __getattr__(self, name: str) -> NoReturn:
            raise AttributeError(
                f"feeds have no .{name}.\n"
                "  remedy: transform rows in make_feed. After feeds(make_feed, num_feeds=...) write"
                " only .batch(global_batch_size).shard_to(mesh)."
            )


def _warn_of_same_rows(turns: Sequence[Turn]) -> None:
    """Logs a warning if two feeds give the same rows, as when `make_feed` ignores its argument.

    Args:
        turns: The turns of the first batch.
    """
    by_first_row: dict[str, Turn] = {}
    with contextlib.suppress(TypeError):  # raised if an object in a row has no digest
        for turn in turns:
            earlier = by_first_row.setdefault(element_digest(turn.rows[:1]), turn)
            if earlier is turn or not turn.rows:  # no earlier feed has the same first row
                continue
            if element_digest(earlier.rows) == element_digest(turn.rows):
                logging.warning(
                    "grain_shard: feeds %d and %d begin with the same rows, so both feeds most"
                    " likely read the same records. remedy: return a different part of the source"
                    " from make_feed for each shard_index, such as"
                    " records[feed.shard_index :: feed.shard_count].",
                    earlier.number,
                    turn.number,
                )
                return


def _warn_of_batches(streams: Streams, row: Any, batch_size: int) -> None:
    """Logs a warning if `make_feed` ends with ``.batch``, so that each row is a batch itself.

    Nothing is logged if each leaf of the row has at most one dim, because ``.batch`` is a usual way
    to cut a stream of tokens into rows.

    Args:
        streams: The feeds.
        row: A row of a feed.
        batch_size: Rows of a global batch.
    """
    shapes = ((path, np.shape(leaf)) for path, leaf in zip(*flatten(row)[:2], strict=True))
    path, shape = next(((path, shape) for path, shape in shapes if len(shape) > 1), ("", ()))
    # `make_feed` is the user's code, so it is called only if the row may be a batch.
    if not path or (size := nodes.records_per_row(streams.make(0))) is None:
        return
    logging.warning(
        "grain_shard: make_feed ends with .batch(%d), so each row of a feed is a batch of"
        " %d records: %s has shape %s. remedy: leave this .batch out of make_feed, because"
        " the .batch(%d) of the feeds makes batches. If a row is meant to hold %d records,"
        " nothing is wrong.",
        *(size, size, path, (batch_size, *shape), batch_size, size),
    )
