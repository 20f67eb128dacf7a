"""Records of a Grain pipeline, many at a time: with `nodes`, all that looks at private parts.

Grain evaluates a record by a call down the pipeline and back, with a call into the source for each.
Here the indices of many records are taken down at once, the source reads them in one call, and
the transformations are applied on the way up. What is not known ends the way down and is asked
record by record, which is the public path; the test suite runs its core with nothing known.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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

    def read(self, until: float = NEVER) -> list[Any]:
        """What is at the lower end.

        Args:
            until: When to return what has been read one by one, at least an element, instead of
                reading on; by `time.perf_counter`.

        Raises:
            ValueError: A batched read gave more or fewer elements than it was asked for.
        """
        indices = self.indices.tolist()
        batched_read = _batched_read(self.origin)
        if batched_read is None and type(self.origin) is not _SOURCE and len(indices) > 1:
            batched_read = getattr(self.origin, "_getitems", None)
        if batched_read is None:
            read_one = _single_read(self.origin)
            return _while_time_lasts(until, lambda _, index: read_one(index), indices)
        result = batched_read(indices)
        elements = [] if isinstance(result, Mapping) else list(result)
        if len(elements) != len(indices):
            raise ValueError(
                f"the batched read of {self.origin} gave a {type(result).__name__} of"
                f" {len(result) if hasattr(result, '__len__') else len(elements)} for"
                f" {len(indices)} indices; it has to give a record for each, in their order"
            )
        return elements

    def finish(self, elements: Sequence[Any], until: float = NEVER) -> list[Any]:
        """What becomes of it on the way up; of the first few, at least one, if time is over."""
        steps = [(apply, indices.tolist()) for apply, indices in self.steps]

        def on_top(i: int, element: Any) -> Any:
            for apply, indices in steps:
                element = apply(element, indices[i])
            return element

        return _while_time_lasts(until, on_top, elements)

    def each(self) -> Iterator[Any]:
        """The elements on top, each made when it is asked for.

        What a source reads in one call for all of them is read with the first.
        """
        read, read_one = self.read() if self.reads_many else None, _single_read(self.origin)
        steps = [(apply, indices.tolist()) for apply, indices in self.steps]
        for i, index in enumerate(self.indices.tolist()):
            if read is None:
                element = read_one(index)
            else:
                element, read[i] = read[i], None  # it is held no longer than it is used
            for apply, indices in steps:
                element = apply(element, indices[i])
            yield element


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
    joined = replace(ways[0], indices=np.concatenate([way.indices for way in ways]), steps=())
    elements, starts = joined.read(), np.cumsum([0, *(len(way.indices) for way in ways)]).tolist()
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
                return Route(ds, indices, tuple(reversed(steps)))
            (ds,) = ds.parents
    except AttributeError:  # this Grain names its private parts otherwise
        return Route(ds, indices, tuple(reversed(steps)))


def _single_read(ds: grain.MapDataset) -> Callable[[int], Any]:
    """How one element is read; a source is asked directly, as for many elements."""
    if type(ds) is _SOURCE and (source := getattr(ds, "_source", None)) is not None:
        length = len(ds)
        return lambda index: source[index % length]
    return ds.__getitem__


def _batched_read(ds: grain.MapDataset) -> Callable[[Sequence[int]], Sequence[Any]] | None:
    """How a source reads many records in one call, under Grain's name for that or Python's.

    Asked directly: Grain's node measures each record that passes, for 2 us and more.
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
