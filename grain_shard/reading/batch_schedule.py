"""`BatchSchedule`: batches whose size changes during a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grain

from grain_shard.errors import ShardingError, require_int, require_steps
from grain_shard.grain_inside import nodes
from grain_shard.reading.cuts import Cuts
from grain_shard.reading.record_batching import RecordBatching
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.reading.stack import RowTemplate


@dataclass(frozen=True)
class BatchSchedule:
    """Batches records like ``.batch(B)``, with a batch size that changes at given steps.

    The records and their order are the same as with ``.batch(B)``. Only the borders between batches
    differ. No batch has records of two epochs, so the last batch of an epoch may be short. If a
    ``.repeat`` follows, steps are counted across its epochs.

    Example:
        >>> records = grain.MapDataset.range(11).map(lambda i: {"x": i})
        >>> ds = records.pipe(BatchSchedule({0: 2, 3: 4}))
        >>> len(ds), [ds[i]["x"].tolist() for i in range(len(ds))]
        (5, [[0, 1], [2, 3], [4, 5], [6, 7, 8, 9], [10]])

    Attributes:
        sizes: Maps a step to the size of global batches from that step on. Step 0 is the first
            batch, and must have an entry. JAX compiles the training step once for each size.
    """

    sizes: Mapping[int, int]

    def __post_init__(self) -> None:
        remedy = (
            "pass {0: 256, 1_000: 512}, for example: 256 rows from step 0 on, 512 from step 1,000."
        )
        require_steps("the batch sizes", self.sizes, remedy)
        for step, size in self.sizes.items():
            require_int(f"the batch size from step {step} on", size, 1)

    def __call__(self, ds: Any) -> RowMapDataset:
        """Returns the dataset of batches.

        Args:
            ds: The dataset of records.

        Raises:
            ShardingError: `ds` cannot be read by index, drops records by a ``.filter``, consists of
                batches already, or is empty.
        """
        if not isinstance(ds, grain.MapDataset):
            raise ShardingError(
                "a BatchSchedule needs records that can be read by index, and got a"
                f" {type(ds).__name__}.",
                remedy="apply BatchSchedule to a grain.MapDataset. Streams and feeds have one batch"
                " size. To change it for feeds, restore their state with another .batch(B).",
            )
        if (node := nodes.batch_node(ds)) is not None and node.only_stacks:
            raise ShardingError(
                f"a BatchSchedule follows .batch({node.global_batch_size}), and would take each of"
                " the batches for a record.",
                remedy="leave .batch out: the BatchSchedule makes batches of records.",
            )
        if len(ds) == 0:
            raise ShardingError("the dataset has no records.", remedy="check the source.")
        batching = RecordBatching(cuts=Cuts(len(ds), dict(self.sizes)), template=RowTemplate(ds))
        return RowMapDataset(ds, batching, self)
