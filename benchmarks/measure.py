"""Measures several sides in turn, round after round, and compares their figures.

A *side* is a function that does its work once, from a fresh start, and returns one figure, such as
records per second. A *round* runs every side once, so that other work of the machine affects all
sides. A *comparison* takes the figures of two sides from each round and makes one value of them,
such as their ratio. Its result is the median of these values, with quartiles. This module does not
use JAX.
"""

from __future__ import annotations

import gc
import statistics
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

COMPARED: dict[str, Callable[[float, float], float]] = {
    "ours / theirs": lambda ours, theirs: ours / theirs,
    "theirs / ours": lambda ours, theirs: theirs / ours,
    "ours - theirs": lambda ours, theirs: ours - theirs,
    "ours": lambda ours, theirs: ours,
}


class Skip(Exception):
    """Raised by a side that cannot be measured on this machine. The message has the reason."""


Round = Mapping[str, "float | Skip"]


@dataclass(frozen=True)
class Run:
    """The options of a run.

    Attributes:
        quick: True to run fewer rounds with less work.
        folder: Folder for data, which is removed at the end.
    """

    quick: bool
    folder: Path

    def rounds(self, quick: int, full: int) -> int:
        return quick if self.quick else full


@dataclass(frozen=True)
class Goal:
    relation: Literal["at least", "at most", "exactly"]
    value: float

    def met(self, measured: float) -> bool:
        if self.relation == "exactly":
            return measured == self.value
        return measured >= self.value if self.relation == "at least" else measured <= self.value


@dataclass(frozen=True)
class Comparison:
    """Two sides, the way to compare them, and the goal.

    Attributes:
        number: Number of the goal, such as P1; "" for a comparison without a goal.
        what: Words that distinguish the comparison in its group. (The title of the group says what
            is measured.)
        against: Words for the other side; "" if our side is measured alone.
        unit: Unit of the figures of both sides.
        ours: Name of our side.
        theirs: Name of the other side.
        compared: The way in which two figures become one value, a key of `COMPARED`.
        compared_unit: Unit of this value: "x" for a ratio.
        goal: Goal for the median of the values; None for no goal.
    """

    number: str
    what: str
    against: str
    unit: str
    ours: str
    theirs: str
    compared: str
    compared_unit: str = "x"
    goal: Goal | None = None


def alone(number: str, what: str, unit: str, side: str, goal: Goal | None) -> Comparison:
    """Returns a `Comparison` of our side alone, whose figures are only compared with their goal."""
    return Comparison(number, what, "", unit, side, side, "ours", compared_unit=unit, goal=goal)


@dataclass(frozen=True)
class Group:
    """Comparisons that are made from the same rounds.

    Attributes:
        name: Name of the group on the command line.
        title: Title of the group in RESULTS.md.
        measure: Function that yields the figures of each round, by the name of the side.
        comparisons: The comparisons.
    """

    name: str
    title: str
    measure: Callable[[Run], Iterable[Round]]
    comparisons: Sequence[Comparison]


@dataclass(frozen=True)
class Result:
    """The figures of a comparison, one for each round.

    If a side could not be measured, there are no figures, and `skipped` has the reason.
    """

    comparison: Comparison
    ours: Sequence[float]
    theirs: Sequence[float]
    skipped: str | None = None

    @property
    def values(self) -> list[float]:
        compare = COMPARED[self.comparison.compared]
        return [compare(*pair) for pair in zip(self.ours, self.theirs, strict=True)]

    @property
    def met(self) -> bool | None:
        """True if the median of the values meets the goal; None without a goal or a value."""
        if self.comparison.goal is None or not self.values:
            return None
        return self.comparison.goal.met(statistics.median(self.values))


def interleave(
    sides: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: bool = True
) -> Iterator[Round]:
    """Runs all sides in turn, and yields the figures of each round by side.

    A side that raises is not run again; its figure is a `Skip` from then on. All other sides go on.

    Args:
        sides: The sides, by name.
        rounds: Number of rounds to yield.
        warm_up: True to run one more round first, which is not yielded.
    """
    skipped: dict[str, Skip] = {}
    for number in range(-1 if warm_up else 0, rounds):
        figures: dict[str, float | Skip] = {}
        for name, side in sides.items():
            if name not in skipped:
                gc.collect()  # otherwise this side might have to collect garbage of the last one
                try:
                    figures[name] = side()
                except Skip as skip:
                    skipped[name] = skip
                except Exception as error:
                    skipped[name] = failed(name, error)
        if number >= 0:
            yield {**figures, **skipped}


def failed(name: str, error: Exception) -> Skip:
    """Prints the error of a side with its traceback, and returns it as a `Skip`."""
    traceback.print_exception(error)
    first = [*str(error).splitlines(), ""][0][:200]
    return Skip(f"{name} failed: {type(error).__name__}: {first}")


def largest(figures: Iterable[float | Skip]) -> float | Skip:
    """Returns the largest of the figures, or the first `Skip` if there is one."""
    found = list(figures)
    return next((f for f in found if isinstance(f, Skip)), None) or max(found)  # pyright: ignore


def results(group: Group, run: Run) -> list[Result]:
    """Measures a group, and returns a result for each comparison.

    If the group fails, `skipped` of each result has the error.
    """
    try:
        rounds = list(group.measure(run))
    except Skip as skip:
        return [Result(c, [], [], skipped=str(skip)) for c in group.comparisons]
    except Exception as error:
        skip = failed(group.name, error)
        return [Result(c, [], [], skipped=str(skip)) for c in group.comparisons]
    return [_result(comparison, rounds) for comparison in group.comparisons]


def has_failed(group: Group, result: Result) -> bool:
    """Returns True if the group or our side failed. A failure of another side does not count."""
    ours = (f"{group.name} failed: ", f"{result.comparison.ours} failed: ")
    return (result.skipped or "").startswith(ours)


def _result(comparison: Comparison, rounds: Sequence[Round]) -> Result:
    ours = [round[comparison.ours] for round in rounds]
    theirs = [round[comparison.theirs] for round in rounds]
    for figure in (*ours, *theirs):
        if isinstance(figure, Skip):
            return Result(comparison, [], [], skipped=str(figure))
    return Result(comparison, ours, theirs)  # pyright: ignore[reportArgumentType]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
