"""Reads of a source: one record, or many records in one call.

If possible, the source is called directly and not through Grain's node, because the node measures
each record, which takes 2 us or more.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import grain
import numpy as np

from grain_shard.grain_inside.nodes import SOURCE

R = TypeVar("R", bound=Callable[..., Any])
BatchedRead = Callable[[np.ndarray], Sequence[Any]]  # from indices, int64[n], to n records


def takes_array(read: R) -> R:
    """Marks a batched read of a source that takes indices as int64[n], not only as a list."""
    read.__dict__["takes_array"] = True
    return read


def single_read_of(ds: grain.MapDataset) -> Callable[[int], Any]:
    """Returns a function that reads one element of any dataset, given the element's index."""
    if type(ds) is SOURCE and (source := getattr(ds, "_source", None)) is not None:
        length = len(ds)
        return lambda index: source[index % length]
    return ds.__getitem__


def batched_read_of(ds: grain.MapDataset) -> BatchedRead | None:
    """Returns a function that reads many records of a source in one call; None if there is none."""
    if type(ds) is not SOURCE:
        return None
    source = getattr(ds, "_source", None)
    for name in ("_getitems", "__getitems__"):  # Grain's name; PyTorch's and array_record's
        if (read := getattr(source, name, None)) is not None:
            length = len(ds)  # computed once: a source may compute its length in a slow call
            if getattr(read, "takes_array", False):
                return lambda indices: read(indices % length)
            return lambda indices: read((indices % length).tolist())
    return None
