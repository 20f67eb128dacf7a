"""Records of a Grain pipeline, many at a time: with `nodes`, all that looks at private parts.

Grain evaluates a record by a call down the pipeline and back, with a call into the source for each.
Here the indices of many records are taken down at once, the source reads them in one call, and
the transformations are applied on the way up. What is not known ends the way down and is asked
record by record, which is the public path; the test suite runs its core with nothing known.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside.index_shuffle import shuffled
from grain_shard.grain_inside.nodes import MAP, MAP_WITH_INDEX, RANDOM_MAP, REPEAT, SEED, SLICE

Apply = Callable[[list[Any], list[int]], list[Any]]

_SOURCE = type(grain.MapDataset.source([0]))
_SHUFFLE = type(grain.MapDataset.range(1).shuffle(seed=0))

# Elements from elements, and the indices that those have at the node.
_ELEMENTS: dict[type, Callable[[Any], Apply]] = {
    MAP: lambda node: functools.partial(_map, node._map_element),
    RANDOM_MAP: lambda node: functools.partial(_map_with_index, node._random_map_element),
    MAP_WITH_INDEX: lambda node: functools.partial(_map_index_first, node._map_with_index_fn),
}
# From indices above the node to indices below it.
_INDICES: dict[type, Callable[[Any, np.ndarray], np.ndarray]] = {
    SEED: lambda node, indices: indices,
    _SHUFFLE: lambda node, indices: _below_shuffle(node, indices),
    SLICE: lambda node, indices: np.array([node._sliced_index(i) for i in indices.tolist()]),
    REPEAT: lambda node, indices: (
        indices if node._reseed_each_epoch else indices % len(node.parents[0])
    ),
}


@dataclass(frozen=True)
class Route:
    """The way of some elements from where they are read, up to the dataset that was asked for.

    Attributes:
        origin: The dataset to read from.
        indices: int64[n], the elements to read there.
        steps: From the bottom up, what is applied to the elements, and their indices there.
    """

    origin: grain.MapDataset
    indices: np.ndarray
    steps: tuple[tuple[Apply, np.ndarray], ...] = ()

    def part(self, start: int, stop: int) -> Route:
        """The way of some of the elements."""
        steps = tuple((apply, indices[start:stop]) for apply, indices in self.steps)
        return replace(self, indices=self.indices[start:stop], steps=steps)

    @property
    def reads_many(self) -> bool:
        """Whether one call reads several elements for less than as many calls would."""
        return _batched_read(self.origin) is not None

    def read(self) -> list[Any]:
        """What is at the lower end.

        Raises:
            ValueError: A batched read gave more or fewer elements than it was asked for.
        """
        indices = self.indices.tolist()
        batched_read = _batched_read(self.origin) or getattr(self.origin, "_getitems", None)
        if batched_read is None:
            return [self.origin[i] for i in indices]
        result = batched_read(indices)
        elements = [] if isinstance(result, Mapping) else list(result)
        if len(elements) != len(indices):
            raise ValueError(
                f"the batched read of {self.origin} gave a {type(result).__name__} of"
                f" {len(result) if hasattr(result, '__len__') else len(elements)} for"
                f" {len(indices)} indices; it has to give a record for each, in their order"
            )
        return elements

    def finish(self, elements: list[Any]) -> list[Any]:
        """What becomes of it on the way up."""
        for apply, indices in self.steps:
            elements = apply(elements, indices.tolist())
        return elements


def route(ds: grain.MapDataset, indices: np.ndarray) -> Route:
    """The way to elements of a dataset, as far down as it is known.

    Args:
        ds: Any dataset.
        indices: int64[n]; as in Grain, those past the end are in later epochs.
    """
    steps = []
    try:
        while True:
            kind = type(ds)
            if kind in _ELEMENTS:
                steps.append((_ELEMENTS[kind](ds), indices))
            elif kind in _INDICES:
                indices = _INDICES[kind](ds, indices)
            else:
                return Route(ds, indices, tuple(reversed(steps)))
            (ds,) = ds.parents
    except AttributeError:  # this Grain names its private parts otherwise
        return Route(ds, indices, tuple(reversed(steps)))


def _map(one: Callable[[Any], Any], elements: list[Any], indices: list[int]) -> list[Any]:
    return [one(element) for element in elements]


def _map_with_index(
    one: Callable[[Any, int], Any], elements: list[Any], indices: list[int]
) -> list[Any]:
    return [one(element, index) for element, index in zip(elements, indices, strict=True)]


def _map_index_first(
    one: Callable[[int, Any], Any], elements: list[Any], indices: list[int]
) -> list[Any]:
    return [one(index, element) for element, index in zip(elements, indices, strict=True)]


def _batched_read(ds: grain.MapDataset) -> Callable[[Sequence[int]], Sequence[Any]] | None:
    """How a source reads many records in one call, under Grain's name for that or Python's.

    Asked directly: Grain's node measures each record that passes, for 2 us.
    """
    if type(ds) is not _SOURCE:
        return None
    source = getattr(ds, "_source", None)
    for name in ("_getitems", "__getitems__"):  # the second is PyTorch's and array_record's
        if (read := getattr(source, name, None)) is not None:
            return lambda indices: read([i % len(ds) for i in indices])
    return None


def _below_shuffle(node: Any, indices: np.ndarray) -> np.ndarray:
    length = len(node.parents[0])
    epochs = indices // length
    below = np.empty_like(indices)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        seed = (node._seed + int(epoch)) % 2**32
        below[here] = shuffled(indices[here] - epoch * length, length, seed) + epoch * length
        # Grain itself has the last word: if it shuffles otherwise, hardly an index is the same.
        for i in np.flatnonzero(here)[[0, -1]]:
            if below[i] != node._shuffled_index(int(indices[i])):
                return np.array([node._shuffled_index(i) for i in indices.tolist()])
    return below
