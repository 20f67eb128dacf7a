"""``python -m grain_shard check``: the acceptance test of a pipeline, for CI."""

from __future__ import annotations

import argparse
import importlib
import os
import sys

import grain

from grain_shard.tools.arguments import UsageError, positive_integer, positive_seconds
from grain_shard.tools.checking.check import run_checks
from grain_shard.tools.showing.tables import to_screen


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``check`` to its parser."""
    parser.description = (
        "Prove that all readers of a pipeline get the same batches: threads, a worker process,"
        " other hosts and meshes, and a restored run."
    )
    add = parser.add_argument
    pipeline = "module and name of a dataset after .shard_to, or of a function that returns one"
    add("pipeline", metavar="MODULE:FUNCTION", help=pipeline)
    held_out = "a dataset with held-out records: no record may be in both pipelines"
    add("--apart-from", metavar="MODULE:FUNCTION", help=held_out)
    most = "most batches to read (default: 20)"
    add("--batches", type=positive_integer, metavar="N", default=20, help=most)
    time = "seconds after which no further batch is read (default: 60)"
    add("--seconds", type=positive_seconds, metavar="SECONDS", default=60.0, help=time)


def main(args: argparse.Namespace) -> int:
    """Checks a pipeline, prints the table, and returns the exit code 0.

    Raises:
        UsageError: There is no such module or function, or it is not a dataset.
        ShardingError: A proof failed, or the dataset is not one that `shard_to` returned.
    """
    held_out = _load(args.apart_from) if args.apart_from else None
    checked = run_checks(_load(args.pipeline), args.batches, args.seconds, held_out)
    to_screen(checked)
    if checked.error is not None:
        raise checked.error
    return 0


def _load(text: str) -> grain.MapDataset | grain.IterDataset:
    """Returns the dataset that a text such as ``train:pipeline`` names.

    The text may also name a function, which is called and returns the dataset.

    Raises:
        UsageError: There is no such module or name, or it is not a dataset.
    """
    module, _, name = text.partition(":")
    if not module or not name:
        raise UsageError(f"{text!r} does not have the form module:function.")
    if (folder := os.getcwd()) not in sys.path:  # the script `grain-shard` does not add it
        sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        # The module exists, but it imports one that does not: the user needs the traceback.
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise UsageError(
            f"there is no module {error.name!r} in {folder} or in the installed packages."
        ) from None
    if not hasattr(found, name):
        raise UsageError(f"the module {module!r} has no {name!r}.")
    made = getattr(found, name)
    made = made() if callable(made) else made
    if not isinstance(made, grain.MapDataset | grain.IterDataset):
        raise UsageError(f"{text} is a {type(made).__name__}, not a dataset.")
    return made
