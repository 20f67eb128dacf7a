"""``python -m grain_shard doctor``: a report on this machine, to be pasted into an issue report.

The report has several parts. A part that fails shows the error, and all other parts are printed.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from grain_shard.tools.arguments import positive_seconds
from grain_shard.tools.extras import EXTRAS, missing
from grain_shard.tools.libtpu import keep_libtpu_quiet, tpu_is_here
from grain_shard.tools.showing.tables import FittingTable, to_screen

_PACKAGES = (
    *("grain-shard", "jax", "jaxlib", "grain", "numpy", "array-record", "orbax-checkpoint"),
    "flax",
)
_FEW_FILES = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``doctor`` to its parser."""
    parser.description = (
        "Report on this machine, as text to be pasted into an issue report: versions, the parts of"
        " Grain that make reads fast, devices and hosts as JAX sees them, and missing parts with"
        " their remedies. Nothing is changed or sent. The exit code is always 0."
        " A part of the report that fails shows its error."
    )
    wait = "seconds to wait for the devices (default: 60)"
    timeout = {"type": positive_seconds, "metavar": "SECONDS", "default": 60.0, "help": wait}
    parser.add_argument("--timeout", **timeout)
    parser.add_argument("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Prints each part of the report as soon as it is known, and returns 0.

    With ``--json`` the whole report is printed at the end.
    """
    questions: dict[str, Callable[[], Mapping[str, Any]]] = {
        "versions": versions,
        "hints": hints,
        "checks": checks,
        "devices": partial(devices, args.timeout),
    }
    report = {}
    for name, question in questions.items():
        try:
            report[name] = question()
        except Exception as error:  # any kind: the report is useful without this part, too
            report[name] = {"error": " ".join(f"{type(error).__name__}: {error}".split())}
        if not args.json:
            facts = [(fact, str(value)) for fact, value in report[name].items()]
            to_screen(FittingTable([name, ""], facts, left=2))
    if args.json:
        print(json.dumps(report, indent=2))
    return 0


def versions() -> dict[str, str]:
    """Returns the versions of Python, the system and the packages, by name."""
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    found = {"python": platform.python_version(), "system": system}
    return found | {package: _version(package) or "not installed" for package in _PACKAGES}


def hints() -> dict[str, str]:
    """Returns "found" or a remedy, by name, for each private part of Grain that speeds up reads."""
    import grain

    from grain_shard.grain_inside import nodes, routes

    records = grain.MapDataset.source(range(8)).seed(3).shuffle().map(str)
    stream = records.to_iter_dataset(grain.ReadOptions(1, 1))
    found = {
        "batch size": nodes.batch_node(records.batch(2)),
        "batch size of a stream": nodes.iter_batch_size(stream.batch(2)),
        "way to the source": routes.source_of(records, 0),
        "seeds": any(map(nodes.seeds, nodes.walk(records))) or None,
        "read options": (nodes.read_ahead(stream) or (None, None))[1],
    }
    lost = "not found in this version of Grain: reads are slower. Install a tested version."
    return {hint: lost if value is None else "found" for hint, value in found.items()}


def checks() -> dict[str, str]:
    """Returns the state of each thing that may be missing, by name, or a remedy if it is missing.

    The things are: open files, the optional parts of this package, TPU and GPU libraries.
    """
    found = {}
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    found["open files"] = "no limit" if files < 0 else f"{files}"
    if 0 <= files < _FEW_FILES:  # -1 means no limit
        few = f"{files}; a source of more than some {files // 2} files needs more"
        found["open files"] = f"{few}: ulimit -n {most if most > 0 else 65536}"
    for name, (modules, use) in EXTRAS.items():
        lacks = ", ".join(missing(modules))
        remedy = f'lacks {lacks}: pip install "grain-shard[{name}]" (for {use})'
        found[f"[{name}]"] = remedy if lacks else "ok"
    libtpu, has_tpu = _version("libtpu"), tpu_is_here()
    cuda = _version("jax-cuda13-plugin") or _version("jax-cuda12-plugin")
    found["TPU"] = f"libtpu {libtpu}" if has_tpu else "none"
    if has_tpu and libtpu is None:
        found["TPU"] = 'no libtpu: pip install "jax[tpu]"'
    elif libtpu is not None and not has_tpu:
        found["TPU"] = (
            f"none, but libtpu {libtpu} is installed, and makes every JAX program print harmless"
            " errors. Set JAX_PLATFORMS=cpu to stop these errors"
        )
    found["NVIDIA GPU"] = "none"
    if Path("/dev/nvidiactl").exists():
        found["NVIDIA GPU"] = f"CUDA {cuda}" if cuda else 'no CUDA: pip install "jax[cuda13]"'
    return found


def devices(timeout_s: float) -> dict[str, Any]:
    """Returns the platform, devices and hosts that JAX finds, by name.

    JAX looks for the devices in a process of its own, because the search may hang or crash.

    Args:
        timeout_s: Seconds that the process may take.

    Raises:
        TimeoutError: The process did not answer in this time.
        RuntimeError: The process failed. The message is the last line that it wrote to stderr, or
            its exit code.
    """
    program = f"from {__name__} import _print_devices; _print_devices()"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(
            f"JAX did not find its devices within {timeout_s:g} s. Another process may hold the"
            " TPU or GPU: end that process. Or this host belongs to a slice whose other hosts were"
            " not started: start them."
        ) from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit code {done.returncode}"]
        raise RuntimeError(last[0])
    return json.loads(done.stdout.splitlines()[-1])


def _print_devices() -> None:
    """Prints, as JSON, the devices and hosts that JAX finds by itself.

    It does not call ``jax.distributed.initialize()``.
    """
    keep_libtpu_quiet()
    import jax

    kinds = Counter(device.device_kind for device in jax.devices())
    facts = {
        "platform": jax.default_backend(),
        "devices": ", ".join(f"{count} x {kind}" for kind, count in kinds.items()),
        "on this host": jax.local_device_count(),
        "hosts": jax.process_count(),
        "this host": jax.process_index(),
    }
    print(json.dumps(facts))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
