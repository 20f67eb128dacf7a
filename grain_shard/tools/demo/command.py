"""``python -m grain_shard demo``: its options, and the settings that JAX needs before it starts."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from grain_shard.errors import GrainShardError
from grain_shard.tools.arguments import UsageError, positive_integer
from grain_shard.tools.demo import MIN_ACCURACY, VIRTUAL_DEVICES
from grain_shard.tools.extras import EXTRAS, missing, not_installed
from grain_shard.tools.libtpu import keep_libtpu_quiet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``demo``, for `main`."""
    parser.description = (
        "Train a classifier on 1,797 images of handwritten digits: ArrayRecord files (in the cache"
        " folder, XDG_CACHE_HOME), .shard_to(mesh), nnx.jit, Orbax. No network and no accelerator"
        f" is needed: without one, the mesh is of {VIRTUAL_DEVICES} virtual CPU devices. Exits with"
        " 1 unless"
        f" {MIN_ACCURACY:.0%} of held-out images are told right, each step compiles once, and"
        " the batches after an interruption are, bit for bit, those that would have come."
    )
    parser.add_argument(
        "--epochs", type=positive_integer, default=10, metavar="N", help="default: %(default)s"
    )
    either = parser.add_mutually_exclusive_group()
    hosts = "train on one host, then on this many (processes on this machine), and compare"
    either.add_argument("--hosts", type=int, choices=(1, 2, 4, 8), default=1, help=hosts)
    distributed = (
        "be one host of several, as jax.distributed.initialize() finds them on a TPU slice,"
        " under SLURM or in a rehearsal; checkpoints go to this new folder, which all share"
    )
    either.add_argument("--distributed", metavar="DIR", help=distributed)


def main(args: argparse.Namespace) -> int:
    """Runs the demo, and returns the exit code: 0 if every promise was kept, else 1.

    Raises:
        UsageError: The folder for the checkpoints is not empty.
        GrainShardError: The demo cannot run here; the message says why.
    """
    if lacking := missing(EXTRAS["demo"][0]):
        raise not_installed("the demo", "demo", lacking)
    if args.distributed and any(Path(args.distributed).glob("*")):
        raise UsageError(f"{args.distributed} is not empty.\n  remedy: pass a new folder.")
    if not args.distributed:
        # The imports take seconds, in which the user would otherwise see nothing.
        print("starting JAX ...", flush=True)
    keep_libtpu_quiet()
    import jax

    if args.distributed:
        try:
            jax.distributed.initialize()
        except (RuntimeError, ValueError) as error:
            raise GrainShardError(
                f"this process finds no other hosts to join: {error}\n  remedy: start the demo on"
                " every host of a TPU slice, under SLURM, or by python -m grain_shard rehearse."
            ) from None
    else:
        jax.config.update("jax_num_cpu_devices", VIRTUAL_DEVICES)
        # By default a machine with few cores has one thread a device, and the collectives of one
        # step can wait for threads that wait in another's.
        os.environ.setdefault("PJRT_NPROC", str(4 * VIRTUAL_DEVICES))
    if args.hosts > 1:
        jax.config.update("jax_platforms", "cpu")  # which is what the hosts will have

    from etils import epath

    from grain_shard.tools.demo.digits import digits_folder, write_digits
    from grain_shard.tools.demo.run import compare, run
    from grain_shard.tools.rehearse.result import RehearsalError

    given = contextlib.nullcontext(args.distributed)
    with given if args.distributed else tempfile.TemporaryDirectory() as name:
        directory = epath.Path(name)
        write_digits(digits_folder())
        try:
            kept = (run if args.hosts == 1 else compare)(args, directory)
        except RehearsalError as error:
            print(f"demo: {error}", file=sys.stderr)
            return 1
    return 0 if kept else 1
