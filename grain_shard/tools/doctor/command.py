"""``python -m grain_shard doctor``: its options, and the report as text and as JSON.

The report is made of parts. A part that fails gives its reason, and the others are printed even so.
"""

from __future__ import annotations

import argparse
import json
import shutil
import textwrap
from collections.abc import Callable, Mapping
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
    answer = partial(ask, timeout_s=args.timeout)
    questions: dict[str, Callable[[], Mapping[str, Any]]] = {
        "versions": machine.versions,
        "machine": machine.machine,
        "limits": machine.limits,
        "extras": machine.extras,
        "accelerators": machine.accelerators,
        "devices": partial(answer, f"{__package__}.devices", [], if_late=_DEVICES_LATE),
        "reads": partial(answer, f"{__package__}.reads", args.files, if_late=_READS_LATE),
    }
    if not args.files:
        del questions["reads"]
    report = {}
    for name, question in questions.items():
        try:
            report[name] = question()
        except Exception as error:  # of whatever kind: the other parts are of use without it
            said = isinstance(error, RuntimeError | TimeoutError)  # a sentence of `ask`
            reason = f"{error}" if said else f"{type(error).__name__}: {error}"
            report[name] = {"error": " ".join(reason.split())}
        if not args.json:
            print(name)
            _print_facts(report[name])
            print(flush=True)
    if args.json:
        print(json.dumps(report, indent=2))
    return 0


def _print_facts(part: Mapping[str, Any]) -> None:
    """Prints a line for each fact, under its name."""
    width = min(shutil.get_terminal_size().columns, 78)
    for name, value in part.items():
        if isinstance(value, Mapping):
            _print_facts(value)
            continue
        label = name.removesuffix("_bytes")
        text = "none" if value is None else decimal(value) if label != name else str(value)
        label = label if name.isupper() else label.replace("_", " ")
        indent = f"  {label:<18} "
        wrapped = textwrap.TextWrapper(
            width,
            initial_indent=indent,
            subsequent_indent=" " * len(indent),
            break_on_hyphens=False,
            break_long_words=False,
        )
        print(wrapped.fill(text))
