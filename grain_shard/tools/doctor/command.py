"""``python -m grain_shard doctor``: its options, and the report as text and as JSON.

The report is made of parts. A part that fails gives its reason, and the others are printed even so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from rich.filesize import decimal

from grain_shard.tools.arguments import positive_seconds
from grain_shard.tools.doctor import machine
from grain_shard.tools.doctor.child import ask

_DEVICES_LATE = (
    "JAX was still starting its devices. Another process may hold the TPU or the GPU (end it, or"
    " ask on another machine), or the other hosts of the slice were not started."
)
_READS_LATE = "the files were still being read. The mount may hang, or be very slow: try one file."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``doctor``, for `main`."""
    parser.description = (
        "Say what is on this machine, as text to be pasted into an issue report: versions, devices"
        " and hosts as JAX sees them, memory, limits, optional parts; and, of files that are named,"
        " what reading them takes. Nothing is changed or sent. It ends with 0 whatever it finds;"
        " a part that fails says why in its place."
    )
    add = parser.add_argument
    files = "ArrayRecord files, patterns or folders, to be read for some seconds"
    add("files", nargs="*", metavar="FILES", help=files)
    wait = "how long to wait for the devices, and for the files (default: 60)"
    add("--timeout", type=positive_seconds, metavar="SECONDS", default=60.0, help=wait)
    add("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Prints the report, each part as soon as it is known; returns 0."""
    report = {}
    for name, question in _questions(args.files, args.timeout).items():
        try:
            report[name] = question()
            lines = _TEXTS.get(name, _plain)(report[name])
        except Exception as error:  # of whatever kind: the other parts are of use without it
            report[name] = {"error": _reason(error)}
            lines = iter([("cannot be said", report[name]["error"])])
        if not args.json:
            _print_part(name, lines)
    if args.json:
        print(json.dumps(report, indent=2))
    return 0


def _questions(files: list[str], timeout_s: float) -> dict[str, Callable[[], dict[str, Any]]]:
    """The parts of the report: their names, and the functions that find them out."""
    module = "grain_shard.tools.doctor"
    devices = partial(ask, f"{module}.devices", [], timeout_s=timeout_s, if_late=_DEVICES_LATE)
    reads = partial(ask, f"{module}.reads", files, timeout_s=timeout_s, if_late=_READS_LATE)
    return {
        "versions": machine.versions,
        "machine": machine.machine,
        "limits": machine.limits,
        "extras": machine.extras,
        "accelerators": machine.accelerators,
        "devices": devices,
        **({"reads": reads} if files else {}),
    }


def _print_part(name: str, lines: Iterator[tuple[str, str]]) -> None:
    width = min(shutil.get_terminal_size().columns, 78)
    fill = partial(textwrap.fill, width=width, break_on_hyphens=False, break_long_words=False)
    print(name)
    for label, text in lines:
        head = f"  {label:<18} "
        print(fill(text, initial_indent=head, subsequent_indent=" " * len(head)))
    print(flush=True)


def _reason(error: Exception) -> str:
    """An error in one line; the errors of `ask` are sentences already."""
    said = isinstance(error, RuntimeError | TimeoutError)
    return " ".join((f"{error}" if said else f"{type(error).__name__}: {error}").split())


def _plain(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A line for each fact, under its name."""
    for name, value in part.items():
        label = name.removesuffix("_bytes")
        if isinstance(value, dict):
            yield from value.items()
        elif value is None:
            yield label.replace("_", " "), "none"
        else:
            yield label.replace("_", " "), str(value) if label == name else decimal(value)


def _extras(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, extra in part.items():
        missing, remedy = ", ".join(extra["missing"]), f'pip install "grain-shard[{name}]"'
        there = f"lacks {missing}: {remedy}" if missing else "there"
        yield name, f"{there} (for {extra['for']})"


def _devices(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in part["devices"].items())
    yield "platform", part["platform"]
    yield "devices", f"{kinds}; {part['local_devices']} on this host"
    if part["bytes_per_device"]:
        yield "memory of each", decimal(part["bytes_per_device"])
    yield "hosts", f"{part['hosts']}, and this is host {part['host']}"


def _reads(part: dict[str, Any]) -> Iterator[tuple[str, str]]:
    size = decimal(part["record_bytes"])
    yield "files", f"{part['files']:,} with {part['records']:,} records of {size} or so"
    for name in ("open_ms", "first_read_ms", "median_read_ms", "slowest_read_ms"):
        yield name.removesuffix("_ms").replace("_", " "), f"{part[name]:,.4g} ms"
    rates = part["records_per_s_side_by_side"].items()
    yield "reads side by side", "; ".join(f"{n}: {rate:,.0f} records/s" for n, rate in rates)
    yield "that help", f"{part['side_by_side_that_help']} (.shard_to finds this out by itself)"


# The report's parts with a formatter of their own, which puts several facts in a line.
_TEXTS = {"extras": _extras, "devices": _devices, "reads": _reads}
