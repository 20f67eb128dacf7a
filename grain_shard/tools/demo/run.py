"""Runs the demo: trains a model from files, with an interruption, and checks the result.

For a project of your own, copy the pipelines in `run` and the module `training`. All other code
checks the promises of the library.
"""

from __future__ import annotations

import argparse
import sys

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils

from grain_shard.checkpoint import CheckpointRestore
from grain_shard.sources.array_record_source import ArrayRecordSource
from grain_shard.tools.demo import MIN_ACCURACY, VIRTUAL_DEVICES
from grain_shard.tools.demo.checks import CountingSource, check, count_compilations, digests, say
from grain_shard.tools.demo.digits import decode, digits_folder
from grain_shard.tools.demo.training import create, evaluate, train
from grain_shard.tools.rehearse.rehearsal import run_script
from grain_shard.tools.showing.display import show
from grain_shard.tools.showing.tables import screen_width

# Largest difference allowed between parameters trained on one host and on several. Several hosts
# add up the gradients in another order, which changes the last bits: by 5e-7 at most, in trials
# with seeds 0 to 4.
_MAX_DIFFERENCE = 1e-5
GLOBAL_BATCH_SIZE = 128


def run(args: argparse.Namespace, directory: epath.Path) -> bool:
    """Trains on the hosts of this job, prints each promise, and returns True if all were kept.

    Args:
        args: The options of the command, of which `epochs` is used.
        directory: Folder for the checkpoints, which all hosts share.
    """
    compilations = count_compilations()
    train_source, test_source = (
        CountingSource(ArrayRecordSource(sorted(digits_folder().glob(f"{split}-*"))))
        for split in ("train", "test")
    )
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    # `import grain_shard` adds `.shard_to` to Grain, which no type checker sees. It does see
    # `.pipe(shard_to, mesh)`, which does the same.
    train_ds = (
        grain.MapDataset.source(train_source)
        .seed(0)
        .shuffle()
        .map(decode)
        .batch(GLOBAL_BATCH_SIZE)
        .repeat(args.epochs)
        .shard_to(mesh)  # pyright: ignore[reportAttributeAccessIssue]
    )
    test_ds = (
        grain.MapDataset.source(test_source).map(decode).batch(GLOBAL_BATCH_SIZE).shard_to(mesh)  # pyright: ignore[reportAttributeAccessIssue]
    )
    if jax.process_index() == 0:
        show(test_ds)

    steps, steps_per_epoch = len(train_ds), len(train_ds) // args.epochs
    middle = args.epochs // 2 * steps_per_epoch + steps_per_epoch // 2
    with jax.set_mesh(mesh):
        rows = f"{steps_per_epoch} batches of {GLOBAL_BATCH_SIZE}"
        say(f"{args.epochs} epochs of {len(train_source):,} images, {rows} each; {steps} in all")
        say("compiling the training step, then training ...")
        train(train_ds, directory, stop_at=middle)
        say(f"stopped after batch {middle} of {steps}; going on from its checkpoint:")
        model, seconds = train(train_ds, directory)
        right, tested = evaluate(model, test_ds)
    records = args.epochs * len(train_source)
    say(f"trained on {records * (steps - middle) / steps / seconds:,.0f} examples per second")

    say("comparing the batches after the restore with those of one run ...")
    train_source.read.clear()
    expected = digests(train_ds)[middle:]
    reads = multihost_utils.process_allgather(np.array([len(train_source.read)])).ravel().tolist()
    with ocp.CheckpointManager(directory) as checkpoints, iter(train_ds) as batches:
        checkpoints.restore(middle, args=ocp.args.Composite(data=CheckpointRestore(batches)))
        resumed = digests(batches)
    # The last batch of each epoch is short, so the last hosts read fewer rows of it. The difference
    # is at most one host's rows of a batch in each epoch. All hosts read the same number of rows of
    # every other batch.
    equal = max(reads) - min(reads) <= args.epochs * GLOBAL_BATCH_SIZE // len(reads)
    shares = ", ".join(f"{n:,} reads on host {i}" for i, n in enumerate(reads))
    once = f"{args.epochs} epochs read each of {len(train_source):,} images once ({shares})"
    accuracy = right / tested
    trains, evals = (compilations[f"jit({name})"] for name in ("train_step", "eval_step"))
    promises = [
        check(accuracy >= MIN_ACCURACY, f"test accuracy {accuracy:.2%} (>= {MIN_ACCURACY:.0%})"),
        check(tested == len(test_source), f"{tested} of {len(test_source)} test images counted"),
        check(trains == evals == 1, f"compilations: {trains} of train_step, {evals} of eval_step"),
        check(
            resumed == expected,
            f"{len(expected)} batches after the restore are those of one run, bit for bit",
        ),
        check(equal and sum(reads) == records, once),
    ]
    return all(promises)


def compare(args: argparse.Namespace, directory: epath.Path) -> bool:
    """Trains on one host, then on several with as many devices in all, and compares the results.

    Args:
        args: The options of the command, of which `epochs` and `hosts` are used.
        directory: Folder for the checkpoints of both runs.

    Returns:
        True if the promises of both runs were kept and the parameters of both runs agree. If a host
        of the second run failed or broke a promise, its last lines are printed to stderr.
    """
    say("1 host")
    if not run(args, directory / "1"):
        return False
    say(f"{args.hosts} hosts")
    command = ["-m", "grain_shard", "demo", "--distributed", str(directory / "n")]
    command += ["--epochs", str(args.epochs)]
    say(f"starting {args.hosts} processes ...")
    rehearsal = run_script(
        command,
        hosts=args.hosts,
        devices_per_host=VIRTUAL_DEVICES // args.hosts,
        timeout_s=600,
        env={"COLUMNS": str(screen_width() - len("[host 0] "))},
        echo=sys.stdout,
    )
    if rehearsal.exit_code:
        print(f"demo: {rehearsal.summary()}", file=sys.stderr)
        return False
    with jax.set_mesh(jax.make_mesh((jax.device_count(),), ("data",))):
        items = ocp.args.Composite(state=ocp.args.StandardRestore(nnx.state(create())))
    states = []
    for run_directory in (directory / "1", directory / "n"):
        with ocp.CheckpointManager(run_directory) as checkpoints:
            states.append(checkpoints.restore(checkpoints.latest_step(), args=items).state)
    difference = jax.tree.map(lambda a, b: float(jnp.max(jnp.abs(a - b))), *states)
    largest = max(jax.tree.leaves(difference))
    return check(
        largest <= _MAX_DIFFERENCE,
        f"parameters and optimizer of {args.hosts} hosts differ from those of 1 host by at most"
        f" {largest:.1g} (<= {_MAX_DIFFERENCE:g})",
    )
