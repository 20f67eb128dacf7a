"""Measuring side by side: every side in turn, round after round, and what to make of the figures.

A *side* is a function that does its work once, from a fresh start, and returns one figure: records
per second, say. A round runs every side once, so that whatever else the machine does meets all of
them. A *comparison* takes two sides: a pair of figures a round, the median of what the pairs give,
and their quartiles. Nothing here knows JAX.
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
    """A side that cannot be measured here; the message says why."""


Round = Mapping[str, "float | Skip"]


@dataclass(frozen=True)
class Run:
    """What the command line chose.

    Attributes:
        quick: Whether to take fewer rounds and less work.
        folder: Where to put data; it is removed at the end.
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
    """Two sides, how to compare them, and what should come out.

    Attributes:
        number: The goal's, as in P1; "" for a peer that is shown without a goal.
        what: What sets it apart in its group, whose title says what is measured.
        against: What it is compared with; "" if it is measured alone.
        unit: Of the figures of each side.
        ours: The name of our side.
        theirs: The name of the other.
        compared: How a pair becomes one value, a key of `COMPARED`.
        compared_unit: Of that value: "x" for a ratio.
        goal: What the median of the values should be.
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
    """One side, whose figures are compared with nothing but their goal."""
    return Comparison(number, what, "", unit, side, side, "ours", compared_unit=unit, goal=goal)


@dataclass(frozen=True)
class Group:
    """Comparisons that one series of rounds serves.

    Attributes:
        name: As on the command line.
        title: What is measured, as a heading.
        measure: Yields the figures of each round, by side.
        comparisons: What to make of them.
    """

    name: str
    title: str
    measure: Callable[[Run], Iterable[Round]]
    comparisons: Sequence[Comparison]


@dataclass(frozen=True)
class Result:
    """What came of a comparison; no values, and why, if a side could not be measured."""

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
        """Whether the goal is met; None without a goal or a value."""
        if self.comparison.goal is None or not self.values:
            return None
        return self.comparison.goal.met(statistics.median(self.values))


def interleave(
    sides: Mapping[str, Callable[[], float]], rounds: int, *, warm_up: bool = True
) -> Iterator[Round]:
    """Runs all sides in turn, `rounds` times, after one round that does not count.

    A side that raises is not run again. The others go on without it: a peer that is missing or
    broken leaves its own rows empty.
    """
    skipped: dict[str, Skip] = {}
    for number in range(-1 if warm_up else 0, rounds):
        figures: dict[str, float | Skip] = {}
        for name, side in sides.items():
            if name not in skipped:
                gc.collect()  # what the side before has left behind is not this one's to clear
                try:
                    figures[name] = side()
                except Skip as skip:
                    skipped[name] = skip
                except Exception as error:
                    skipped[name] = failed(name, error)
        if number >= 0:
            yield {**figures, **skipped}


def failed(name: str, error: Exception) -> Skip:
    """The error of a side, printed, as the word for its rows."""
    traceback.print_exception(error)
    first = [*str(error).splitlines(), ""][0][:200]
    return Skip(f"{name} failed: {type(error).__name__}: {first}")


def largest(figures: Iterable[float | Skip]) -> float | Skip:
    """The largest of some figures, or the first `Skip` among them."""
    found = list(figures)
    return next((f for f in found if isinstance(f, Skip)), None) or max(found)  # pyright: ignore


def results(group: Group, run: Run) -> list[Result]:
    """Measures a group. If it fails, each of its results says so."""
    try:
        rounds = list(group.measure(run))
    except Skip as skip:
        return [Result(c, [], [], skipped=str(skip)) for c in group.comparisons]
    except Exception as error:
        skip = failed(group.name, error)
        return [Result(c, [], [], skipped=str(skip)) for c in group.comparisons]
    return [_result(comparison, rounds) for comparison in group.comparisons]


def has_failed(group: Group, result: Result) -> bool:
    """Whether the group or our side of it failed; a peer's failure is the peer's."""
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
    """The lower quartile, the median and the upper quartile."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high
