"""Finds the component of each record of a mixture whose weights change.

For each stage of constant weights a repeating pattern is computed, in which each component is
always less than one record away from its share. So a record is found by a division and a table
lookup, at any index. All numbers are integers, so rounding errors cannot add up.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from grain_shard.errors import ShardingError

# The approximate longest pattern. Weights that need a longer one are rounded to this many parts.
_MAX_PERIOD = 2**16

Parts = tuple[int, ...]  # the weights of one stage as integers, in lowest terms


class WeightSchedule:
    """Weights that change at given records.

    Example:
        >>> schedule = WeightSchedule({0: [1, 1], 4: [0, 1]}, num_components=2)
        >>> components, records = schedule.locate(np.arange(7))
        >>> components, records
        (array([0, 1, 0, 1, 1, 1, 1]), array([0, 0, 1, 1, 2, 3, 4]))

    Args:
        weights: Maps a record of the mixture to the weight of each component from that record on.
            The first record is 0.
        num_components: Number of components.

    Raises:
        ShardingError: The records or the weights are invalid.
    """

    def __init__(self, weights: Mapping[int, Sequence[Any]], num_components: int):
        starts = _checked_starts(weights)
        offsets = (0,) * num_components
        stages = []
        for start, stop in zip(starts, [*starts[1:], None], strict=True):
            stages.append(_Stage(start, _parts(start, weights[start], num_components), offsets))
            if stop is not None:
                offsets = stages[-1].records_before(stop)
        self._starts, self._stages = starts, tuple(stages)

    def __str__(self) -> str:
        return str({start: list(parts) for start, parts in self.weights})

    @property
    def weights(self) -> list[tuple[int, Parts]]:
        """Returns the weights as integers in lowest terms, each with its first record."""
        return [(stage.start, stage.parts) for stage in self._stages]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the components of many records, and the records' indices in them.

        Args:
            indices: int64[n], records of the mixture.

        Returns:
            int64[n], the components; and int64[n], the indices in the components.
        """
        components, records = np.empty_like(indices), np.empty_like(indices)
        stages = np.searchsorted(self._starts, indices, side="right") - 1
        for stage in np.unique(stages):
            here = stages == stage
            components[here], records[here] = self._stages[stage].locate(indices[here])
        return components, records

    def uses(self, component: int) -> bool:
        """Returns whether any record comes from a component."""
        return any(stage.parts[component] for stage in self._stages)

    def length(self, lengths: Sequence[int]) -> int:
        """Returns the number of records before the first one that a component lacks.

        Args:
            lengths: The number of records of each component.
        """
        return min(itertools.starmap(self._place_of, enumerate(lengths)))

    def _place_of(self, component: int, record: int) -> int:
        """Returns the mixture's index of a component's record; `sys.maxsize` if it has none."""
        stops = [*self._starts[1:], sys.maxsize]
        for stage, stop in zip(self._stages, stops, strict=True):
            if stage.parts[component]:
                place = stage.place_of(component, record)
                if place < stop:
                    return place
        return sys.maxsize


@dataclass(frozen=True)
class _Stage:
    """A part of the mixture with constant weights.

    Attributes:
        start: Its first record.
        parts: The weights.
        offsets: Number of records of each component before this stage.
    """

    start: int
    parts: Parts
    offsets: tuple[int, ...]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the components of records of the mixture, and the indices in them."""
        pattern, ranks = _pattern(self.parts)
        rounds, places = divmod(indices - self.start, len(pattern))
        components = pattern[places]
        records = np.take(self.offsets, components) + rounds * np.take(self.parts, components)
        return components, records + ranks[places]

    def records_before(self, index: int) -> tuple[int, ...]:
        """Returns the number of records of each component before a record of the mixture."""
        pattern, _ = _pattern(self.parts)
        rounds, place = divmod(index - self.start, len(pattern))
        rest = np.bincount(pattern[:place], minlength=len(self.parts)).tolist()
        counts = zip(self.offsets, self.parts, rest, strict=True)
        return tuple(offset + rounds * part + more for offset, part, more in counts)

    def place_of(self, component: int, record: int) -> int:
        """Returns the index of a component's record in the mixture if this stage never ended."""
        pattern, _ = _pattern(self.parts)
        rounds, rank = divmod(record - self.offsets[component], self.parts[component])
        place = np.flatnonzero(pattern == component)[rank]
        return self.start + rounds * len(pattern) + int(place)


@functools.lru_cache(maxsize=64)
def _pattern(parts: Parts) -> tuple[np.ndarray, np.ndarray]:
    """Returns a repeating order in which each component is within one record of its share.

    This is the "chairman assignment problem", solved after Tijdeman (Discrete Mathematics 32,
    1980): with n components each is at most 1 - 1 / (2n - 2) records away from its share, which is
    the best possible bound. A component may take its next turn once it is at least 1 / (2n - 2)
    behind. The next turn goes to the one of these components that would be the first to fall too
    far behind.

    Returns:
        int64[period], the component of each turn; and int64[period], the number of earlier turns of
        that component in this round.
    """
    used = [i for i, part in enumerate(parts) if part]
    period, scale = sum(parts), max(1, 2 * len(used) - 2)

    def turn(i: int, rank: int) -> tuple[int, int]:
        """Returns the first place at which a component may take its turn, and the last one."""
        width = scale * parts[i]
        earliest = -(-(rank * scale + 1) * period // width) - 1
        return earliest, ((rank + 1) * scale - 1) * period // width

    components, ranks = np.empty((2, period), np.int64)
    taken = [0] * len(parts)
    turns = {i: turn(i, 0) for i in used}
    for place in range(period):
        _, i = min((latest, i) for i, (earliest, latest) in turns.items() if earliest <= place)
        components[place], ranks[place] = i, taken[i]
        taken[i] += 1
        turns[i] = turn(i, taken[i])
    return components, ranks


def _parts(start: int, weights: Sequence[Any], num_components: int) -> Parts:
    """Returns the weights as integers without a common factor."""
    where = f"the weights from record {start} on"
    if isinstance(weights, str) or not hasattr(weights, "__len__"):
        raise ShardingError(
            f"{where} are {weights!r}.", remedy="pass a list with a weight for each dataset."
        )
    if len(weights) != num_components:
        raise ShardingError(
            f"{where} are {len(weights)}, {list(weights)}, and the datasets are {num_components}.",
            remedy="pass a weight for each dataset, 0 for one that is to pause.",
        )
    exact = []
    for weight in weights:
        try:
            exact.append(Fraction(str(weight)))  # 0.7 is 7/10, not the nearest float
        except ValueError:
            exact.append(Fraction(-1))
        if exact[-1] < 0:
            raise ShardingError(
                f"{where} are {list(weights)}, and {weight!r} is no number of at least 0.",
                remedy="pass numbers; only their proportions matter.",
            )
    total = sum(exact)
    if not total:
        raise ShardingError(
            f"{where} are all 0.", remedy="give at least one dataset a weight above 0."
        )
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    parts = [max(1, round(share * _MAX_PERIOD)) if share else 0 for share in shares]
    factor = math.gcd(*parts)
    return tuple(part // factor for part in parts)


def _checked_starts(weights: Mapping[int, Any]) -> list[int]:
    remedy = (
        "pass a dict from records, the first of them 0 and each larger than the one before, to the"
        " weights that hold from there on: {0: [3, 1], 100_000: [1, 1]}."
    )
    if not isinstance(weights, Mapping) or not weights:
        raise ShardingError(f"{weights!r} does not say which weights hold when.", remedy=remedy)
    starts = list(weights)
    if not all(type(start) is int for start in starts):
        raise ShardingError(
            f"the weights change at {starts}, and not all of these are whole numbers.",
            remedy=remedy,
        )
    if starts[0] != 0 or any(b <= a for a, b in itertools.pairwise(starts)):
        raise ShardingError(f"the weights change at records {starts}.", remedy=remedy)
    return starts
