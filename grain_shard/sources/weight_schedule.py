"""Finds the dataset that each record of a mixture comes from, if the mixture's weights change.

The mixed datasets are called components. While the weights stay the same, the components take turns
in a repeating pattern, which keeps each component less than one record away from its share. So a
division and a table lookup find the record at any index. All numbers are integers, so rounding
errors cannot add up.
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

# The longest pattern, in records. Weights that need a longer pattern are rounded to integers whose
# sum is about this number.
_MAX_PERIOD = 2**16

Weights = tuple[int, ...]  # the weights of one section as integers, in lowest terms


class WeightSchedule:
    """The weights of a mixture, which change at given records.

    Example:
        >>> schedule = WeightSchedule({0: [1, 1], 4: [0, 1]}, num_components=2)
        >>> components, records = schedule.locate(np.arange(7))
        >>> components, records
        (array([0, 1, 0, 1, 1, 1, 1]), array([0, 0, 1, 1, 2, 3, 4]))

    Args:
        weights: Maps a record of the mixture to the weight of each component from that record on.
            The first key is 0.
        num_components: Number of components, which are the mixed datasets.

    Raises:
        ShardingError: The keys or the values of `weights` are invalid.
    """

    def __init__(self, weights: Mapping[int, Sequence[Any]], num_components: int):
        require_steps(
            "the weights of a mixture",
            weights,
            "pass a dict such as {0: [3, 1], 100_000: [1, 1]}: weights 3 and 1 from record 0 on,"
            " equal weights from record 100,000 on.",
        )
        self._starts, self._sections = list(weights), list[_Section]()
        offsets = (0,) * num_components
        for start in self._starts:
            if self._sections:
                offsets = self._sections[-1].records_before(start)
            lowest = _in_lowest_terms(start, weights[start], num_components)
            self._sections.append(_Section(start, lowest, offsets))

    def __str__(self) -> str:
        return str({start: list(weights) for start, weights in self.weights})

    @property
    def weights(self) -> list[tuple[int, Weights]]:
        """Pairs of a record and the weights from it on, as integers in lowest terms."""
        return [(section.start, section.weights) for section in self._sections]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the component of each record, and the index of the record in that component.

        Args:
            indices: int64[n], indices in the mixture.

        Returns:
            int64[n], the number of the component; and int64[n], the index in the component.
        """
        components, records = np.empty_like(indices), np.empty_like(indices)
        sections = np.searchsorted(self._starts, indices, side="right") - 1
        for section in np.unique(sections):
            here = sections == section
            components[here], records[here] = self._sections[section].locate(indices[here])
        return components, records

    def length(self, lengths: Sequence[int]) -> int:
        """Returns the length of the mixture, which ends before the first record that is missing.

        Args:
            lengths: The number of records of each component.
        """

        def is_missing(index: int) -> bool:
            """Returns whether the components lack this record of the mixture, or one before it."""
            section = self._sections[np.searchsorted(self._starts, index, side="right") - 1]
            return any(map(operator.gt, section.records_before(index + 1), lengths))

        return bisect.bisect_left(range(sys.maxsize), True, key=is_missing)


@dataclass(frozen=True)
class _Section:
    """A part of the mixture in which the weights stay the same.

    Attributes:
        start: Index in the mixture of the first record of this part.
        weights: The weight of each component, as integers in lowest terms.
        offsets: Number of records of each component before this part.
    """

    start: int
    weights: Weights
    offsets: tuple[int, ...]

    def locate(self, indices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Does what `WeightSchedule.locate` does, for indices that are all in this part."""
        pattern, ranks = _pattern(self.weights)
        rounds, positions = divmod(indices - self.start, len(pattern))
        components = pattern[positions]
        records = np.take(self.offsets, components) + rounds * np.take(self.weights, components)
        return components, records + ranks[positions]

    def records_before(self, index: int) -> tuple[int, ...]:
        """Returns how many records of each component come before an index of the mixture."""
        pattern, _ = _pattern(self.weights)
        rounds, position = divmod(index - self.start, len(pattern))
        rest = np.bincount(pattern[:position], minlength=len(self.weights)).tolist()
        counts = zip(self.offsets, self.weights, rest, strict=True)
        return tuple(offset + rounds * weight + more for offset, weight, more in counts)


@functools.lru_cache(maxsize=64)
def _pattern(weights: Weights) -> tuple[np.ndarray, np.ndarray]:
    """Returns the repeating order in which components of given weights take turns.

    At any time, each component is less than one record away from its share. This is the "chairman
    assignment problem", solved after Tijdeman (Discrete Mathematics 32, 1980). With n components,
    each component is at most 1 - 1 / (2n - 2) records away from its share, which is the best
    possible bound. A component may take a turn once it is at least 1 / (2n - 2) records behind its
    share. If several components may take the next turn, it goes to the component that would be the
    first to fall too far behind.

    Returns:
        int64[period], the component of each turn; and int64[period], the number of earlier turns of
        that component in the same period.
    """
    used = [i for i, weight in enumerate(weights) if weight]
    period, scale = sum(weights), max(1, 2 * len(used) - 2)

    def turn(i: int, rank: int) -> tuple[int, int]:
        """Returns the first and the last position at which component `i` may take turn `rank`."""
        width = scale * weights[i]
        # -(-a // b) rounds the quotient up.
        earliest = -(-(rank * scale + 1) * period // width) - 1
        return earliest, ((rank + 1) * scale - 1) * period // width

    components, ranks = np.empty((2, period), np.int64)
    taken = [0] * len(weights)  # number of turns that each component has taken
    turns = {i: turn(i, 0) for i in used}  # the positions at which its next turn may come
    for position in range(period):
        _, i = min((latest, i) for i, (earliest, latest) in turns.items() if earliest <= position)
        components[position], ranks[position] = i, taken[i]
        taken[i] += 1
        turns[i] = turn(i, taken[i])
    return components, ranks


def _in_lowest_terms(start: int, weights: Sequence[Any], num_components: int) -> Weights:
    """Returns the weights as integers without a common factor.

    Raises:
        ShardingError: `weights` is not one number of at least 0 per component, or all are 0.
    """
    try:
        exact = [Fraction(str(weight)) for weight in weights]  # 0.7 is 7/10, not the nearest float
    except (TypeError, ValueError):
        exact = []
    # Text is refused, because "31" would count as the weights 3 and 1.
    if len(exact) != num_components or isinstance(weights, str) or min(exact) < 0 or not any(exact):
        raise ShardingError(
            f"the weights from record {start} on are {weights!r}, but must be {num_components}"
            " numbers of at least 0, and not all of them 0.",
            remedy=f"pass a list of {num_components} numbers, one for each dataset. A weight of 0"
            " pauses the dataset. Only the proportions matter.",
        )
    total = sum(exact)
    shares = [weight / total for weight in exact]
    period = math.lcm(*(share.denominator for share in shares))
    if period <= _MAX_PERIOD:
        return tuple(int(share * period) for share in shares)
    # Rounded, but not to 0: a component with a small weight must keep its turns.
    parts = [max(1, round(share * _MAX_PERIOD)) if share else 0 for share in shares]
    factor = math.gcd(*parts)
    return tuple(part // factor for part in parts)
