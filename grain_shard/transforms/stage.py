"""`Stage` and `RowsStage`: the base classes of the chain's stages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import grain

from grain_shard.errors import ShardingError
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.private_names import log_missing_names
from grain_shard.hosts.state_files import FEEDS
from grain_shard.iteration.sharded_dataset import sharded
from grain_shard.reading.host_rows import H
from grain_shard.reading.row_dataset import RowMapDataset, batching_of
from grain_shard.streams.stream_dataset import StreamDataset


class Stage(ABC):
    """The base class of a stage of the chain, to be called on a dataset: ``ds.pipe(stage)``.

    There are two kinds of pipelines: random access, and streams, which may be feeds. A stage has a
    method for each kind. Only this file finds out which kind a dataset is.
    """

    def __call__(self, ds: Any) -> Any:
        """Returns the dataset after this stage.

        Args:
            ds: A `grain.MapDataset` or `grain.IterDataset` of batches.

        Raises:
            ShardingError: `ds` is another kind of object, is sharded already, or does not fit the
                stage's arguments.
        """
        ds = _with_rows(ds)
        return self.of_random_access(ds) if isinstance(ds, RowMapDataset) else self.of_streams(ds)

    @abstractmethod
    def of_random_access(self, ds: RowMapDataset) -> grain.MapDataset | grain.IterDataset:
        """Returns the dataset after this stage, for batches that can be read by index."""

    @abstractmethod
    def of_streams(self, ds: StreamDataset) -> grain.IterDataset:
        """Returns the dataset after this stage, for batches that are read in order."""


class RowsStage(ABC):
    """A stage that only changes a host's rows of the batches, in the same way for both kinds."""

    def __call__(self, ds: Any) -> Any:
        """Returns the dataset after this stage; see `Stage`."""
        ds = _with_rows(ds).whole()
        return ds.after(self.change(ds.host_rows), self)

    @abstractmethod
    def change(self, host_rows: H) -> H:
        """Returns the rows after this stage."""


def as_stream(ds: RowMapDataset) -> grain.IterDataset:
    """Turns batches of this host's own rows into a stream, because hosts agree on its end."""
    return ds.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))


def _with_rows(ds: Any) -> RowMapDataset | StreamDataset:
    """Returns the user's dataset as one whose rows a stage can change.

    Raises:
        ShardingError: `ds` is not a dataset of batches, or is sharded already.
    """
    log_missing_names()
    if sharded(ds) is not None:
        raise ShardingError(
            "the dataset is sharded already.", remedy="call .shard_to once, at the end."
        )
    if isinstance(ds, RowMapDataset | StreamDataset):
        return ds
    if isinstance(ds, grain.experimental.ElasticIterator):
        raise ShardingError(
            "an ElasticIterator makes the batches of one host, and can be iterated over once.",
            remedy="leave it out, and call .batch(global_batch_size).shard_to(mesh) on its"
            " MapDataset: the state restores on any number of hosts. If its dataset is a stream,"
            " cut the stream into grain_shard.feeds.",
        )
    if isinstance(ds, grain.MapDataset | grain.IterDataset):
        _refuse_columns(ds)
        _refuse_after_batch(ds)
    if isinstance(ds, grain.MapDataset):
        return RowMapDataset(ds, batching_of(ds))
    if isinstance(ds, grain.IterDataset):
        return StreamDataset.of(ds)
    remedy = (
        "pass a grain.MapDataset or grain.IterDataset of batches, not its iterator. Turn a"
        " DataLoader or any other iterable of batches into a dataset by"
        " grain_shard.from_iterable(loader, rows=...)."
    )
    if isinstance(ds, grain.sources.RandomAccessDataSource):
        remedy = (
            "if its items are single records, batch them:"
            " grain.MapDataset.source(x).batch(B).shard_to(mesh), where x is this object."
        )
        if hasattr(ds, "__iter__"):
            remedy += (
                " If its items are whole batches: grain_shard.from_iterable(x, rows=...)"
                ".shard_to(mesh)."
            )
    raise ShardingError(f"cannot shard a {type(ds).__name__}.", remedy=remedy)


def _refuse_columns(ds: grain.MapDataset | grain.IterDataset) -> None:
    """Refuses a source that is a dict or tuple of columns: Grain takes each column for a record.

    Raises:
        ShardingError: The source is a dict or tuple of columns.
    """
    for source in nodes.sources(ds):
        if columns := nodes.described_columns(source):
            raise ShardingError(
                f"the source is {columns}, of which Grain takes each value for a record.",
                remedy="if its values are arrays with a row for each record, wrap it:"
                " grain.MapDataset.source(grain_shard.ArraySource(x)), where x is this object.",
            )


def _refuse_after_batch(ds: grain.MapDataset | grain.IterDataset) -> None:
    """Refuses a dataset if a transformation after ``.batch`` hides facts that the chain needs.

    Raises:
        ShardingError: The transformation follows batches of feeds, or batches of several sizes. Or
            the ``batch_fn`` of ``.batch`` pads the batches already.
    """
    below = list(nodes.walk(ds))
    if any(
        isinstance(node, StreamDataset) and node.host_rows.streams.kind == FEEDS for node in below
    ):
        raise ShardingError(
            f"{ds} follows the .batch of feeds, where a host has only the rows of its own feeds.",
            remedy="move this transformation into make_feed, where it gets single rows: return"
            " ds.map(...). Then call .batch(B).shard_to(mesh) on the feeds, with no transformation"
            " in between.",
        )
    if any(isinstance(node, RowMapDataset) and node.host_rows.has_several_sizes for node in below):
        raise ShardingError(
            f"{ds} follows batches whose size changes, so it is unknown which batches are full.",
            remedy="move this transformation before BatchSchedule, where it gets single records."
            " Only .repeat and .to_iter_dataset() may follow BatchSchedule.",
        )
    if nodes.pads_batches(ds):
        raise ShardingError(
            "batch_fn=grain.experimental.batch_and_pad pads the last batch, so its padding looks"
            " like records.",
            remedy="leave batch_fn out: .shard_to pads the last batch itself, with zeros or"
            " pad_value, and adds a mask.",
        )
