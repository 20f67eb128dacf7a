"""`reshuffled_slice`: finds a slice of a pipeline that holds other records in each epoch.

``ds.shuffle(seed=0)[:1000].repeat()`` is such a slice: each epoch shuffles all records again, and
takes another 1,000 of them. The caller warns, because a user may mean a fixed part of the records.
"""

from __future__ import annotations

import enum
from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.routes import below_mixture

# The first records of a mixture that are looked at. It takes turns, so they are from all datasets.
_FIRST = 1000


class _SecondEpoch(enum.Enum):
    """The indices that a node reads from its parents in its second epoch."""

    SAME = "the indices of the first epoch"
    NEXT = "the same indices, in the parents' next epoch"
    OTHER = "other indices"


def reshuffled_slice(ds: Any, in_epochs: bool, num_slices: int) -> grain.MapDataset | None:
    """Returns a slice that is read for several epochs and holds other records in each, or None.

    The pipeline is searched from its end to its sources.

    Args:
        ds: The end of the pipeline.
        in_epochs: True if several epochs of `ds` are read.
        num_slices: Number of equal slices that hosts or feeds cut the records into. A slice of this
            size does not count, because all slices together hold all records in each epoch.
    """
    if type(ds) is nodes.REPEAT:
        in_epochs = in_epochs or len(ds) > len(ds.parents[0])
    if in_epochs and type(ds) in (nodes.SLICE, nodes.REINDEX):
        (parent,) = ds.parents
        is_share = len(parent) // num_slices <= len(ds) <= -(-len(parent) // num_slices)
        if not is_share and _is_reordered(parent):
            return ds
    in_epochs = in_epochs and _second_epoch(ds) is not _SecondEpoch.SAME
    found = (reshuffled_slice(made_of, in_epochs, num_slices) for made_of in nodes.made_of(ds))
    return next((node for node in found if node is not None), None)


def _is_reordered(ds: Any) -> bool:
    """Returns whether the first indices of a dataset stand for other records in each epoch."""
    second = _second_epoch(ds)
    if second is _SecondEpoch.NEXT:
        return any(map(_is_reordered, ds.parents))
    return second is _SecondEpoch.OTHER


def _second_epoch(ds: Any) -> _SecondEpoch:
    """Returns how the second epoch of a node compares with its first epoch."""
    if type(ds) is nodes.REPEAT:
        return _SecondEpoch.NEXT if getattr(ds, "_reseed_each_epoch", True) else _SecondEpoch.SAME
    if type(ds) in nodes.SHUFFLES:
        return _SecondEpoch.OTHER
    if not isinstance(ds, grain.MapDataset):
        return _SecondEpoch.NEXT
    indices = np.arange(min(len(ds), _FIRST))
    # Where the elements of the first and the second epoch come from: the parents, and the indices
    # in them.
    now, later = below_mixture(ds, indices), below_mixture(ds, indices + len(ds))
    if now is None or later is None:  # not a mixture: an epoch reads an epoch of the parents
        return _SecondEpoch.NEXT
    if np.array_equal(now, later):
        return _SecondEpoch.SAME
    # A mixture that does not reach the end of a dataset in one epoch goes on there in the next, so
    # it reads other indices.
    lengths = np.array([len(parent) for parent in ds.parents])
    in_order = np.array_equal((now[0], now[1] + lengths[now[0]]), later)
    return _SecondEpoch.NEXT if in_order else _SecondEpoch.OTHER
