"""Refuses a source that returns one array for several records, and overwrites it at each read."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import grain
import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.grain_inside.routes import Elements, Route

# The number of elements of a read that are compared with each other. A mixture may take turns
# between a few sources.
_COMPARED = 4

_NODES = dict, list, tuple
# The datasets whose elements are known to have arrays of their own.
_known: weakref.WeakSet[grain.MapDataset] = weakref.WeakSet()


def refuse_reused_buffer(elements: Elements, way: Route) -> None:
    """Raises an error if a later read has overwritten the array of an element.

    A thread reads several elements before it copies them into a batch. So all of them would have
    the values of the last one, also if only one thread reads. Elements are looked at until two of
    them were read in one call. If they share memory, as windows of one array also do, they are read
    once more to see if the second read changes the first element.

    Args:
        elements: The elements that were read, of a source or of an unknown dataset.
        way: The route that has read them.

    Raises:
        ShardingError: The array of an element is overwritten by the next read.
    """
    if len(elements) < 2 or not isinstance(elements, list) or way.ds in _known:
        return
    for i, j in itertools.combinations(range(min(_COMPARED, len(elements))), 2):
        pairs = itertools.product(_arrays(elements[i]), _arrays(elements[j]))
        if any(np.may_share_memory(*pair) for pair in pairs) and _overwrites(way, i, j):
            first, second = way.indices[[i, j]].tolist()
            raise ShardingError(
                f"the source returns one array for several records: to read element {second} of"
                f" {way.ds} changes the array of element {first}, which was returned before.",
                remedy="return a new array for each record, such as self.buffer.copy().",
            )
    _known.add(way.ds)


def _arrays(element: Any) -> list[np.ndarray]:
    """Returns the arrays of an element. It may be of any class, because no .map has seen it yet."""
    if isinstance(element, np.ndarray):
        return [element]
    nodes = element.values() if isinstance(element, dict) else element
    return list(itertools.chain(*map(_arrays, nodes))) if isinstance(element, _NODES) else []


def _overwrites(way: Route, i: int, j: int) -> bool:
    first = _arrays(way.part(i, i + 1).read()[0])
    before = [array.tobytes() for array in first]
    way.part(j, j + 1).read()
    return any(array.tobytes() != old for array, old in zip(first, before, strict=True))
