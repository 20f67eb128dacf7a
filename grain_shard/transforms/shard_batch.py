"""`ShardBatch`: keeps this host's rows of the global batch, and reads no others where it can."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import grain

from grain_shard.errors import ShardingError
from grain_shard.fetch import FetchingMapDataset
from grain_shard.layout import BatchLayout
from grain_shard.rows import row_reader, take_rows
from grain_shard.trees import Batch, FlatBatch


@dataclass(frozen=True)
class ShardBatch:
    """Keeps the rows of each batch that this host's devices hold.

    Over a `MapDataset` it reaches below ``.batch`` and evaluates those rows alone. What it hands
    out is in fresh arrays that nothing else refers to.

    Example:
        >>> import grain
        >>> ds = grain.MapDataset.range(16).map(lambda i: {"x": i}).batch(8)
        >>> ds.pipe(ShardBatch(BatchLayout(divisor=4, shards=(1, 3))))[1]
        {'x': array([10, 11, 14, 15])}

    Attributes:
        layout: Which rows this host holds.
    """

    layout: BatchLayout

    def __post_init__(self):
        if not isinstance(self.layout, BatchLayout):
            raise ShardingError(
                f"a {type(self.layout).__name__} does not say which rows this host holds.",
                remedy="pass ShardingTree.of(mesh, spec).layout().",
            )

    def __call__(self, ds: Any) -> Any:
        """The dataset of this host's rows, of the same kind: leaves are ``[host_batch_size, ...]``.

        Raises:
            ShardingError: The shards do not divide the batch size.
        """
        if isinstance(ds, grain.MapDataset):
            return ShardBatchMapDataset(ds, self.layout)
        return ShardBatchIterDataset(ds, self.layout)


class ShardBatchMapDataset(FetchingMapDataset):
    """This host's rows of a random-access dataset of batches."""

    def __init__(self, parent: grain.MapDataset, layout: BatchLayout):
        reader = row_reader(parent)
        super().__init__(parent, reader, layout.rows(reader.global_batch_size))
        self._layout = layout
        self._reads_whole_batches = reader.reads_whole_batches
        if self.reads_other_rows:
            warnings.warn(
                f"this host holds {len(layout.shards)} of {layout.divisor} shards and still has to"
                " evaluate every row: with a custom batch_fn, or a .map after .batch, no row can"
                " be had alone. Move the .map before .batch to read only the rows it needs.",
                stacklevel=2,
            )

    @property
    def reads_other_rows(self) -> bool:
        """Whether whole batches are read, of which this host keeps some rows."""
        return self._reads_whole_batches and not self._layout.holds_all

    def __str__(self) -> str:
        return str(ShardBatch(self._layout))


class ShardBatchIterDataset(grain.IterDataset):
    """This host's rows of a stream of batches that is the same on every host."""

    def __init__(self, parent: grain.IterDataset, layout: BatchLayout):
        super().__init__(parent)
        self._layout = layout

    def __iter__(self) -> grain.DatasetIterator:
        (parent,) = self.parents
        return _ShardBatchIterator(iter(parent), self._layout)

    def __str__(self) -> str:
        return str(ShardBatch(self._layout))


class _ShardBatchIterator(grain.DatasetIterator):
    def __init__(self, parent: grain.DatasetIterator, layout: BatchLayout):
        super().__init__(parent)
        self._source, self._layout = parent, layout
        self.first_digest = ""  # of the whole first batch, to be compared with other hosts'

    def __next__(self) -> Batch:
        batch = FlatBatch.of(next(self._source))
        if not self.first_digest and self._layout.num_hosts > 1:
            self.first_digest = batch.digest()
        return take_rows(batch, self._layout.rows(batch.rows))

    def get_state(self) -> dict[str, Any]:
        return self._source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state)
