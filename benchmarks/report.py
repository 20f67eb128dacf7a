"""Finds the conditions of a run (machine, versions, date), and prints the results as tables."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import rich.box
import rich.console
import rich.table

from benchmarks.saved import Measured
from benchmarks.tables import tables

PACKAGES = ("grain-shard", "grain", "jax", "jaxlib", "numpy", "flax", "array-record", "datarax")
_TABLE_WIDTH = 140  # least width of the tables in characters, e.g. in a file


def conditions(quick: bool) -> dict[str, Any]:
    """Returns the conditions of a run, as plain JSON: date, machine, load, versions and mode."""
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


def print_tables(measured: Measured) -> None:
    detected = rich.console.Console()
    console = rich.console.Console(width=max(_TABLE_WIDTH, detected.width))
    for group, results in measured:
        console.print(f"\n{group.title}", style="bold", highlight=False)
        for table in tables(results):
            shown = rich.table.Table(*table.header, box=rich.box.SIMPLE_HEAD)
            for row, met in zip(table.rows, table.met, strict=True):
                shown.add_row(*row, style={True: "green", False: "red", None: None}[met])
            console.print(shown)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"
