"""``python -m grain_shard doctor``: its options, and the report as text and as JSON.

The report is made of parts. One that fails says why in its place, and the others are there.
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

_NAMES_WIDTH = 18
_wrap = partial(textwrap.fill, break_on_hyphens=False, break_long_words=False)

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
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILES",
        help="ArrayRecord files, patterns or folders, to be read for some seconds",
    )
    parser.add_argument(
        "--timeout",
        type=positive_seconds,
        metavar="SECONDS",
        default=60.0,
        help="how long to wait for the devices, and for the files (default: 60)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Prints the report, each part as soon as it is known; returns 0."""
    report = {}
    for name, (question, lines) in _parts(args.files, args.timeout).items():
        try:
            report[name] = question()
        except Exception as error:  # of whatever kind: the other parts are of use without it
            report[name] = {"error": _text(error)}
            lines = _failed
        if not args.json:
            _print_part(name, lines(report[name]))
    if args.json:
        print(json.dumps(report, indent=2))
    return 0


_Lines = Iterator[tuple[str, str]]


def _parts(
    files: list[str], timeout_s: float
) -> dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], _Lines]]]:
    """By name: what finds it out, and what makes lines of it."""

    def devices() -> dict[str, Any]:
        return ask(
            "grain_shard.tools.doctor.devices", [], timeout_s=timeout_s, if_late=_DEVICES_LATE
        )

    def reads() -> dict[str, Any]:
        return ask(
            "grain_shard.tools.doctor.reads", files, timeout_s=timeout_s, if_late=_READS_LATE
        )

    parts: Any = {
        "versions": (machine.versions, _versions),
        "machine": (machine.machine, _machine),
        "limits": (machine.limits, _limits),
        "extras": (machine.extras, _extras),
        "accelerators": (machine.accelerators, _accelerators),
        "devices": (devices, _devices),
    }
    return parts | ({"reads": (reads, _reads)} if files else {})


def _print_part(name: str, lines: _Lines) -> None:
    width = min(shutil.get_terminal_size().columns, 78)
    print(name)
    for label, text in lines:
        head = f"  {label:<{_NAMES_WIDTH}} "
        print(_wrap(text, width, initial_indent=head, subsequent_indent=" " * len(head)))
    print(flush=True)


def _text(error: Exception) -> str:
    """In one line; what `ask` raises is a sentence already."""
    said = isinstance(error, RuntimeError | TimeoutError)
    return " ".join((f"{error}" if said else f"{type(error).__name__}: {error}").split())


def _failed(part: dict[str, Any]) -> _Lines:
    yield "cannot be said", part["error"]


def _versions(part: dict[str, Any]) -> _Lines:
    for package, version in part.items():
        yield package, version or "not installed"


def _machine(part: dict[str, Any]) -> _Lines:
    cores, ours = part["cores"], part["cores_for_this_process"]
    yield "cores", str(cores) + (f", {ours} for this process" if ours not in (None, cores) else "")
    limit = part["memory_limit_bytes"]
    yield "memory", decimal(part["memory_bytes"]) + (f", limit {decimal(limit)}" if limit else "")
    if part["shared_memory_bytes"] is not None:
        yield "shared memory", f"{decimal(part['shared_memory_bytes'])} (for num_workers)"
    yield from part["environment"].items()


def _limits(part: dict[str, Any]) -> _Lines:
    files, most = part["open_files"], part["open_files_at_most"]
    yield "open files", f"{_count(files)}, at most {_count(most)}"
    if "processes_and_threads" in part:
        yield "processes, threads", _count(part["processes_and_threads"])
    if part["advice"]:
        yield "advice", part["advice"]


def _extras(part: dict[str, Any]) -> _Lines:
    for name, extra in part.items():
        missing = extra["missing"]
        there = f"lacks {', '.join(missing)}" if missing else "there"
        remedy = f': pip install "grain-shard[{name}]"' if missing else ""
        yield name, f"{there} (for {extra['for']}){remedy}"


def _accelerators(part: dict[str, Any]) -> _Lines:
    chip, libtpu = part["tpu_device_files"], part["libtpu"]
    yield "TPU", "there is one" if chip else "none on this machine"
    if libtpu is None:
        yield "libtpu", 'not installed: pip install "jax[tpu]"' if chip else "not installed"
    elif chip:
        yield "libtpu", libtpu
    else:
        yield (
            "libtpu",
            f"{libtpu}. With no TPU here it has every JAX program print errors, which mean nothing;"
            " JAX_PLATFORMS=cpu stops them",
        )
    nvidia, plugin = part["nvidia_device_files"], part["cuda_plugin"]
    yield "NVIDIA GPU", "there is one" if nvidia else "none on this machine"
    hint = ': pip install "jax[cuda13]"' if nvidia and not plugin else ""
    yield "CUDA for JAX", plugin or f"not installed{hint}"


def _devices(part: dict[str, Any]) -> _Lines:
    kinds = ", ".join(f"{count} x {kind}" for kind, count in part["devices"].items())
    yield "platform", part["platform"]
    yield "devices", f"{kinds}; {part['local_devices']} on this host"
    if part["bytes_per_device"]:
        yield "memory of each", decimal(part["bytes_per_device"])
    yield "hosts", f"{part['hosts']}, and this is host {part['host']}"


def _reads(part: dict[str, Any]) -> _Lines:
    size = decimal(part["record_bytes"])
    yield "files", f"{part['files']:,} with {part['records']:,} records of {size} or so"
    yield "opening them", f"{part['open_ms']:,.4g} ms"
    yield "first read", f"{part['first_read_ms']:,.4g} ms"
    yield (
        "a read",
        f"{part['median_read_ms']:,.4g} ms (median of {part['reads']}),"
        f" {part['slowest_read_ms']:,.4g} ms (slowest)",
    )
    rates = part["records_per_s_side_by_side"].items()
    yield "reads side by side", "; ".join(f"{n}: {rate:,.0f} records/s" for n, rate in rates)
    yield "that help", f"{part['side_by_side_that_help']} (.shard_to finds this out by itself)"


def _count(number: int | None) -> str:
    return "no limit" if number is None else f"{number:,}"
