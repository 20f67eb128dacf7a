"""The results as a table on the terminal, as JSON, and as a page of Markdown."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.measure import Result, quartiles

PACKAGES = ("grain-shard", "grain", "jax", "jaxlib", "numpy", "flax", "array-record", "datarax")
_TABLE_WIDTH = 140  # columns, of which a file or a pipe has none


def conditions(quick: bool) -> dict[str, Any]:
    """Where and when the results were measured."""
    versions = {}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": f"{_processor()}, {platform.system()} {platform.machine()}",
        "cpus": os.cpu_count(),
        "load before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": versions,
        "quick": quick,
    }


def cells(result: Result) -> list[str]:
    """A row of the table: number, what, against, ours, theirs, goal, measured, spread, verdict."""
    comparison = result.comparison
    goal = comparison.goal
    unit = comparison.compared_unit
    goal_text = f"{goal.relation} {_figure(goal.value)}{_unit(unit)}" if goal else "-"
    row = [comparison.number or "-", comparison.what, comparison.against]
    if result.skipped:
        return [*row, "-", "-", goal_text, "-", "-", result.skipped]
    low, middle, high = quartiles(result.values)
    verdict = {True: "met", False: "missed", None: "-"}[result.met]
    return [
        *row,
        f"{_figure(quartiles(result.ours)[1])} {comparison.unit}",
        f"{_figure(quartiles(result.theirs)[1])} {comparison.unit}",
        goal_text,
        f"{_figure(middle)}{_unit(unit)}",
        f"{_figure(low)} to {_figure(high)}",
        verdict,
    ]


HEADER = ("#", "what", "against", "ours", "theirs", "goal", "measured", "quartiles", "goal met?")


def print_table(results: Sequence[Result]) -> None:
    import rich.box
    import rich.console
    import rich.table
    import rich.text

    detected = rich.console.Console()
    console = rich.console.Console(width=max(_TABLE_WIDTH, detected.width))
    table = rich.table.Table(box=rich.box.SIMPLE_HEAD)
    for heading in ("#", "what, against"):
        table.add_column(heading)
    for heading in ("ours", "theirs", "measured", "goal"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for result in results:
        number, what, against, ours, theirs, goal, measured, spread, verdict = cells(result)
        compared = rich.text.Text.assemble(what, "\n", (f"  vs {against}", "dim"))
        measured = f"{measured}\n{spread}"
        style = {True: "green", False: "red", None: None}[result.met]
        table.add_row(number, compared, ours, theirs, measured, goal, verdict, style=style)
    console.print(table)


def write_json(results: Sequence[Result], under: Mapping[str, Any], path: Path) -> None:
    rows = [
        {
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
        for result in results
    ]
    path.write_text(json.dumps({"conditions": under, "results": rows}, indent=2) + "\n")


def write_page(results: Sequence[Result], under: Mapping[str, Any], path: Path) -> None:
    """`benchmarks/RESULTS.md`."""
    with_goal = [result for result in results if result.met is not None]
    versions = ", ".join(f"{name} {version}" for name, version in under["versions"].items())
    mode = "quick mode (few rounds, less work)" if under["quick"] else "full mode"
    lines = [
        "# Results",
        "",
        "Written by `python -m benchmarks --write`; do not edit by hand. To repeat them, from a",
        "clone:",
        "",
        "```sh",
        'pip install -e ".[bench]"',
        "python -m benchmarks            # more than half an hour; --quick for nine minutes",
        "```",
        "",
        f"* {under['date']}, {mode}, Python {under['python']}",
        f"* {under['machine']}, {under['cpus']} CPUs, load before {under['load before']};"
        " eight virtual CPU devices",
        f"* {versions}",
        "",
        f"{sum(bool(result.met) for result in with_goal)} of {len(with_goal)} goals are met. Each"
        " round runs every side once, in turn; *ours* and *theirs* are medians over the rounds,",
        "*measured* is the median of the pairs (not the ratio of the medians), *quartiles* are of"
        " the pairs.",
        "",
        "![Records per second, ours and those of others; the table has the figures](results.png)",
        "",
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        *("| " + " | ".join(cells(result)) + " |" for result in results),
    ]
    path.write_text("\n".join(lines) + "\n")


def _figure(value: float) -> str:
    """Three digits, or all of them before the point."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _unit(unit: str) -> str:
    return unit if unit == "x" else f" {unit}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"
