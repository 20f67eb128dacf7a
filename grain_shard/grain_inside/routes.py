"""Records of a Grain pipeline, many at a time: with `nodes`, all that looks at private parts.

Grain evaluates a record by a call down the pipeline and back, with a call into the source for each.
Here the indices of many records are taken down at once, the source reads them in one call, and
the transformations are applied on the way up. What is not known ends the way down and is asked
record by record, which is the public path; the test suite runs its core with nothing known.
"""

from __future__ import annotations

import functools
import itertools
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.index_shuffle import shuffled
from grain_shard.grain_inside.nodes import (
    MAP,
    MAP_WITH_INDEX,
    RANDOM_MAP,
    REINDEX,
    REPEAT,
    SEED,
    SLICE,
)
from grain_shard.grain_inside.recovery import RAISES, Recovery, Unreadable
from grain_shard.grain_inside.source_reads import (
    RANGE,
    SOURCE,
    BatchedRead,
    batched_read_of,
    single_read_of,
)

Apply = Callable[[Any, int], Any]

NEVER = float("inf")

_SHUFFLE = type(grain.MapDataset.range(1).shuffle(seed=0))

# From an element, and the index that it has at the node, to another element.
_ELEMENTS: dict[type, Callable[[Any], Apply]] = {
    MAP: lambda node: _of_element(node._map_element),
    RANDOM_MAP: lambda node: node._random_map_element,
    MAP_WITH_INDEX: lambda node: _of_index_first(node._map_with_index_fn),
}
# From indices above the node to indices below it.
_INDICES: dict[type | None, Callable[[Any, np.ndarray], np.ndarray]] = {
    SEED: lambda node, indices: indices,
    _SHUFFLE: lambda node, indices: _below_shuffle(node, indices),
    SLICE: lambda node, indices: _below_slice(node, indices),
    REINDEX: lambda node, indices: _below_slice(node, indices),
    REPEAT: lambda node, indices: (
        indices if node._reseed_each_epoch else indices % len(node.parents[0])
    ),
}


def _of_element(one: Callable[[Any], Any]) -> Apply:
    return lambda element, index: one(element)


def _of_index_first(one: Callable[[int, Any], Any]) -> Apply:
    return lambda element, index: one(index, element)


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

    @property
    def only_asks_sources(self) -> bool:
        """Whether `read` runs nothing of the user's but sources."""
        return self.origin.only_asks_sources

    @property
    def runs_no_function(self) -> bool:
        """Whether `read` asks sources, or counts a range: `finish` then runs all functions."""
        return self.origin.runs_no_function

    def read(self, until: float = NEVER, recovery: Recovery = RAISES) -> list[Any]:
        """What is at the lower end.

        Args:
            until: When to return what has been read one by one, at least an element, instead of
                reading on; by `time.perf_counter`.
            recovery: What becomes of elements that cannot be read.

        Raises:
            ValueError: A batched read gave more or fewer elements than it was asked for.
        """
        return self.origin.read(until, recovery)

    def finish(
        self, elements: Sequence[Any], until: float = NEVER, recovery: Recovery = RAISES
    ) -> list[Any]:
        """What becomes of it on the way up; of the first few, at least one, if time is over."""
        finished = self.origin.finish(elements, recovery)
        return _while_time_lasts(until, self._up(finished, recovery))

    def each(self, recovery: Recovery = RAISES) -> Iterator[Any]:
        """The elements on top, each made when it is asked for.

        What a source reads in one call for all of them is read with the first.
        """
        return self._up(self.origin.each(recovery), recovery)

    def _up(self, elements: Iterable[Any], recovery: Recovery) -> Iterator[Any]:
        steps = [(apply, indices.tolist()) for apply, indices in self.steps]
        leaves_out = recovery.leaves_out
        for i, element in enumerate(elements):
            if leaves_out and type(element) is Unreadable:
                yield element
                continue
            try:
                for apply, indices in steps:
                    element = apply(element, indices[i])
            except Exception as error:
                failure = error
            else:
                yield element
                continue
            yield recovery.of_function(failure, functools.partial(self._anew, i, recovery))
            del failure  # its traceback refers to this frame

    def _anew(self, i: int, recovery: Recovery) -> Any:
        """An element that is read once more, as a function may have changed the one that it got."""
        way = self.part(i, i + 1)
        (element,) = way.origin.finish(way.origin.read(NEVER, recovery), recovery)
        if type(element) is not Unreadable:
            for apply, indices in way.steps:
                element = apply(element, indices.item())
        return element


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
    def size(self) -> int:
        return len(self.indices)

    def joined(self, others: Sequence[_Origin]) -> _Origin:
        """With the elements of others, of the same dataset."""
        return _Origin(self.ds, np.concatenate([self.indices, *(o.indices for o in others)]))

    @property
    def reads_many(self) -> bool:
        return batched_read_of(self.ds) is not None

    @property
    def only_asks_sources(self) -> bool:
        return type(self.ds) is SOURCE

    @property
    def runs_no_function(self) -> bool:
        return type(self.ds) in (SOURCE, RANGE)

    def read(self, until: float, recovery: Recovery) -> list[Any]:
        indices = self.indices.tolist()
        batched_read = batched_read_of(self.ds)
        if batched_read is None and type(self.ds) is not SOURCE and len(indices) > 1:
            batched_read = getattr(self.ds, "_getitems", None)
        if batched_read is None:
            return _while_time_lasts(until, self._one_by_one(recovery))
        return self._many(batched_read, indices, recovery) if indices else []

    def _many(self, batched_read: BatchedRead, indices: list[int], recovery: Recovery) -> list[Any]:
        """In one call; or if that fails, and it may help, in calls for ever fewer.

        A call for many elements does not say for which of them it has failed.
        """
        try:
            result = batched_read(indices)
        except Exception as error:
            failure = error
        else:
            return self._checked(result, indices)
        if len(indices) == 1:
            return [
                recovery.of_source(
                    failure, lambda: self._checked(batched_read(indices), indices)[0]
                )
            ]
        if not recovery.asks_at_once(failure):
            raise failure
        del failure
        half = len(indices) // 2
        return [
            *self._many(batched_read, indices[:half], recovery),
            *self._many(batched_read, indices[half:], recovery),
        ]

    def _checked(self, result: Any, indices: list[int]) -> list[Any]:
        elements = [] if isinstance(result, Mapping) else list(result)
        if len(elements) != len(indices):
            raise ValueError(
                f"the batched read of {self.ds} gave a {type(result).__name__} of"
                f" {len(result) if hasattr(result, '__len__') else len(elements)} for"
                f" {len(indices)} indices; it has to give a record for each, in their order"
            )
        return elements

    def finish(self, elements: Sequence[Any], recovery: Recovery) -> Sequence[Any]:
        return elements

    def each(self, recovery: Recovery) -> Iterator[Any]:
        if not self.reads_many:
            yield from self._one_by_one(recovery)
            return
        elements = self.read(NEVER, recovery)
        for i, element in enumerate(elements):
            elements[i] = None  # it is held no longer than it is used
            yield element

    def _one_by_one(self, recovery: Recovery) -> Iterator[Any]:
        # Not by `map`, which a StopIteration of the user's would end in silence.
        read_one = single_read_of(self.ds)
        for index in self.indices.tolist():
            try:
                element = read_one(index)
            except Exception as error:
                failure = error
            else:
                yield element
                continue
            # Not where it is handled, or each try would tell of those before it.
            yield recovery.of_source(failure, functools.partial(read_one, index))
            del failure  # its traceback refers to this frame


@dataclass(frozen=True)
class _Fork:
    """Where the ways of elements part that come from several datasets.

    Attributes:
        numbers: For each of the datasets, int64[m]: which of the elements come from it, ascending.
        routes: The ways of these.
    """

    numbers: tuple[np.ndarray, ...]
    routes: tuple[Route, ...]

    @classmethod
    def at(cls, ds: ElementsOfParents, indices: np.ndarray) -> _Fork:
        parents, below = ds.below(indices)
        numbers = [np.flatnonzero(parents == i) for i in range(len(ds.parents))]
        ways = [route(parent, below[n]) for parent, n in zip(ds.parents, numbers, strict=True)]
        return cls(tuple(numbers), tuple(ways))

    def part(self, start: int, stop: int) -> _Fork:
        bounds = [np.searchsorted(numbers, [start, stop]) for numbers in self.numbers]
        return _Fork(
            tuple(n[a:b] - start for n, (a, b) in zip(self.numbers, bounds, strict=True)),
            tuple(way.part(a, b) for way, (a, b) in zip(self.routes, bounds, strict=True)),
        )

    @property
    def size(self) -> int:
        return sum(map(len, self.numbers))

    def joined(self, others: Sequence[_Fork]) -> _Fork:
        """With the elements of others, of the same datasets."""
        forks = [self, *others]
        starts = np.cumsum([0, *(fork.size for fork in forks)])
        numbers = zip(*(
            [n + start for n in fork.numbers] for fork, start in zip(forks, starts, strict=False)
        ), strict=True)  # fmt: skip
        ways = zip(*(fork.routes for fork in forks), strict=True)
        return _Fork(tuple(map(np.concatenate, numbers)), tuple(map(_joined, ways)))

    @property
    def reads_many(self) -> bool:
        return any(way.reads_many for way in self.routes)

    @property
    def only_asks_sources(self) -> bool:
        return all(way.only_asks_sources for way in self.routes)

    @property
    def runs_no_function(self) -> bool:
        return all(way.runs_no_function for way in self.routes)

    def read(self, until: float, recovery: Recovery) -> list[Any]:
        # All of them: those that there was no time for might stand before others that were read.
        return self._in_order([way.read(NEVER, recovery) for way in self.routes])

    def finish(self, elements: Sequence[Any], recovery: Recovery) -> Sequence[Any]:
        return self._in_order(
            [
                way.finish([elements[i] for i in numbers.tolist()], NEVER, recovery)
                for numbers, way in zip(self.numbers, self.routes, strict=True)
            ]
        )

    def each(self, recovery: Recovery) -> Iterator[Any]:
        of_routes = [way.each(recovery) for way in self.routes]
        owners = np.empty(self.size, np.int64)
        for owner, numbers in enumerate(self.numbers):
            owners[numbers] = owner
        return (next(of_routes[owner]) for owner in owners.tolist())

    def _in_order(self, of_routes: Sequence[list[Any]]) -> list[Any]:
        elements: list[Any] = [None] * self.size
        for numbers, some in zip(self.numbers, of_routes, strict=True):
            for i, element in zip(numbers.tolist(), some, strict=True):
                elements[i] = element
        return elements


def _while_time_lasts(until: float, elements: Iterable[Any]) -> list[Any]:
    """What is made before a time, by `time.perf_counter`; the first element at least."""
    made = []
    for element in elements:
        made.append(element)
        if time.perf_counter() > until:
            break
    return made


def _joined(ways: Sequence[Route]) -> Route:
    """The way of the elements of several ways of one dataset."""
    first, *others = ways
    steps = [
        (apply, np.concatenate([indices, *(way.steps[i][1] for way in others)]))
        for i, (apply, indices) in enumerate(first.steps)
    ]
    return Route(first.origin.joined([way.origin for way in others]), tuple(steps))  # pyright: ignore[reportArgumentType]


def read_together(ways: Sequence[Route], recovery: Recovery = RAISES) -> list[list[Any]]:
    """What is at the lower ends of several ways of one dataset, read in one call if it can be."""
    first, *others = [way.origin for way in ways]
    elements = first.joined(others).read(NEVER, recovery)  # pyright: ignore[reportArgumentType]
    starts = np.cumsum([0, *(origin.size for origin in (first, *others))]).tolist()
    return [elements[start:stop] for start, stop in itertools.pairwise(starts)]


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


def source_of(ds: grain.MapDataset, index: int) -> tuple[Any, int] | None:
    """The source that an element is read from, and its index there.

    Args:
        ds: Any dataset.
        index: As for `route`.

    Returns:
        None if the way there is not known, or ends at something that is no source.
    """
    origin = route(ds, np.array([index])).origin
    while isinstance(origin, _Fork):
        (origin,) = (way.origin for way in origin.routes if way.origin.size)
    source = getattr(origin.ds, "_source", None) if type(origin.ds) is SOURCE else None
    return None if source is None else (source, origin.indices.item() % len(origin.ds))


def _below_slice(node: Any, indices: np.ndarray) -> np.ndarray:
    below = nodes.index_below_slice(node)
    return np.array([below(i) for i in indices.tolist()], dtype=np.int64)


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
