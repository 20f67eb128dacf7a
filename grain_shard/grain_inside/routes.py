"""`Route`: reads many records of a Grain pipeline together, using private parts of Grain.

Grain evaluates one record at a time: it passes an index through all nodes down to the source, reads
the record, and applies the functions of the nodes. Here the indices of many records are passed down
together, and the source reads the records in one call. Then the functions are applied to each
record. If a node on the way down is unknown, Grain itself evaluates this node and all nodes below.
The core of the test suite also runs with all nodes unknown.

A function here keeps an error in a list, ``failures``, and not in a local variable. An error's
traceback refers to the frame of the function, so frame and error would otherwise keep each other in
memory until a garbage collection.
"""

from __future__ import annotations

import functools
import itertools
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.array_rows import ArrayRows
from grain_shard.grain_inside.index_shuffle import shuffled
from grain_shard.grain_inside.recovery import AT_ONCE, Recovery, Unreadable
from grain_shard.grain_inside.source_reads import BatchedRead, batched_read_of, single_read_of

Apply = Callable[..., Any]
# A function, and the index of each element if the function takes an index.
RouteStep = tuple[Apply, np.ndarray | None]

# Elements that were read. The rows of an `ArrayRows` are copied only when they are used.
Elements = list[Any] | ArrayRows

_SHUFFLE = type(grain.MapDataset.range(1).shuffle(seed=0))
_MIXTURES = (
    type(grain.MapDataset.mix([grain.MapDataset.range(1)])),
    type(grain.MapDataset.concatenate([grain.MapDataset.range(1)])),
)

# By type of node: returns the function that makes the node's element from the parent's element.
# Except for MAP, that function also takes the index of the element at the node.
_ELEMENTS: dict[type, Callable[[Any], Apply]] = {
    nodes.MAP: lambda node: node._map_element,
    nodes.RANDOM_MAP: lambda node: node._random_map_element,
    nodes.MAP_WITH_INDEX: lambda node: _of_index_first(node._map_with_index_fn),
}
# By type of node: turns indices of the node into indices of the node's parent.
_INDICES: dict[type | None, Callable[[Any, np.ndarray], np.ndarray]] = {
    nodes.SEED: lambda node, indices: indices,
    _SHUFFLE: lambda node, indices: _below_shuffle(node, indices),
    nodes.SLICE: lambda node, indices: _below_slice(node, indices),
    nodes.REINDEX: lambda node, indices: _below_slice(node, indices),
    nodes.REPEAT: lambda node, indices: (
        indices if node._reseed_each_epoch else indices % len(node.parents[0])
    ),
}


def _of_index_first(one: Callable[[int, Any], Any]) -> Apply:
    return lambda element, index: one(index, element)


class ElementsOfParents(grain.MapDataset):
    """A dataset of this package in which each element is an element of one of its parents.

    Mixtures and parts of a split are such datasets. Subclasses say which parent and which index an
    element comes from.
    """

    @abstractmethod
    def below(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the parent that each element comes from, and the element's index there.

        Args:
            indices: int64[n], indices of elements of this dataset.

        Returns:
            int64[n], the number of the parent of each element; and int64[n], the index in that
            parent.
        """


def below_mixture(
    ds: grain.MapDataset, indices: np.ndarray
) -> tuple[np.ndarray, np.ndarray] | None:
    """Returns the parent that each element of a mixture comes from, and the index there.

    Args:
        ds: Any dataset.
        indices: int64[n], indices of elements of `ds`.

    Returns:
        int64[n], the number of the parent of each element; and int64[n], the index in that parent.
        None if `ds` is not a known mixture or concatenation.
    """
    if isinstance(ds, ElementsOfParents):
        return ds.below(indices)
    choice = getattr(ds, "_selection_map", None) if type(ds) in _MIXTURES else None
    if choice is None:
        return None
    pairs = np.array([choice[i] for i in indices.tolist()], np.int64).reshape(-1, 2)
    return pairs[:, 0], pairs[:, 1]


@dataclass(frozen=True)
class Route:
    """The way to evaluate elements of a pipeline: read from a dataset, then apply functions.

    `read` reads the elements, and `finish` applies the functions. Both return an element for each
    index, or an `Unreadable` in place of an element that failed. They stop after an `Unreadable`,
    unless the recovery masks. A `Recovery` has the rules for failed reads and functions.

    Attributes:
        ds: The dataset to read: the source, or the first unknown node on the way to it.
        indices: int64[n], the indices of the elements in `ds`.
        steps: The functions to apply, in order. Each is a pair: the function, and int64[n], the
            indices of the elements at the function's node; None if the function takes no index.
    """

    ds: grain.MapDataset
    indices: np.ndarray
    steps: tuple[RouteStep, ...] = ()

    def part(self, start: int, stop: int) -> Route:
        """Returns a `Route` for only the elements from position `start` up to `stop`."""
        steps = [
            (apply, None if indices is None else indices[start:stop])
            for apply, indices in self.steps
        ]
        return Route(self.ds, self.indices[start:stop], tuple(steps))

    @property
    def reads_many(self) -> bool:
        """True if one call of the source for several elements costs less than several calls."""
        nothing = self.indices[:0]
        if below_mixture(self.ds, nothing) is not None:
            return any(route(parent, nothing).reads_many for parent in self.ds.parents)
        return batched_read_of(self.ds) is not None

    @property
    def runs_no_function(self) -> bool:
        """True if `read` runs no function of the user, so that `finish` runs all functions."""
        return type(self.ds) in (nodes.SOURCE, nodes.RANGE)

    def read(self, recovery: Recovery = AT_ONCE) -> Elements:
        """Reads the elements of `ds`, without applying the functions.

        Returns:
            The elements; only the first ones if a read failed.

        Raises:
            ValueError: A batched read returned more or fewer elements than it was asked for.
        """
        elements = self._elements(recovery, by_grain=len(self.indices) > 1)
        try:
            is_read = isinstance(elements, list | ArrayRows)
            return elements if is_read else _taken(elements, recovery)
        finally:
            del elements  # the traceback of an error among them refers to this frame

    def _elements(self, recovery: Recovery, *, by_grain: bool) -> Elements | Iterator[Any]:
        """Returns the elements of `ds`, without applying the functions.

        If one call can read all of them, they are read now. If not, the result is an iterator that
        reads one element at each ``next``.

        Args:
            recovery: The rules for failed reads.
            by_grain: True if Grain may evaluate all elements of an unknown node in one call.
        """
        if (mixed := below_mixture(self.ds, self.indices)) is not None:
            return self._of_mixture(*mixed, recovery)
        if (read := self._batched_read(by_grain=by_grain)) is None:
            return self._one_by_one(recovery)
        return self._many(read, self.indices, recovery) if len(self.indices) else []

    def _of_mixture(
        self, parents: np.ndarray, indices: np.ndarray, recovery: Recovery
    ) -> ArrayRows | Iterator[Any]:
        """Returns the elements of a mixture: a part from each parent, then merged in their order.

        Args:
            parents: int64[n], the number of the parent of each element.
            indices: int64[n], the index of each element in its parent.
            recovery: The rules for failed reads.
        """
        # `part_of` has the position in `used`, and so in `parts`, of each element's parent.
        used, part_of = np.unique(parents, return_inverse=True)
        ways = [route(self.ds.parents[i], indices[parents == i]) for i in used.tolist()]
        parts = [way.each(recovery) for way in ways]
        arrays = [part for part in parts if isinstance(part, ArrayRows)]
        if parts and len(arrays) == len(parts):
            return ArrayRows.merged(arrays, part_of)
        iterators = [iter(part) for part in parts]
        return (next(iterators[i]) for i in part_of.tolist())

    def _batched_read(self, *, by_grain: bool) -> BatchedRead | None:
        """Returns the function that reads many elements of `ds` in a call; None if there is none.

        If `by_grain` is True, it may be Grain's own function of an unknown node.
        """
        read = batched_read_of(self.ds)
        if read is None and by_grain and type(self.ds) is not nodes.SOURCE:
            getitems = getattr(self.ds, "_getitems", None)
            read = getitems and (lambda indices: getitems(indices.tolist()))
        return read

    def finish(self, elements: Elements, recovery: Recovery = AT_ONCE, start: int = 0) -> Elements:
        """Applies the functions of the route to elements that `read` returned.

        Args:
            elements: The elements.
            recovery: The rules for failed functions.
            start: Position of the first element among all elements of the route.

        Returns:
            The finished elements; only the first ones if a function failed.
        """
        if not self.steps:
            return elements
        return _taken(self._up(elements, recovery, start, start + len(elements)), recovery)

    def each(self, recovery: Recovery = AT_ONCE) -> Iterator[Any] | ArrayRows:
        """Returns the elements with the functions applied, each made only when it is asked for.

        But a source that reads many elements in a call reads all of them at once. Only the
        functions are then applied one element at a time.
        """
        elements = self._elements(recovery, by_grain=False)
        if isinstance(elements, ArrayRows) and not self.steps:
            return elements
        return self._up(_let_go(elements) if isinstance(elements, list) else elements, recovery)

    def _up(
        self, elements: Iterable[Any], recovery: Recovery, start: int = 0, stop: int | None = None
    ) -> Iterator[Any]:
        """Yields elements with the functions applied; `start` and `stop` are their positions."""
        steps = [
            (apply, None if indices is None else indices[start:stop].tolist())
            for apply, indices in self.steps
        ]
        failures: list[Exception] = []
        for i, element in enumerate(elements):
            try:
                if type(element) is not Unreadable:  # which stays as it is
                    for apply, indices in steps:
                        element = apply(element) if indices is None else apply(element, indices[i])
                yield element
                continue
            except Exception as error:
                failures.append(error)
            # Outside the except block, in which Python would chain each new error to this one.
            again = functools.partial(self._anew, start + i, recovery)
            yield recovery.recovered(failures.pop(), again, in_function=True)

    def _anew(self, i: int, recovery: Recovery) -> Any:
        """Reads element `i` again, and applies the functions to it.

        The element is read again because a function may have changed it in place.
        """
        way = self.part(i, i + 1)
        (element,) = way.read(recovery)
        if type(element) is not Unreadable:
            for apply, indices in way.steps:
                element = apply(element) if indices is None else apply(element, indices.item())
        return element

    def _many(self, read: BatchedRead, indices: np.ndarray, recovery: Recovery) -> Elements:
        """Reads elements in one call. If the call fails, searches for the element that failed.

        The error of a call does not name the element. So a failed call is replaced by two calls,
        each for half of the elements, until a call succeeds or asks for one element. For example,
        if element 5 of 8 fails: 0-7 fails, 0-3 succeeds, 4-7 fails, 4-5 fails, 4 succeeds, 5 fails.

        Returns:
            The elements, up to the first `Unreadable` unless the recovery masks. If smaller calls
            have read all elements, but the recovery does not let them repair the failed call, the
            result is one `Unreadable` for all elements.
        """
        failures: list[Exception] = []
        try:
            result = read(indices)
        except Exception as error:
            failures.append(error)
        else:
            return self._checked(result, indices)
        if len(indices) == 1:
            again = lambda: self._checked(read(indices), indices)[0]  # noqa: E731
            return [recovery.recovered(failures.pop(), again)]
        may_repair = recovery.may_repair(failures[0])
        half = len(indices) // 2
        found = [*self._many(read, indices[:half], recovery)]
        try:
            # Go on unless the first half ended early, or with a failure that is not masked.
            if len(found) == half and (recovery.masks or type(found[-1]) is not Unreadable):
                found += self._many(read, indices[half:], recovery)
            if not may_repair and type(found[-1]) is not Unreadable:  # both halves have succeeded
                return [Unreadable(failures.pop(), among=len(indices))]
            return found
        finally:
            failures.clear()  # the tracebacks of these errors refer to this frame
            del found

    def _checked(self, result: Any, indices: np.ndarray) -> Elements:
        """Returns the result of a batched read, if it has an element for each index."""
        is_sequence = hasattr(result, "__iter__") and not isinstance(result, Mapping)
        elements = result if is_sequence else []
        if not isinstance(elements, ArrayRows):
            elements = list(elements)
        if len(elements) != len(indices):
            raise ValueError(
                f"the batched read of {self.ds} returned a {type(result).__name__} of length"
                f" {len(result) if hasattr(result, '__len__') else len(elements)} for"
                f" {len(indices)} indices.\n  remedy: let the source's _getitems or __getitems__"
                " return one record per index, in the order of the indices."
            )
        return elements

    def _one_by_one(self, recovery: Recovery) -> Iterator[Any]:
        # Not a `map`, which a StopIteration of the user's code would end without an error.
        read_one = single_read_of(self.ds)
        failures: list[Exception] = []
        for index in self.indices.tolist():
            try:
                yield read_one(index)
                continue
            except Exception as error:
                failures.append(error)
            # Outside the except block, in which Python would chain each new error to this one.
            yield recovery.recovered(failures.pop(), functools.partial(read_one, index))


def _taken(elements: Iterable[Any], recovery: Recovery) -> list[Any]:
    """Returns the elements that an iterator yields.

    The list ends after the first `Unreadable`, unless the recovery masks. If the iterator raises an
    error, the list ends with an `Unreadable` that has the error. The error is raised instead if no
    element came before it, or if it is an interrupt.
    """
    taken: list[Any] = []
    try:
        for element in elements:
            taken.append(element)
            if type(element) is Unreadable and not recovery.masks:
                break
    except BaseException as error:
        is_main = threading.current_thread() is threading.main_thread()
        is_interrupt = is_main and not isinstance(error, Exception)  # such as Ctrl-C
        if is_interrupt or not taken:
            raise
        taken.append(Unreadable(error))
    return taken


def _let_go(elements: list[Any]) -> Iterator[Any]:
    """Yields the elements of a list, and removes each from the list, which frees its memory."""
    elements.reverse()
    while elements:
        yield elements.pop()


def read_together(ways: Sequence[Route], recovery: Recovery = AT_ONCE) -> list[Elements]:
    """Reads the elements of several routes with the same `ds`, in one call if the source can.

    Args:
        ways: The routes. Their functions are not applied.
        recovery: The rules for failed reads.

    Returns:
        The elements of each route. If a read failed, elements at the end are missing.
    """
    if len(ways) == 1:
        return [ways[0].read(recovery)]
    indices = np.concatenate([way.indices for way in ways])
    elements = Route(ways[0].ds, indices).read(recovery)
    stops = itertools.accumulate([len(way.indices) for way in ways], initial=0)
    return [elements[start:stop] for start, stop in itertools.pairwise(stops)]


def route(ds: grain.MapDataset, indices: np.ndarray) -> Route:
    """Returns the `Route` to elements of a dataset.

    It begins at the source or, if a node on the way to the source is unknown, at that node.

    Args:
        ds: Any dataset.
        indices: int64[n]; indices past the end are in later epochs, as in Grain.
    """
    steps: list[RouteStep] = []
    try:
        while True:
            kind = type(ds)
            if kind in _ELEMENTS:  # this node applies a function, without an index if it is MAP
                steps.append((_ELEMENTS[kind](ds), None if kind is nodes.MAP else indices))
            elif kind in _INDICES:  # this node only chooses elements of its parent
                indices = _INDICES[kind](ds, indices)
            elif isinstance(ds, ElementsOfParents) and len(ds.parents) == 1:
                indices = ds.below(indices)[1]
            else:
                break
            (ds,) = ds.parents
    # The route begins at a node that raises an error. AttributeError: this version of Grain lacks a
    # private name. OverflowError: an index of a late epoch of endless records exceeds 64 bits.
    except (AttributeError, OverflowError):
        pass
    return Route(ds, indices, tuple(reversed(steps)))


def source_of(ds: grain.MapDataset, index: int) -> tuple[Any, int] | None:
    """Finds the source of an element, and the element's index in it.

    Args:
        ds: Any dataset.
        index: The index in the dataset. Past the end, it is in a later epoch, as in Grain.

    Returns:
        The source, and the index in it. None if a node on the way to the source is unknown, or if
        the pipeline begins with something else, such as `grain.MapDataset.range`.
    """
    way = route(ds, np.array([index]))
    while (mixed := below_mixture(way.ds, way.indices)) is not None:
        parents, below = mixed
        way = route(way.ds.parents[parents.item()], below)
    if (source := source_in(way.ds)) is way.ds:
        return None
    return source, way.indices.item() % len(way.ds)


def source_in(ds: grain.MapDataset) -> Any:
    """Returns the source of a ``MapDataset.source(source)``; any other dataset itself."""
    return getattr(ds, "_source", ds) if type(ds) is nodes.SOURCE else ds


def _below_slice(node: Any, indices: np.ndarray) -> np.ndarray:
    below = nodes.index_below(node)
    return np.array([below(i) for i in indices.tolist()], dtype=np.int64)


def _below_shuffle(node: Any, indices: np.ndarray) -> np.ndarray:
    """Returns the indices below Grain's global shuffle, which has another seed in each epoch."""
    length = len(node.parents[0])
    epochs = indices // length
    below = np.empty_like(indices)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        seed = (node._seed + int(epoch)) % 2**32
        below[here] = shuffled(indices[here] - epoch * length, length, seed) + epoch * length
        # Two indices are compared with Grain's. If this version of Grain shuffles in another way,
        # hardly any index agrees, and Grain computes all of them.
        for i in np.flatnonzero(here)[[0, -1]]:
            if below[i] != node._shuffled_index(int(indices[i])):
                return np.array([node._shuffled_index(i) for i in indices.tolist()])
    return below
