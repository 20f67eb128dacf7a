"""`ShardBatch`: keeps this host's rows of the global batch, and reads no other rows if possible."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace

from grain_shard.errors import ShardingError
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.sharding.layout import BatchLayout
from grain_shard.streams.stream_dataset import StreamDataset
from grain_shard.transforms.stage import Stage


@dataclass(frozen=True)
class ShardBatch(Stage):
    """Keeps the rows of each batch that this host's devices hold.

    Over a `MapDataset` it reads only the records of these rows, unless a ``batch_fn`` or a ``.map``
    after ``.batch`` needs the whole batch. The arrays of its batches are new ones, to which nothing
    else refers.

    Example:
        >>> import grain
        >>> ds = grain.MapDataset.range(16).map(lambda i: {"x": i}).batch(8)
        >>> ds.pipe(ShardBatch(BatchLayout(divisor=4, shards=(1, 3))))[1]
        {'x': array([10, 11, 14, 15])}

    Attributes:
        layout: The rows that this host holds.
    """

    layout: BatchLayout

    def __post_init__(self) -> None:
        if not isinstance(self.layout, BatchLayout):
            raise ShardingError(
                f"layout is a {type(self.layout).__name__}, not a BatchLayout.",
                remedy="pass ShardingTree.of(mesh, spec).layout().",
            )

    def of_random_access(self, ds: RowMapDataset) -> RowMapDataset:
        """Returns the dataset of this host's rows: leaves are ``[host_batch_size, ...]``.

        Warns if this host has to read rows that it does not hold.

        Raises:
            ShardingError: The shards do not divide the batch size.
        """
        ds = ds.whole()
        batching = replace(ds.batching, layout=self.layout)
        _ = batching.kept  # raises the error if the shards do not divide the batch size
        if batching.reads_other_rows:
            warnings.warn(
                f"this host holds {len(self.layout.shards)} of {self.layout.divisor} shards, but"
                " reads every row: a custom batch_fn, or a .map after .batch, needs the whole"
                " batch. Move the .map before .batch, so that each host reads only its own rows.",
                stacklevel=2,
            )
        return RowMapDataset(ds, batching, self)

    def of_streams(self, ds: StreamDataset) -> StreamDataset:
        """Returns the dataset of this host's rows.

        A user's stream must be the same on every host. Only the feeds that make these rows run.

        Raises:
            ShardingError: The shards do not divide the batch size.
        """
        ds = ds.whole()
        return ds.after(ds.rows.of_host(self.layout), self)
