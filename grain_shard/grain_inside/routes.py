"""Records of a Grain pipeline, many at a time: with `nodes`, all that looks at private parts.

Grain evaluates a record by a call down the pipeline and back, with a call into the source for each.
Here the indices of many records are taken down at once, the source reads them in one call, and
the transformations are applied on the way up. What is not known ends the way down and is asked
record by record, which is the public path; the test suite runs its core with nothing known.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside.index_shuffle import shuffled
from grain_shard.grain_inside.nodes import MAP, MAP_WITH_INDEX, RANDOM_MAP, REPEAT, SEED, SLICE

Apply = Callable[[Any, int], Any]

NEVER = float("inf")

_SOURCE = type(grain.MapDataset.source([0]))
_SHUFFLE = type(grain.MapDataset.range(1).shuffle(seed=0))

# From an element, and the index that it has at the node, to another element.
_ELEMENTS: dict[type, Callable[[Any], Apply]] = {
    MAP: lambda node: lambda element, index: node._map_element(element),
    RANDOM_MAP: lambda node: node._random_map_element,
    MAP_WITH_INDEX: lambda node: lambda element, index: node._map_with_index_fn(index, element),
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

    def read(self, until: float = NEVER) -> list[Any]:
        """What is at the lower end.

        Args:
            until: When to return what has been read one by one, at least an element, instead of
                reading on; by `time.perf_counter`.

        Raises:
            ValueError: A batched read gave more or fewer elements than it was asked for.
        """
        return self.origin.read(until)

    def finish(self, elements: Sequence[Any], until: float = NEVER) -> list[Any]:
        """What becomes of it on the way up; of the first few, at least one, if time is over."""
        return _while_time_lasts(until, self.finisher(), elements)

    def finisher(self) -> Callable[[int, Any], Any]:
        """What makes of each element, and its number, what becomes of it on the way up."""
        below = self.origin.finisher()
        steps = [(apply, indices.tolist()) for apply, indices in self.steps]

        def on_top(i: int, element: Any) -> Any:
            if below is not None:
                element = below(i, element)
            for apply, indices in steps:
                element = apply(element, indices[i])
            return element

        return on_top


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

    def joined(self, others: Sequence[Any]) -> _Origin:
        """The elements of this and of others of the same dataset."""
        return _Origin(self.ds, np.concatenate([self.indices, *(o.indices for o in others)]))

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def reads_many(self) -> bool:
        return _batched_read(self.ds) is not None

    def read(self, until: float) -> list[Any]:
        indices = self.indices.tolist()
        batched_read = _batched_read(self.ds)
        if batched_read is None and type(self.ds) is not _SOURCE and len(indices) > 1:
            batched_read = getattr(self.ds, "_getitems", None)
        if batched_read is None:
            return _while_time_lasts(until, lambda _, i: self.ds[i], indices)
        result = batched_read(indices) if indices else []
        elements = [] if isinstance(result, Mapping) else list(result)
        if len(elements) != len(indices):
            raise ValueError(
                f"the batched read of {self.ds} gave a {type(result).__name__} of"
                f" {len(result) if hasattr(result, '__len__') else len(elements)} for"
                f" {len(indices)} indices; it has to give a record for each, in their order"
            )
        return elements

    def finisher(self) -> None:
        return None


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

    def joined(self, others: Sequence[Any]) -> _Fork:
        forks = [self, *others]
        starts = np.cumsum([0, *map(len, forks[:-1])])
        moved = [
            [places + start for places in fork.places]
            for fork, start in zip(forks, starts, strict=True)
        ]
        routes = zip(*(fork.routes for fork in forks), strict=True)
        return _Fork(
            tuple(map(np.concatenate, zip(*moved, strict=True))),
            tuple(_joined(ways) for ways in routes),
        )

    def __len__(self) -> int:
        return sum(map(len, self.places))

    @property
    def reads_many(self) -> bool:
        return any(way.reads_many for way in self.routes)

    def read(self, until: float) -> list[Any]:
        if not self.reads_many:
            turns = sorted(
                (place, way, rank)
                for places, way in zip(self.places, range(len(self.routes)), strict=True)
                for rank, place in enumerate(places.tolist())
            )
            return _while_time_lasts(
                until,
                lambda _, turn: self.routes[turn[1]].part(turn[2], turn[2] + 1).read()[0],
                turns,
            )
        elements: list[Any] = [None] * len(self)
        for places, way in zip(self.places, self.routes, strict=True):
            for place, element in zip(places.tolist(), way.read(), strict=True):
                elements[place] = element
        return elements

    def finisher(self) -> Callable[[int, Any], Any]:
        finishers: list[Any] = [None] * len(self)
        for places, way in zip(self.places, self.routes, strict=True):
            finish = way.finisher()
            for rank, place in enumerate(places.tolist()):
                finishers[place] = (finish, rank)

        def on_top(i: int, element: Any) -> Any:
            finish, rank = finishers[i]
            return finish(rank, element)

        return on_top


def _while_time_lasts(
    until: float, one: Callable[[int, Any], Any], items: Iterable[Any]
) -> list[Any]:
    """One thing made of each item and its number, of the first item at least."""
    made = []
    for i, item in enumerate(items):
        made.append(one(i, item))
        if time.perf_counter() > until:
            break
    return made


def read_together(ways: Sequence[Route]) -> list[list[Any]]:
    """What is at the lower ends of several ways of one dataset, read in one call if it can be."""
    elements = _joined(ways).read()
    starts = np.cumsum([0, *(len(way.origin) for way in ways)]).tolist()
    return [elements[start:stop] for start, stop in itertools.pairwise(starts)]


def _joined(ways: Sequence[Route]) -> Route:
    """The way of all elements of several ways of one dataset, to read them."""
    return Route(ways[0].origin.joined([way.origin for way in ways[1:]]))


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
