"""`RowMapDataset`: the dataset that the chain's stages make of a `MapDataset`."""

from __future__ import annotations

import sys
from typing import Any

import grain
import numpy as np

from grain_shard.errors import ShardingError, require_int
from grain_shard.grain_inside import nodes
from grain_shard.reading.batching import Batching
from grain_shard.reading.faults import FAIL_AT_ONCE, Faults
from grain_shard.reading.record_batching import RecordBatching
from grain_shard.reading.whole_batching import WholeBatching


def batching_of(ds: grain.MapDataset) -> Batching:
    """Returns the `Batching` of a dataset of batches.

    It is a `RecordBatching` if ``.batch`` only stacks records, because each row can then be read
    alone. Otherwise it is a `WholeBatching`, which evaluates whole batches.

    Raises:
        ShardingError: The size of a batch is a float, which Grain notices only when it reads.
    """
    node = nodes.batch_node(ds)
    if node is None:
        return WholeBatching.of(ds, None)
    if isinstance(size := node.global_batch_size, float | np.floating):
        raise ShardingError(
            f"batch_size={size!r} of .batch is not an integer.",
            remedy="divide by // instead of /.",
        )
    records = RecordBatching.of(node, len(ds))
    return records if node.only_stacks else WholeBatching.of(ds, records)


class RowMapDataset(grain.MapDataset):
    """A `grain.MapDataset` whose elements are the host batches of a `Batching`.

    Args:
        parent: The dataset to which the stage was applied.
        host_rows: Describes the batches, and reads them.
        made_by: The stage that made this dataset, for ``str``.
    """

    def __init__(self, parent: grain.MapDataset, host_rows: Batching, made_by: Any = None):
        super().__init__(parent)
        self.host_rows: Batching = host_rows
        self._made_by = made_by

    def __len__(self) -> int:
        return self.host_rows.num_batches()

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return str(self._made_by or type(self).__name__)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        if index < 0:
            index += len(self)  # negative indices count from the end, as in a list
        return self.host_rows.read_batch(index, Faults(FAIL_AT_ONCE))

    @property
    def makes_batches(self) -> bool:
        """True if this dataset batches records; False if its parent has batches already."""
        return self.host_rows.reads_rows_alone

    def whole(self) -> RowMapDataset:
        """Returns a dataset of whole batches, from which a stage can choose rows.

        If rows were chosen already, the chosen rows of a batch count as a whole batch, and are read
        together even if only some of them are needed.
        """
        if self.host_rows.layout is None:
            return self
        return RowMapDataset(self, batching_of(self))

    def repeat(
        self, num_epochs: int | None = None, *, reseed_each_epoch: bool = True
    ) -> grain.MapDataset:
        """Repeats the batches, as `grain.MapDataset.repeat` does.

        If batch sizes change by step, steps are counted across epochs, so the batches of two epochs
        differ.

        Raises:
            ShardingError: Batch sizes change and `reseed_each_epoch` is False, or `num_epochs` is
                not a positive integer.
        """
        batching = self.host_rows
        if batching.has_several_sizes and not reseed_each_epoch:
            raise ShardingError(
                "batches whose size changes cannot be repeated with reseed_each_epoch=False.",
                remedy="call .repeat on the records, before BatchSchedule. A batch may then hold"
                " records of two epochs.",
            )
        # Grain's own repeat is right for batches with fixed borders. And only Grain's repeats the
        # first epoch unchanged, as `reseed_each_epoch=False` asks.
        if not (batching.counts_records and reseed_each_epoch):
            return super().repeat(num_epochs, reseed_each_epoch=reseed_each_epoch)
        if num_epochs is not None:
            require_int("num_epochs", num_epochs, 1)
        return self.after(batching.repeated(num_epochs or sys.maxsize))  # None: without an end

    def after(self, host_rows: Batching, made_by: Any = None) -> RowMapDataset:
        """Returns the dataset with other host rows of the same batches, as after a stage.

        Args:
            host_rows: The padding, and the rows that this host keeps.
            made_by: The stage.
        """
        return RowMapDataset(self, host_rows, made_by or self._made_by)
