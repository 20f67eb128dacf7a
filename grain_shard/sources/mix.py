"""`mix`: several datasets in one, by weights that change during a run."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import grain
import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.grain_inside.routes import ElementsOfParents
from grain_shard.sources.weight_schedule import WeightSchedule


def mix(
    datasets: Sequence[grain.MapDataset], weights: Mapping[int, Sequence[float]]
) -> grain.MapDataset:
    """Mixes datasets by weights that change at given records.

    Like `grain.MapDataset.mix`, except that weights change: an ordinary node of a random-access
    pipeline. Each dataset is read in its own order, without gaps or repetition, also across a
    change of weights. Counted from the last change, each dataset is always less than one record
    away from its share.

    Example:
        >>> import grain
        >>> web, code = grain.MapDataset.range(100), grain.MapDataset.range(100, 200)
        >>> ds = mix([web, code], {0: [3, 1], 8: [1, 1]})
        >>> print([ds[i] for i in range(12)])
        [0, 1, 100, 2, 3, 4, 101, 5, 6, 102, 7, 103]

    Args:
        datasets: The datasets to mix.
        weights: Maps a record of the mixture to the weight of each dataset from that record on; the
            first record is 0. Only the proportions matter; a dataset of weight 0 pauses. Weights
            are exact (0.7 is 7/10), or rounded to about 65,536 parts if their lowest terms have a
            larger sum.

    Returns:
        A `grain.MapDataset`. It ends at the first record that a dataset lacks, so call
        ``.repeat()`` on datasets that should start over. Records past its end continue by the last
        weights, and into the later epochs of the datasets.

    Raises:
        ShardingError: Datasets, records or weights cannot be mixed.
    """
    datasets = list(datasets)
    for ds in datasets:
        if not isinstance(ds, grain.MapDataset):
            raise ShardingError(
                f"cannot mix a {type(ds).__name__} by record.",
                remedy="pass grain.MapDatasets; streams have grain.IterDataset.mix, whose weights"
                " do not change.",
            )
    if not datasets:
        raise ShardingError("there is nothing to mix.", remedy="pass at least one dataset.")
    schedule = WeightSchedule(weights, len(datasets))
    for i, ds in enumerate(datasets):
        if len(ds) == 0 and any(parts[i] for _, parts in schedule.weights):
            raise ShardingError(
                f"dataset {i} of the mixture, {ds}, is empty.",
                remedy="check its source, or leave it out.",
            )
    return MixedByRecord(datasets, schedule)


class MixedByRecord(ElementsOfParents):
    """The dataset that `mix` makes.

    Args:
        datasets: The datasets to mix.
        schedule: Gives the dataset of each record.
    """

    def __init__(self, datasets: Sequence[grain.MapDataset], schedule: WeightSchedule):
        super().__init__(datasets)
        self.schedule: WeightSchedule = schedule

    def __len__(self) -> int:
        return self._length

    @functools.cached_property
    def _length(self) -> int:
        return self.schedule.length([len(ds) for ds in self.parents])

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return f"mix({self.schedule})"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        dataset, record = self.below(np.array([index]))
        return self.parents[dataset.item()][record.item()]

    def below(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return self.schedule.locate(indices)
