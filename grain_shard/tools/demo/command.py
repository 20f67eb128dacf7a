"""``python -m grain_shard demo``: its options, and the settings that JAX needs at its start."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from pathlib import Path

from grain_shard.errors import GrainShardError
from grain_shard.tools.arguments import UsageError, positive_integer
from grain_shard.tools.demo import MIN_ACCURACY, VIRTUAL_DEVICES
from grain_shard.tools.extras import require
from grain_shard.tools.libtpu import keep_libtpu_quiet


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of ``demo`` to its parser."""
    parser.description = (
        "Train a classifier on 1,500 images of handwritten digits: ArrayRecord files (in the cache"
        " folder, XDG_CACHE_HOME), .shard_to(mesh), nnx.jit, Orbax. No network and no accelerator"
        f" is needed: without one, the mesh has {VIRTUAL_DEVICES} virtual CPU devices. The exit"
        f" code is 0 if {MIN_ACCURACY:.0%} of held-out images are classified correctly, if each"
        " step compiles once, and if the batches after an interruption are, bit for bit, those of"
        " an uninterrupted run. Otherwise it is 1."
    )
    epochs = "epochs; default: %(default)s"
    parser.add_argument("--epochs", type=positive_integer, default=10, metavar="N", help=epochs)
    either = parser.add_mutually_exclusive_group()
    hosts = "number of hosts: train on one, then on this many processes, and compare; default: 1"
    either.add_argument("--hosts", type=int, choices=(1, 2, 4, 8), default=1, help=hosts)
    distributed = (
        "train as one of several hosts, which jax.distributed.initialize() finds on a TPU slice,"
        " under SLURM or in a rehearsal; DIR is a new folder for checkpoints that all hosts share"
    )
    either.add_argument("--distributed", metavar="DIR", help=distributed)


def main(args: argparse.Namespace) -> int:
    """Runs the demo, and returns the exit code: 0 if every promise was kept, else 1.

    Raises:
        UsageError: The folder for the checkpoints is not empty.
        GrainShardError: A package is missing, no other hosts are found, or the images cannot be
            written.
    """
    require("demo", "the demo")
    if args.distributed and any(Path(args.distributed).glob("*")):
        raise UsageError(f"{args.distributed} is not empty.\n  remedy: pass a new folder.")
    if not args.distributed:
        # The imports take seconds, and the user would see nothing until they are done.
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
        # By default XLA has few threads on a machine with few cores. The collectives of one step
        # may then wait for threads that are blocked in the collectives of another step.
        os.environ.setdefault("PJRT_NPROC", str(4 * VIRTUAL_DEVICES))
    if args.hosts > 1:
        jax.config.update("jax_platforms", "cpu")  # like the rehearsed hosts

    from etils import epath

    from grain_shard.tools.demo.digits import digits_folder, write_digits
    from grain_shard.tools.demo.run import compare, run

    given = contextlib.nullcontext(args.distributed)
    with given if args.distributed else tempfile.TemporaryDirectory() as directory:
        write_digits(digits_folder())
        kept = (run if args.hosts == 1 else compare)(args, epath.Path(directory))
    return 0 if kept else 1
