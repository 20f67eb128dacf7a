"""Writes the results as `benchmarks/RESULTS.md`, with a section for each group."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.saved import Measured
from benchmarks.tables import Table, tables


def write_page(measured: Measured, under: Mapping[str, Any], path: Path) -> None:
    """Writes the page. It shows the picture results.png of the same folder.

    Args:
        measured: The groups and their results.
        under: The conditions of the run, from `report.conditions`.
        path: The file to write.
    """
    path.write_text("\n".join(_lines(measured, under)) + "\n")


def _lines(measured: Measured, under: Mapping[str, Any]) -> Iterator[str]:
    versions = ", ".join(f"{name} {version}" for name, version in under["versions"].items())
    mode = "quick mode (few rounds, less work)" if under["quick"] else "full mode"
    verdicts = [result.met for _, results in measured for result in results]
    verdicts = [met for met in verdicts if met is not None]
    yield from [
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
        f"{sum(verdicts)} of {len(verdicts)} goals are met. Each round runs every side once, in"
        " turn; *ours* and *theirs*",
        "are medians over the rounds, *measured* is the median of the pairs (not the ratio of the"
        " medians), with",
        "their quartiles if there was more than one round. A row without a number has no goal.",
        "",
        "![How many times as fast as others, the median of the pairs and their quartiles, as in"
        " the first table](results.png)",
    ]
    for group, results in measured:
        yield from ["", f"## {group.title}"]
        for table in tables(results):
            yield from ["", *_markdown(table)]


def _markdown(table: Table) -> Iterator[str]:
    yield _line(table.header)
    yield "|" + "---|" * len(table.header)
    yield from map(_line, table.rows)


def _line(words: Any) -> str:
    return "| " + " | ".join(words) + " |"
