"""Finds the component of each record of a mixture whose weights change.

For each stage of constant weights a repeating pattern is computed, in which each component is
always less than one record away from its share. So a record is found by a division and a table
lookup, at any index. All numbers are integers, so rounding errors cannot add up.
"""

from __future__ import annotations

import bisect
import functools
import math
import operator
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np

from grain_shard.errors import ShardingError, require_steps

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
        require_steps(
            "the weights of a mixture",
            weights,
            "pass a dict from records to the weights from there on: {0: [3, 1], 100_000: [1, 1]}.",
        )
        starts = list(weights)
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
        """Returns the component of each of many records, and the record's index in it.

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

    def length(self, lengths: Sequence[int]) -> int:
        """Returns the number of records before the first one that a component lacks.

        Args:
            lengths: The number of records of each component.
        """

        def is_lacking(index: int) -> bool:
            """Returns whether a component lacks a record that comes up to this one."""
            stage = self._stages[np.searchsorted(self._starts, index, side="right") - 1]
            return any(map(operator.gt, stage.records_before(index + 1), lengths))

        return bisect.bisect_left(range(sys.maxsize), True, key=is_lacking)


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
        """Returns the component of each record of the mixture, and the record's index in it."""
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
    try:
        exact = [Fraction(str(weight)) for weight in weights]  # 0.7 is 7/10, not the nearest float
    except (TypeError, ValueError):
        exact = []
    if len(exact) != num_components or isinstance(weights, str) or min(exact) < 0 or not any(exact):
        raise ShardingError(
            f"the weights from record {start} on are {weights!r}.",
            remedy=f"pass a list of {num_components} numbers, one for each dataset: at least 0,"
            " for a dataset that pauses, and not all 0. Only their proportions matter.",
        )
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    parts = [max(1, round(share * _MAX_PERIOD)) if share else 0 for share in shares]
    factor = math.gcd(*parts)
    return tuple(part // factor for part in parts)
