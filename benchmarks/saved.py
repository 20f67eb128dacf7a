"""Writes the results of a run as a JSON file, and reads such a file."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Comparison, Group, Result, quartiles

# Pairs of a measured group and the results of its comparisons.
Measured = Sequence[tuple[Group, Sequence[Result]]]


def write_json(measured: Measured, under: Mapping[str, Any], path: Path) -> None:
    rows = [
        {
            "group": group.name,
            "number": result.comparison.number,
            "what": result.comparison.what,
            "against": result.comparison.against,
            "unit": result.comparison.unit,
            "ours": list(result.ours),
            "theirs": list(result.theirs),
            "compared": result.comparison.compared,
            "compared_unit": result.comparison.compared_unit,
            "values": result.values,
            "quartiles": quartiles(result.values) if result.values else None,
            "goal": result.comparison.goal
            and [result.comparison.goal.relation, result.comparison.goal.value],
            "met": result.met,
            "skipped": result.skipped,
        }
        for group, results in measured
        for result in results
    ]
    path.write_text(json.dumps({"conditions": under, "results": rows}, indent=2) + "\n")


def read_json(path: Path, groups: Sequence[Group]) -> tuple[dict[str, Any], Measured]:
    """Returns the conditions of a saved run, and the results of the groups.

    Raises:
        ValueError: The file lacks a comparison of the groups, or has it with another unit or
            another way to compare.
    """
    written = json.loads(path.read_text())
    rows = {(row.get("group"), row["what"], row["against"]): row for row in written["results"]}

    def result(group: Group, comparison: Comparison) -> Result:
        name = (group.name, comparison.what, comparison.against)
        row = rows.get(name, {})
        for field in ("unit", "compared"):
            if row.get(field) != getattr(comparison, field):
                raise ValueError(
                    f"{path} has no result of {', '.join(filter(None, name))}"
                    f" with the {field} {getattr(comparison, field)!r}; measure all of them again"
                )
        return Result(comparison, row["ours"], row["theirs"], row["skipped"])

    measured = [
        (group, [result(group, comparison) for comparison in group.comparisons]) for group in groups
    ]
    return written["conditions"], measured
