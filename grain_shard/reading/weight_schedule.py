"""Finds the component from which each record of a mixture comes, with weights that change.

For one stage of constant weights a pattern is computed, in which no component is ever a whole
record away from its share, and which then repeats. So a record is found by a division and a look
into a table, however far it is. All numbers are integers, so nothing drifts.
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

# A pattern is at most about as long. Weights that need a longer one are rounded to such parts.
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
        weights: From the record at which they begin to hold, of the mixture, to the weight of each
            component. The first record is 0.
        num_components: Number of components.

    Raises:
        ShardingError: The records or the weights cannot be.
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
        """The weights, each with the record at which they begin, as integers in lowest terms."""
        return [(stage.start, stage.parts) for stage in self._stages]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The components of many records, and which of their records these are.

        Args:
            indices: int64[n], records of the mixture.

        Returns:
            Two of int64[n].
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
        """Returns how many records come before a component would have to give one that it lacks.

        Args:
            lengths: The number of records of each component.
        """
        return min(itertools.starmap(self._place_of, enumerate(lengths)))

    def _place_of(self, component: int, record: int) -> int:
        """The index of a component's record in the mixture; `sys.maxsize` if it is not there."""
        stops = [*self._starts[1:], sys.maxsize]
        for stage, stop in zip(self._stages, stops, strict=True):
            if stage.parts[component]:
                place = stage.place_of(component, record)
                if place < stop:
                    return place
        return sys.maxsize


@dataclass(frozen=True)
class _Stage:
    """A part of the mixture in which the weights stay as they are.

    Attributes:
        start: Its first record.
        parts: The weights.
        offsets: How many records of each component come before.
    """

    start: int
    parts: Parts
    offsets: tuple[int, ...]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the components of records of the mixture, and the records of these."""
        pattern, ranks = _pattern(self.parts)
        rounds, places = divmod(indices - self.start, len(pattern))
        components = pattern[places]
        records = np.take(self.offsets, components) + rounds * np.take(self.parts, components)
        return components, records + ranks[places]

    def records_before(self, index: int) -> tuple[int, ...]:
        """Returns how many records of each component come before a record of the mixture."""
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
    """An order, which repeats, in which no component is ever a whole record away from its share.

    That is the "chairman assignment problem", and this is Tijdeman's solution of it (Discrete
    Mathematics 32, 1980): of n components each is at most 1 - 1 / (2n - 2) records away, which is
    the best there can be. A component may take its next turn once it is at least 1 / (2n - 2)
    behind. The next turn goes to the one among them that would be the first to fall too far behind.

    Returns:
        int64[period], the component of each turn; and int64[period], the number of turns that it
        had before in this round.
    """
    used = [i for i, part in enumerate(parts) if part]
    period, scale = sum(parts), max(1, 2 * len(used) - 2)

    def turn(i: int, rank: int) -> tuple[int, int]:
        """The places from which a component may take its turn, and by which it must."""
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
    """The weights as integers without a common factor."""
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
            exact.append(Fraction(str(weight)))  # 0.7 is 7/10, not the float that is nearest to it
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
