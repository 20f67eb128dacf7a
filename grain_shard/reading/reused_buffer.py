"""Refuses a source that returns one array for several records, and overwrites it at each read."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.grain_inside.routes import Elements, Route

# Most reads of a run that are looked at, elements of each, nodes in the tree of an element, and
# values of an array that are compared. A look at an array costs about a microsecond.
_READS, _ELEMENTS, _NODES, _VALUES = 8, 64, 256, 4096


class ReusedBuffers:
    """Looks for arrays that a later read overwrites, in the first reads of a run.

    A thread reads several elements before it copies them into a batch. So all of them would have
    the values of the last one, also if only one thread reads. Two elements may share an array
    without harm, such as a constant or a memory map. So both are read once more, to see if the
    second read changes the array of the first.
    """

    def __init__(self):
        self._reads_left = _READS
        self._failure: ShardingError | None = None
        self._constants = set[int]()  # addresses of shared arrays that no read changes

    def refuse(self, read: Sequence[Elements], ways: Sequence[Route]) -> None:
        """Raises an error if a later read has overwritten the array of an element.

        Args:
            read: The elements that were read together, of each route.
            ways: The routes that have read them.

        Raises:
            ShardingError: The array of an element is overwritten by the next read.
        """
        if self._failure is not None:
            raise self._failure  # again, because parts that fail together are read one by one
        if self._reads_left <= 0 or sum(map(len, read)) < 2:
            return
        self._reads_left -= 1
        owners: dict[int, Route] = {}
        for way, element in itertools.islice(_each(read, ways), _ELEMENTS):
            for array in _arrays(element):
                address = _address(array)
                owner = owners.setdefault(address, way)
                if owner is way or address in self._constants:
                    continue
                if _overwrites(owner, way, address):
                    self._failure = ShardingError(
                        "the source returns one array for several records: to read element"
                        f" {way.indices.item()} of {way.ds} changes the array of element"
                        f" {owner.indices.item()}, which was returned before.",
                        remedy="return a new array for each record, such as self.buffer.copy().",
                    )
                    raise self._failure
                self._constants.add(address)


def _each(read: Sequence[Elements], ways: Sequence[Route]) -> Iterator[tuple[Route, Any]]:
    """Yields each element with a route for it alone. Rows of one array in memory are left out."""
    for elements, way in zip(read, ways, strict=True):
        if isinstance(elements, list):
            for i, element in enumerate(elements):
                yield way.part(i, i + 1), element


def _arrays(element: Any) -> list[np.ndarray]:
    """Returns the arrays of an element, which may be of any class, as no .map has seen it yet."""
    nodes, arrays = [element], []
    for node in itertools.islice(nodes, _NODES):  # those that are added below are met, too
        if isinstance(node, np.ndarray):
            arrays += [node] * bool(node.size)
        elif isinstance(node, dict):
            # A class of the user may do more in its own `values`.
            nodes += itertools.islice(dict.values(node), _NODES)
        elif isinstance(node, list | tuple):
            nodes += itertools.islice(node, _NODES)
    return arrays


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _overwrites(owner: Route, way: Route, address: int) -> bool:
    """Returns True if a read by `way` changes an array that a read by `owner` returned before."""
    arrays = [array for array in _arrays(owner.read()[0]) if _address(array) == address]
    before = [_values(array) for array in arrays]
    way.read()
    return any(_values(array) != values for array, values in zip(arrays, before, strict=True))


def _values(array: np.ndarray) -> bytes:
    """Returns some values of an array, spread evenly: it may be a memory map of a large file."""
    step = -(-array.size // _VALUES)
    return array.flat[::step].tobytes()
