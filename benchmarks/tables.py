"""Makes tables of a group's results: one for comparisons with peers, one for all other results."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures import figure, with_quartiles
from benchmarks.measure import Result, quartiles


@dataclass(frozen=True)
class Table:
    """A table of texts. Columns without any text are left out.

    Attributes:
        header: The names of the columns.
        rows: The rows, each with a text for every column.
        met: For each row, True if its goal is met, False if not, and None without goal or value.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    met: Sequence[bool | None]


def tables(results: Sequence[Result]) -> list[Table]:
    """Returns at most two tables: one of results beside a peer's, and one of all other results."""
    beside = [result for result in results if result.comparison.against]
    alone = [result for result in results if not result.comparison.against]
    return [_table(some, columns) for some, columns in ((beside, _BESIDE), (alone, _ALONE)) if some]


def _verdict(result: Result) -> str:
    return {True: "met", False: "missed", None: ""}[result.met]


def _goal(result: Result) -> str:
    comparison = result.comparison
    if comparison.goal is None:
        return ""
    relation, value = comparison.goal.relation, comparison.goal.value
    return f"{relation} {figure(value, comparison.compared_unit)}"


def _median(values: Sequence[float], unit: str) -> str:
    return figure(quartiles(values)[1], unit) if values else ""


def _measured(result: Result) -> str:
    unit = result.comparison.compared_unit
    if len(result.values) < 2:  # a single round has no quartiles
        return result.skipped or _median(result.values, unit)
    return with_quartiles(*quartiles(result.values), unit)


Column = Callable[[Result], str]

_ALONE: Mapping[str, Column] = {
    "#": lambda result: result.comparison.number,
    "goal met?": _verdict,
    "what": lambda result: result.comparison.what,
    "measured": _measured,
    "goal": _goal,
}
_BESIDE: Mapping[str, Column] = {
    "#": lambda result: result.comparison.number,
    "goal met?": _verdict,
    "what": lambda result: result.comparison.what,
    "against": lambda result: result.comparison.against,
    "measured": _measured,
    "goal": _goal,
    "ours": lambda result: _median(result.ours, result.comparison.unit),
    "theirs": lambda result: _median(result.theirs, result.comparison.unit),
}


def _table(results: Sequence[Result], columns: Mapping[str, Column]) -> Table:
    words = {name: [column(result) for result in results] for name, column in columns.items()}
    said = {name: column for name, column in words.items() if any(column)}
    rows = [[word or "-" for word in row] for row in zip(*said.values(), strict=True)]
    return Table(list(said), rows, [result.met for result in results])
