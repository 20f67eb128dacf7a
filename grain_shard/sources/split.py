"""`split`: cuts records into parts that share no record, such as a training and a test part."""

from __future__ import annotations

import itertools
import numbers
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import grain
import numpy as np

from grain_shard.errors import ShardingError, require_int, shortened
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.index_shuffle import loses_a_record, permuted, permuted_index
from grain_shard.grain_inside.reshuffled import reshuffled_slice
from grain_shard.grain_inside.routes import ElementsOfParents

# A float such as 1 / 3 stands for the simplest fraction within its rounding error.
_LARGEST_DENOMINATOR = 10**9


def split(source: Any, parts: Sequence[float], seed: int) -> tuple[grain.MapDataset, ...]:
    """Splits records at random into parts that share no record, such as training and test records.

    The order of the records, from which the parts are cut, depends only on the seed and the number
    of records. It is the same in every epoch, on every host and in a restored run. In contrast, a
    slice of ``records.shuffle(seed=0)`` holds other records in each epoch.

    A part has the records in random order. ``.shuffle`` puts them into another order in each epoch.

    Example:
        >>> train, test = split(range(10), [0.8, 0.2], seed=0)
        >>> list(train), list(test)
        ([0, 4, 6, 7, 8, 3, 1, 9], [5, 2])

    Args:
        source: A source with a length and items, or a `grain.MapDataset` of it. Every epoch of a
            part reads the first epoch of this dataset. So call ``.random_map`` on the parts.
        parts: The number of records in each part, as integers; or the fraction of all records in
            each part, as floats. Records that are left over are in no part.
        seed: The seed of the order, from 0 up to 2**32 - 1.

    Returns:
        A `grain.MapDataset` for each part. It reads many records in one call if the source can.

    Raises:
        ShardingError: A part is empty or negative, the parts together have more than all records,
            the dataset has a record twice, or an argument is not valid.
    """
    ds = source if isinstance(source, grain.MapDataset) else _dataset(source)
    for node in nodes.walk(ds):
        if type(node) is nodes.REPEAT:
            raise ShardingError(
                f"split got {ds}, which is repeated, so a record could be in several parts.",
                remedy="split the records first, and call .repeat(n) on the parts.",
            )
        if type(node) in nodes.SHUFFLES and (
            nodes.shuffles_by_window(node) or loses_a_record(len(node))
        ):
            raise ShardingError(
                f"split got records in an order that may have a record twice: {node}, of"
                f" {len(node)} records.",
                remedy="leave out this shuffle above split, which puts the records into an order of"
                " its own.",
            )
    seed = int(seed) if isinstance(seed, np.integer) else seed
    require_int("seed", seed, 0)
    if seed >= 2**32:
        raise ShardingError(f"seed={seed} is too large.", remedy="pass a seed below 2**32.")
    sizes = _sizes(parts, len(ds))
    return tuple(
        SplitPart(ds, stop - size, stop, seed)
        for size, stop in zip(sizes, itertools.accumulate(sizes), strict=True)
    )


class SplitPart(ElementsOfParents):
    """A part of a split.

    Args:
        records: The dataset that was split.
        start: First position of the part in the random order of the records.
        stop: Position after the last one.
        seed: The seed of the order.
    """

    def __init__(self, records: grain.MapDataset, start: int, stop: int, seed: int):
        super().__init__(records)
        self._start, self._stop, self._split_seed = start, stop, seed
        self._num_records = len(records)

    def __len__(self) -> int:
        return self._stop - self._start

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        positions = f"{self._start}:{self._stop} of {self._num_records}"
        return f"split({positions}, seed={self._split_seed})"

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        position = self._start + index % len(self)
        return self.parents[0][permuted_index(position, self._num_records, self._split_seed)]

    def below(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        positions = self._start + indices % len(self)
        return np.zeros_like(positions), permuted(positions, self._num_records, self._split_seed)


def warn_of_reshuffled_slice(
    ds: grain.MapDataset | grain.IterDataset, num_epochs: int = 1, num_slices: int = 1
) -> None:
    """Warns if a slice of the pipeline holds other records in each epoch.

    Args:
        ds: The pipeline.
        num_epochs: Number of epochs of the pipeline.
        num_slices: Number of slices that together hold all records, such as feeds. Such
            slices cause no warning.
    """
    if (node := reshuffled_slice(ds, num_epochs > 1, num_slices)) is not None:
        warnings.warn(
            f"{node} is a slice of records that come in another order in each epoch, so it holds"
            " other records in each epoch. Records that another slice holds for a test are then"
            " trained on. Cut the records by grain_shard.split(source, [0.8, 0.2], seed=0), whose"
            " parts stay the same. Or repeat one order by .repeat(n, reseed_each_epoch=False).",
            stacklevel=2,
        )


def _dataset(source: Any) -> grain.MapDataset:
    if isinstance(source, grain.IterDataset) or not hasattr(source, "__getitem__"):
        raise ShardingError(
            f"split got an object of type {type(source).__name__}, whose records have no index.",
            remedy="split the source of a stream, which has a length and items.",
        )
    ds = grain.MapDataset.source(source)
    if columns := nodes.described_columns(ds):
        raise ShardingError(
            f"split got {columns}, of which Grain takes each value for a record.",
            remedy="wrap it: split(grain_shard.ArraySource(x), ...), where x is this object.",
        )
    return ds


def _sizes(parts: Any, num_records: int) -> list[int]:
    """Returns the number of records in each part.

    Raises:
        ShardingError: A part is empty or negative, or the parts have more than all records.
    """
    given = list(parts) if isinstance(parts, Sequence | np.ndarray) else []
    if all(isinstance(part, numbers.Integral) for part in given):
        stops = list(itertools.accumulate(map(int, given)))
        fits = sum(map(int, given)) <= num_records
    else:
        # The borders are rounded, not the sizes, so that parts of all records leave none over.
        fractions = _fractions(given)
        stops = [round(share * num_records) for share in itertools.accumulate(fractions)]
        fits = sum(fractions) <= 1
    sizes = [stop - start for start, stop in itertools.pairwise([0, *stops])]
    if sizes and min(sizes) > 0 and fits:
        return sizes
    of_records = f", which would have {shortened(sizes)} records" if sizes else ""
    raise ShardingError(
        f"{num_records} records cannot be split into parts={shortened(parts)}{of_records}.",
        remedy="pass a list with the number of records in each part, or with the fraction of all"
        " records in each part. The fractions may have a sum of at most 1. No part may be empty.",
    )


def _fractions(given: list[Any]) -> list[Fraction]:
    """Returns numbers as exact fractions, 0.333... as 1/3; an empty list if one is not a number."""
    try:
        return [Fraction(float(x)).limit_denominator(_LARGEST_DENOMINATOR) for x in given]
    except (TypeError, ValueError, OverflowError):
        return []
