"""``python -m grain_shard demo``: from files to a trained model, with an interruption, checked.

The pipelines in `run` and what is in `training` are what a project would copy. The rest
checks what the library promises.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils

from grain_shard import ArrayRecordSource, rehearse, show
from grain_shard.checkpoint import CheckpointRestore
from grain_shard.demo.checks import CountingSource, check, count_compilations, digests, say
from grain_shard.demo.digits import decode, write_digits
from grain_shard.demo.training import create, evaluate, train
from grain_shard.errors import GrainShardError

_VIRTUAL_DEVICES = 8
_MIN_ACCURACY = 0.97
# Several hosts add up the gradients in another order, which changes the last bits: 5e-7 at most,
# in trials with seeds 0 to 4.
_MAX_DIFFERENCE = 1e-5


def run(args: argparse.Namespace, directory: epath.Path) -> bool:
    """Trains on the hosts of this job, and says what happened and whether it is as promised."""
    compilations = count_compilations()
    train_source, test_source = (
        CountingSource(ArrayRecordSource(sorted(args.data_dir.glob(f"{split}-*"))))
        for split in ("train", "test")
    )
    # No type checker sees a method that an import installs. `.pipe(shard_to, mesh)` is the same.
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    train_ds = (
        grain.MapDataset.source(train_source)
        .seed(args.seed)
        .shuffle()
        .map(decode)
        .batch(args.batch_size)
        .repeat(args.epochs)
        .shard_to(mesh)  # pyright: ignore[reportAttributeAccessIssue]
    )
    test_ds = (
        grain.MapDataset.source(test_source).map(decode).batch(args.batch_size).shard_to(mesh)  # pyright: ignore[reportAttributeAccessIssue]
    )
    if jax.process_index() == 0:
        show(test_ds)

    steps, steps_per_epoch = len(train_ds), len(train_ds) // args.epochs
    middle = args.epochs // 2 * steps_per_epoch + steps_per_epoch // 2
    with jax.set_mesh(mesh):
        train(train_ds, directory, args.seed, stop_at=middle)
        say(f"stopped after batch {middle} of {steps}; going on from its checkpoint:")
        model, seconds = train(train_ds, directory, args.seed)
        right, tested = evaluate(model, test_ds)
    records = args.epochs * len(train_source)
    say(f"trained on {records * (steps - middle) / steps / seconds:,.0f} examples per second")

    train_source.reads = 0
    expected = digests(train_ds)[middle:]
    reads = multihost_utils.process_allgather(np.array([train_source.reads])).ravel().tolist()
    with ocp.CheckpointManager(directory) as checkpoints, iter(train_ds) as batches:
        checkpoints.restore(middle, args=ocp.args.Composite(data=CheckpointRestore(batches)))
        resumed = digests(batches)
    # The last batch of an epoch is short, and the rows that it lacks are those of the last hosts.
    equal = max(reads) - min(reads) <= args.epochs * args.batch_size // len(reads)
    shares = ", ".join(f"host {i} {n:,} ({n / records:.0%})" for i, n in enumerate(reads))
    accuracy = right / tested
    trains, evals = (compilations[f"jit({name})"] for name in ("train_step", "eval_step"))
    promises = [
        check(accuracy >= _MIN_ACCURACY, f"test accuracy {accuracy:.2%} (>= {_MIN_ACCURACY:.0%})"),
        check(tested == len(test_source), f"{tested} of {len(test_source)} test images counted"),
        check(trains == evals == 1, f"compilations: {trains} of train_step, {evals} of eval_step"),
        check(resumed == expected, f"{len(expected)} batches after the restore, bit for bit"),
        check(equal and sum(reads) == records, f"every epoch reads each record once: {shares}"),
    ]
    return all(promises)


def compare(args: argparse.Namespace, directory: epath.Path) -> bool:
    """Trains on one host, then on several with as many devices, and compares the parameters."""
    say("1 host")
    if not run(args, directory / "1"):
        return False
    say(f"{args.hosts} hosts")
    command = ["-m", "grain_shard", "demo", "--distributed", str(directory / "n")]
    for option in ("epochs", "batch_size", "seed", "data_dir"):
        command += [f"--{option.replace('_', '-')}", str(getattr(args, option))]
    rehearsal = rehearse.run_script(
        command,
        hosts=args.hosts,
        devices_per_host=_VIRTUAL_DEVICES // args.hosts,
        timeout_s=600,
        echo=sys.stdout,
    )
    if rehearsal.exit_code:
        raise rehearse.RehearsalError(rehearsal)
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",))):
        items = ocp.args.Composite(state=ocp.args.StandardRestore(nnx.state(create(args.seed))))
    states = []
    for run_directory in (directory / "1", directory / "n"):
        with ocp.CheckpointManager(run_directory) as checkpoints:
            states.append(checkpoints.restore(checkpoints.latest_step(), args=items).state)
    difference = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), *states)
    largest = max(jax.tree.leaves(difference))
    return check(
        largest <= _MAX_DIFFERENCE,
        f"parameters and optimizer of {args.hosts} hosts are those of 1, but for {largest:.1g}"
        f" (<= {_MAX_DIFFERENCE:g})",
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of ``demo``, for `main`."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    parser.description = (
        "Train a classifier on 1,797 images of handwritten digits: ArrayRecord files,"
        " .shard_to(mesh), nnx.jit, Orbax. No network and no accelerator is needed: without one,"
        f" the mesh is of {_VIRTUAL_DEVICES} virtual CPU devices. Exits with 1 unless"
        f" {_MIN_ACCURACY:.0%} of held-out images are told right, each step compiles once, and"
        " the batches after an interruption are, bit for bit, those that would have come."
    )
    add = partial(parser.add_argument, metavar="N", type=int)
    add("--epochs", default=10, help="default: %(default)s")
    add("--batch-size", default=128, help="of all hosts together; default: %(default)s")
    add("--seed", default=0, help="of the parameters and the shuffling; default: %(default)s")
    parser.add_argument(
        "--data-dir",
        type=Path,
        default=Path(cache, "grain_shard", "digits").expanduser(),
        metavar="DIR",
        help="where the images are, or will be; default: %(default)s",
    )
    hosts = parser.add_mutually_exclusive_group()
    hosts.add_argument(
        "--hosts",
        type=int,
        choices=(1, 2, 4, 8),
        default=1,
        help="train on one host, then on so many (processes on this machine), and compare",
    )
    hosts.add_argument(
        "--distributed",
        metavar="DIR",
        help="be one host of several, as jax.distributed.initialize() finds them on a TPU slice,"
        " under SLURM or in a rehearsal; checkpoints go to this new folder, which all share",
    )


def main(args: argparse.Namespace) -> int:
    """Runs the demo, and returns the exit code: 0 if every promise was kept, else 1.

    Raises:
        GrainShardError: The demo cannot run here; the message says why.
    """
    extra = {"sklearn": "scikit-learn", "tqdm": "tqdm"}
    if missing := [name for module, name in extra.items() if find_spec(module) is None]:
        raise GrainShardError(
            f"the demo needs {' and '.join(missing)}, which is not installed.\n"
            '  remedy: pip install "grain-shard[demo]"'
        )
    if args.epochs < 1 or not 1 <= args.batch_size <= 750:
        raise GrainShardError("--epochs is at least 1, --batch-size from 1 to 750.")
    with tempfile.TemporaryDirectory() as scratch:
        directory = epath.Path(args.distributed or scratch)
        if any(directory.glob("*")):
            raise GrainShardError(f"{directory} is not empty.\n  remedy: name a new folder.")
        if args.distributed:
            jax.distributed.initialize()
        else:
            jax.config.update("jax_num_cpu_devices", _VIRTUAL_DEVICES)
            # By default a machine with few cores has one thread a device, and the collectives of
            # one step can wait for threads that wait in another's.
            os.environ.setdefault("PJRT_NPROC", str(4 * _VIRTUAL_DEVICES))
        if args.hosts > 1:
            jax.config.update("jax_platforms", "cpu")  # which is what the hosts will have
        write_digits(args.data_dir)
        return 0 if (run if args.hosts == 1 else compare)(args, directory) else 1
