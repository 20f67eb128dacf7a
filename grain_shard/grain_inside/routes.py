"""Records of a Grain pipeline, many at a time: with `nodes`, all that looks at private parts.

Grain evaluates a record by a call down the pipeline and back, with a call into the source for each.
Here the indices of many records are taken down at once, the source reads them in one call, and
the transformations are applied on the way up. What is not known ends the way down and is asked
record by record, which is the public path; the test suite runs its core with nothing known.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
    SLICE: lambda node, indices: np.array(
        [node._sliced_index(i) for i in indices.tolist()], np.int64
    ),
    REPEAT: lambda node, indices: (
        indices if node._reseed_each_epoch else indices % len(node.parents[0])
    ),
}


class ElementsOfParents(grain.MapDataset):
    """A dataset of ours, each of whose elements is an element of one of its parents.

    So the way down is known without a look at anything private.
    """

    @abstractmethod
    def below(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Where elements come from.

        Args:
            indices: int64[n].

        Returns:
            int64[n], of which parent each is, and int64[n], which of its elements.
        """


@dataclass(frozen=True)
class Route:
    """The way of some elements from where they are read, up to the dataset that was asked for.

    Attributes:
        origin: Where to read them.
        steps: From the bottom up, what is applied to the elements, and their indices there.
    """

    origin: _Origin | _Fork
    steps: tuple[tuple[Apply, np.ndarray], ...] = ()

    def part(self, start: int, stop: int) -> Route:
        """The way of some of the elements."""
        steps = tuple((apply, indices[start:stop]) for apply, indices in self.steps)
        return Route(self.origin.part(start, stop), steps)

    @property
    def reads_many(self) -> bool:
        """Whether one call reads several elements for less than as many calls would."""
        return self.origin.reads_many

    def read(self) -> list[Any]:
        """What is at the lower end.

        Raises:
            ValueError: A batched read gave more or fewer elements than it was asked for.
        """
        return self.origin.read()

    def finish(self, elements: list[Any]) -> list[Any]:
        """What becomes of it on the way up."""
        elements = self.origin.finish(elements)
        for apply, indices in self.steps:
            elements = apply(elements, indices.tolist())
        return elements


@dataclass(frozen=True)
class _Origin:
    """A dataset below which nothing is known, and the elements to read there.

    Attributes:
        ds: The dataset.
        indices: int64[n].
    """

    ds: grain.MapDataset
    indices: np.ndarray

    def part(self, start: int, stop: int) -> _Origin:
        return _Origin(self.ds, self.indices[start:stop])

    @property
    def reads_many(self) -> bool:
        return _batched_read(self.ds) is not None

    def read(self) -> list[Any]:
        indices = self.indices.tolist()
        batched_read = _batched_read(self.ds) or getattr(self.ds, "_getitems", None)
        if batched_read is None:
            return [self.ds[i] for i in indices]
        result = batched_read(indices) if indices else []
        elements = [] if isinstance(result, Mapping) else list(result)
        if len(elements) != len(indices):
            raise ValueError(
                f"the batched read of {self.ds} gave a {type(result).__name__} of"
                f" {len(result) if hasattr(result, '__len__') else len(elements)} for"
                f" {len(indices)} indices; it has to give a record for each, in their order"
            )
        return elements

    def finish(self, elements: list[Any]) -> list[Any]:
        return elements


@dataclass(frozen=True)
class _Fork:
    """Where the ways of elements part that come from several datasets.

    Attributes:
        places: For each of the datasets, int64[m]: which of the elements come from it, ascending.
        routes: The ways of these.
    """

    places: tuple[np.ndarray, ...]
    routes: tuple[Route, ...]

    @classmethod
    def at(cls, ds: ElementsOfParents, indices: np.ndarray) -> _Fork:
        parents, below = ds.below(indices)
        places = [np.flatnonzero(parents == i) for i in range(len(ds.parents))]
        ways = [route(parent, below[p]) for parent, p in zip(ds.parents, places, strict=True)]
        return cls(tuple(places), tuple(ways))

    def part(self, start: int, stop: int) -> _Fork:
        bounds = [np.searchsorted(places, [start, stop]) for places in self.places]
        return _Fork(
            tuple(p[a:b] - start for p, (a, b) in zip(self.places, bounds, strict=True)),
            tuple(way.part(a, b) for way, (a, b) in zip(self.routes, bounds, strict=True)),
        )

    @property
    def reads_many(self) -> bool:
        return any(way.reads_many for way in self.routes)

    def read(self) -> list[Any]:
        return self._in_order([way.read() for way in self.routes])

    def finish(self, elements: list[Any]) -> list[Any]:
        return self._in_order(
            [
                way.finish([elements[place] for place in places.tolist()])
                for places, way in zip(self.places, self.routes, strict=True)
            ]
        )

    def _in_order(self, of_routes: Sequence[list[Any]]) -> list[Any]:
        elements: list[Any] = [None] * sum(map(len, self.places))
        for places, some in zip(self.places, of_routes, strict=True):
            for place, element in zip(places.tolist(), some, strict=True):
                elements[place] = element
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
                break
            (ds,) = ds.parents
    except AttributeError:  # this Grain names its private parts otherwise
        pass
    fork = isinstance(ds, ElementsOfParents)
    origin = _Fork.at(ds, indices) if fork else _Origin(ds, indices)
    return Route(origin, tuple(reversed(steps)))


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
