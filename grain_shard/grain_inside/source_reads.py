"""The two reads of a source: one record, or many in one call.

If Grain allows it, the source is read directly: Grain's node measures each record, for 2 us or
more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import grain
import numpy as np

BatchedRead = Callable[[np.ndarray], Sequence[Any]]  # of indices, int64[n]

SOURCE = type(grain.MapDataset.source([0]))
RANGE = type(grain.MapDataset.range(1))


def single_read_of(ds: grain.MapDataset) -> Callable[[int], Any]:
    """Returns a function that reads one element of any dataset."""
    if type(ds) is SOURCE and (source := getattr(ds, "_source", None)) is not None:
        length = len(ds)
        return lambda index: source[index % length]
    return ds.__getitem__


def batched_read_of(ds: grain.MapDataset) -> BatchedRead | None:
    """Returns a function that reads many records in one call, by Grain's or PyTorch's name."""
    if type(ds) is not SOURCE:
        return None
    source = getattr(ds, "_source", None)
    for name in ("_getitems", "__getitems__"):  # the second is used by PyTorch and array_record
        if (read := getattr(source, name, None)) is not None:
            length = len(ds)  # computed once: a source may compute its length in a slow call
            return lambda indices: read((indices % length).tolist())
    return None
