"""`mix`: mixes datasets by weights that change during a run."""

from __future__ import annotations

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

    This is `grain.MapDataset.mix` with weights that may change. Each dataset is read in its own
    order, without gaps or repetition, even across a change of weights. Since the last change, the
    number of records from each dataset is always less than one away from its share.

    Example:
        >>> import grain
        >>> web, code = grain.MapDataset.range(100), grain.MapDataset.range(100, 200)
        >>> ds = mix([web, code], {0: [3, 1], 8: [1, 1]})
        >>> print([ds[i] for i in range(12)])
        [0, 1, 100, 2, 3, 4, 101, 5, 6, 102, 7, 103]

    Args:
        datasets: The datasets to mix.
        weights: Maps a record of the mixture to the weight of each dataset from that record on. The
            first key is 0. Only the proportions of weights matter. A dataset of weight 0 pauses.
            Weights are exact: 0.7 is 7/10. If the weights as integers in lowest terms have a sum
            above 65,536, they are rounded to about 65,536 parts.

    Returns:
        A `grain.MapDataset`. It ends before the first record that a dataset lacks, so call
        ``.repeat()`` on datasets that should start over. An index past the end continues with the
        last weights, and takes records of later epochs of the datasets.

    Raises:
        ShardingError: There is no dataset; a dataset is not a `grain.MapDataset`; a dataset with a
            weight is empty; or the keys or values of `weights` are invalid.
    """
    datasets = list(datasets)
    for ds in datasets:
        if not isinstance(ds, grain.MapDataset):
            raise ShardingError(
                f"mix got a {type(ds).__name__}, not a grain.MapDataset.",
                remedy="pass only grain.MapDatasets. For streams use grain.IterDataset.mix, whose"
                " weights cannot change.",
            )
    if not datasets:
        raise ShardingError("mix got no dataset.", remedy="pass at least one grain.MapDataset.")
    schedule = WeightSchedule(weights, len(datasets))
    for i, ds in enumerate(datasets):
        if len(ds) == 0 and any(at_step[i] for _, at_step in schedule.weights):
            raise ShardingError(
                f"dataset {i} of the mixture, {ds}, is empty.",
                remedy="check the source of this dataset, or leave the dataset out.",
            )
    return MixedByRecord(datasets, schedule)


class MixedByRecord(ElementsOfParents):
    """The dataset that `mix` returns.

    Args:
        datasets: The datasets to mix.
        schedule: Finds the dataset of each record, and the record's index in that dataset.
    """

    def __init__(self, datasets: Sequence[grain.MapDataset], schedule: WeightSchedule):
        super().__init__(datasets)
        self.schedule: WeightSchedule = schedule
        self._length = schedule.length([len(ds) for ds in datasets])

    def __len__(self) -> int:
        return self._length

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
