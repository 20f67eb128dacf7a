"""`BatchSchedule`: batches whose size changes during a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import grain

from grain_shard.errors import ShardingError
from grain_shard.grain_inside import nodes
from grain_shard.reading.cuts import Cuts
from grain_shard.reading.record_batching import RecordBatching
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.reading.row_template import RowTemplate


@dataclass(frozen=True)
class BatchSchedule:
    """Batches records, as ``.batch(B)`` does, by a size that changes at given steps.

    The records and their order are the same as with ``.batch(B)``, whatever the sizes: only the
    cuts between batches differ. An epoch ends with a short batch, and steps are counted across the
    epochs of a ``.repeat`` that follows.

    Example:
        >>> records = grain.MapDataset.range(11).map(lambda i: {"x": i})
        >>> ds = records.pipe(BatchSchedule({0: 2, 3: 4}))
        >>> len(ds), [ds[i]["x"].tolist() for i in range(len(ds))]
        (5, [[0, 1], [2, 3], [4, 5], [6, 7, 8, 9], [10]])

    Attributes:
        sizes: Maps a step to the global batch size from that step on, in rows; the first step is 0.
            A training step is compiled once for each size.
    """

    sizes: Mapping[int, int]

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, Mapping) or not self.sizes:
            raise ShardingError(
                f"{self.sizes!r} does not say which batch size holds when.",
                remedy="pass a dict from steps to sizes: {0: 256, 1_000: 512}.",
            )
        steps = list(self.sizes)
        if not all(_is_int(step) for step in steps) or steps[0] != 0 or steps != sorted(steps):
            raise ShardingError(
                f"the batch size changes at steps {steps}, which do not ascend from 0.",
                remedy="begin with step 0, and go on with larger whole numbers.",
            )
        for step, size in self.sizes.items():
            if not _is_int(size) or size < 1:
                raise ShardingError(
                    f"the batch size from step {step} on is {size!r}, and not a number of rows.",
                    remedy="pass a whole number, 1 or more.",
                )

    def __call__(self, ds: Any) -> RowMapDataset:
        """Returns the dataset of batches.

        Args:
            ds: The records.

        Raises:
            ShardingError: The records cannot be read by index, or there are none.
        """
        if not isinstance(ds, grain.MapDataset):
            raise ShardingError(
                f"a BatchSchedule cuts records that can be read by index, and this is a"
                f" {type(ds).__name__}.",
                remedy="keep a grain.MapDataset up to it. Streams and feeds have one size; to"
                " change that of feeds, restore their state with another .batch(B).",
            )
        if nodes.is_filtered(ds):
            raise ShardingError(
                "a .filter drops records, so that nobody can tell by its index what is in a batch.",
                remedy="filter within feeds, by .to_iter_dataset().filter(...).",
            )
        if len(ds) == 0:
            raise ShardingError("there are no records to batch.", remedy="check the source.")
        batching = RecordBatching(cuts=Cuts(len(ds), self.sizes), template=RowTemplate(ds))
        return RowMapDataset(ds, batching, self)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
