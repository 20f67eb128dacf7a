"""``python -m grain_shard demo``: from files to a trained model, with an interruption, checked.

`train_step`, `train` and `evaluate`, and the pipelines in `run`, are what a project would copy. The
rest writes the files and holds the library to its word.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from array_record.python.array_record_module import ArrayRecordWriter
from etils import epath
from flax import nnx
from jax.experimental import multihost_utils

from grain_shard import ArrayRecordSource, rehearse
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from grain_shard.errors import GrainShardError
from grain_shard.trees import Batch

_VIRTUAL_DEVICES = 8
_FILES = {"train": 4, "test": 2}
# Of 1,797. Neither it nor the rest is a multiple of 8, so the last batch is padded on any mesh.
_TEST_IMAGES = 297
_MIN_ACCURACY = 0.97
# Adam divides by gradients as small as rounding errors, and hosts add up in another order.
_MAX_DIFFERENCE = 1e-3


class Classifier(nnx.Module):
    """Two convolutions and a linear layer: float32[B, 8, 8, 1] to the logits float32[B, 10]."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.linear = nnx.Linear(4 * 4 * 64, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = nnx.relu(self.conv1(image))
        x = nnx.max_pool(nnx.relu(self.conv2(x)), window_shape=(2, 2), strides=(2, 2))
        return self.linear(x.reshape(x.shape[0], -1))


@partial(nnx.jit, static_argnums=(0, 1))  # under jit, so that all devices of the mesh hold it
def create(seed: int, learning_rate: float) -> tuple[Classifier, nnx.Optimizer]:
    """A new model and its optimizer, on the mesh that is set."""
    model = Classifier(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.adamw(learning_rate), wrt=nnx.Param)


@nnx.jit
def train_step(model: Classifier, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """One update by the mean loss of the valid rows, which it returns."""

    def mean_loss(model: Classifier) -> jax.Array:
        logits, mask = model(batch["image"]), batch["valid_mask"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.sum(loss * mask) / jnp.sum(mask)

    loss, gradients = nnx.value_and_grad(mean_loss)(model)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def eval_step(model: Classifier, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """How many of the valid rows the model gets right, and how many there are."""
    right = jnp.argmax(model(batch["image"]), axis=-1) == batch["label"]
    return jnp.sum(right & batch["valid_mask"]), jnp.sum(batch["valid_mask"])


def train(
    ds: grain.IterDataset[Batch],
    directory: epath.Path,
    *,
    seed: int,
    learning_rate: float,
    stop_at: int | None = None,
) -> tuple[Classifier, float]:
    """Trains to the end of the dataset, from the last checkpoint if there is one.

    Args:
        ds: The global batches of all epochs.
        directory: Where the checkpoints are; on several hosts, a folder that they share.
        seed: Of the parameters.
        learning_rate: Of AdamW.
        stop_at: Save and give up after this step, as a job does that is preempted.

    Returns:
        The model, and the seconds that the loop took.
    """
    model, optimizer = create(seed, learning_rate)
    with ocp.CheckpointManager(directory) as checkpoints, iter(ds) as batches:
        step = checkpoints.latest_step() or 0
        if step:
            restored = checkpoints.restore(
                step,
                args=ocp.args.Composite(
                    model=ocp.args.StandardRestore(nnx.state(model)),
                    optimizer=ocp.args.StandardRestore(nnx.state(optimizer)),
                    data=CheckpointRestore(batches),
                ),
            )
            nnx.update(model, restored.model)
            nnx.update(optimizer, restored.optimizer)
        began = time.perf_counter()
        for batch in progress_bar(batches, total=len(ds), initial=step):
            train_step(model, optimizer, batch)
            step += 1
            if step == stop_at:
                break
        jax.block_until_ready(nnx.state(model))
        seconds = time.perf_counter() - began
        checkpoints.save(
            step,
            args=ocp.args.Composite(
                model=ocp.args.StandardSave(nnx.state(model)),
                optimizer=ocp.args.StandardSave(nnx.state(optimizer)),
                data=CheckpointSave(batches),
            ),
        )
    return model, seconds


def evaluate(model: Classifier, ds: Iterable[Batch]) -> tuple[int, int]:
    """How many records of the dataset the model gets right, and how many there are."""
    counts = [eval_step(model, batch) for batch in ds]
    right, records = (int(sum(column)) for column in zip(*counts, strict=True))
    return right, records


def decode(record: bytes) -> Batch:
    """One record: 64 pixels from 0 to 16, and the digit that they show."""
    *pixels, label = np.frombuffer(record, np.uint8)
    image = np.array(pixels, np.float32).reshape(8, 8, 1) / 16
    return {"image": image, "label": np.int32(label)}


def run(options: argparse.Namespace, directory: epath.Path) -> int:
    """Trains on the hosts that there are, says what happened, and checks it.

    Returns:
        The exit code: 0 if every promise was kept.
    """
    compilations = count_compilations()
    train_source = CountingSource(sorted(options.data_dir.glob("train-*")))
    test_source = ArrayRecordSource(sorted(options.data_dir.glob("test-*")))
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    train_ds = (
        grain.MapDataset.source(train_source)
        .seed(options.seed)
        .shuffle()
        .map(decode)
        .batch(options.batch_size)
        .repeat(options.epochs)
        .shard_to(mesh)
    )
    test_ds = (
        grain.MapDataset.source(test_source).map(decode).batch(options.batch_size).shard_to(mesh)
    )
    show_placement(test_ds, mesh)

    steps, images = len(train_ds), len(train_source)
    middle = options.epochs // 2 * (steps // options.epochs) + steps // options.epochs // 2
    fit = partial(
        train, train_ds, directory, seed=options.seed, learning_rate=options.learning_rate
    )
    with jax.set_mesh(mesh):
        fit(stop_at=middle)
        say(f"interrupted after batch {middle} of {steps}; now a new model and a new iterator")
        model, seconds = fit()
        right, tested = evaluate(model, test_ds)
    say(f"{(steps - middle) * options.batch_size / seconds:,.0f} images per second")

    train_source.reads = 0
    expected = digests(train_ds)[middle:]
    reads = multihost_utils.process_allgather(np.array([train_source.reads])).ravel().tolist()
    with ocp.CheckpointManager(directory) as checkpoints, iter(train_ds) as batches:
        checkpoints.restore(middle, args=ocp.args.Composite(data=CheckpointRestore(batches)))
        resumed = digests(batches)
    # The rows that the last batch of an epoch lacks are all the last hosts'.
    uneven = options.epochs * options.batch_size // len(reads)
    each = ", ".join(f"host {host} {count:,}" for host, count in enumerate(reads))
    return verdict(
        {
            f"test accuracy {right / tested:.2%}, at least {_MIN_ACCURACY:.0%}": (
                right / tested >= _MIN_ACCURACY
            ),
            f"tested on {tested} images, each of the {len(test_source)} once": (
                tested == len(test_source)
            ),
            f"train_step compiled {compilations['jit(train_step)']} time(s)": (
                compilations["jit(train_step)"] == 1
            ),
            f"eval_step compiled {compilations['jit(eval_step)']} time(s)": (
                compilations["jit(eval_step)"] == 1
            ),
            f"{len(resumed)} batches after the restore, the same bits as without it": (
                resumed == expected
            ),
            f"{options.epochs} x {images:,} records read once, in equal shares: {each}": (
                sum(reads) == options.epochs * images and max(reads) - min(reads) <= uneven
            ),
        }
    )


def compare(options: argparse.Namespace, directory: epath.Path) -> int:
    """Trains on one host, then on several with as many devices, and compares what comes out.

    Returns:
        The exit code: 0 if every promise was kept.
    """
    say("--- one host")
    failed = run(options, directory / "one")
    say(f"--- {options.hosts} hosts")
    words = ["--distributed", directory / "several", "--data-dir", options.data_dir]
    for name in ("epochs", "batch_size", "learning_rate", "seed"):
        words += [f"--{name.replace('_', '-')}", getattr(options, name)]
    rehearsal = rehearse.run_script(
        ["-m", "grain_shard", "demo", *map(str, words)],
        hosts=options.hosts,
        devices_per_host=_VIRTUAL_DEVICES // options.hosts,
        echo=sys.stdout,
    )
    if rehearsal.exit_code:
        print(rehearsal.summary(), file=sys.stderr)
        return 1
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    with jax.set_mesh(mesh):
        target = nnx.state(create(options.seed, options.learning_rate)[0])
    ends = []
    for name in ("one", "several"):
        with ocp.CheckpointManager(directory / name) as checkpoints:
            items = ocp.args.Composite(model=ocp.args.StandardRestore(target))
            ends.append(checkpoints.restore(checkpoints.latest_step(), args=items).model)
    difference = max(
        float(jnp.max(jnp.abs(a - b))) for a, b in zip(*map(jax.tree.leaves, ends), strict=True)
    )
    say("--- both")
    return failed | verdict(
        {
            f"parameters differ by at most {difference:.1g} (limit {_MAX_DIFFERENCE:g})": (
                difference <= _MAX_DIFFERENCE
            )
        }
    )


class CountingSource(ArrayRecordSource):
    """Counts the records that this host reads, in whatever thread."""

    def __init__(self, paths):
        super().__init__(paths)
        self.reads, self._lock = 0, threading.Lock()

    def __getitem__(self, index):
        self._count(1)
        return super().__getitem__(index)

    def _getitems(self, indices):
        self._count(len(indices))
        return super()._getitems(indices)

    def _count(self, records: int) -> None:
        with self._lock:
            self.reads += records


def count_compilations() -> Counter[str]:
    """Counts, from now on, how often XLA compiles each function, e.g. ``jit(train_step)``."""
    counts: Counter[str] = Counter()

    def listen(event: str, duration_s: float, **fields: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            counts[fields["fun_name"]] += 1

    jax.monitoring.register_event_duration_secs_listener(listen)
    return counts


def digests(ds: Iterable[Batch]) -> list[str]:
    """Of each batch, a digest of what this host's devices hold of it."""
    return [
        hashlib.sha256(
            b"".join(
                np.asarray(shard.data).tobytes()
                for leaf in jax.tree.leaves(batch)
                for shard in leaf.addressable_shards
            )
        ).hexdigest()
        for batch in ds
    ]


def show_placement(ds: grain.IterDataset[Batch], mesh: jax.sharding.Mesh) -> None:
    """Prints the mesh, and which rows of each leaf are on which device."""
    with iter(ds) as batches:
        leaves = jax.tree.leaves_with_path(next(batches))
    say(f"{mesh.size} devices of {jax.process_count()} host(s), as the mesh {dict(mesh.shape)}")
    for path, leaf in leaves:
        rows = leaf.sharding.shard_shape(leaf.shape)[0]
        say(f"  batch{jax.tree_util.keystr(path):15} {jax.typeof(leaf)!s:26} {rows} rows a device")
    leaf = leaves[0][1]
    for host in range(jax.process_count()):
        rows = [
            f"{range(*index[0].indices(len(leaf)))[0]}.. on {device}"
            for device, index in leaf.sharding.devices_indices_map(leaf.shape).items()
            if device.process_index == host
        ]
        say(f"  host {host}: rows {', '.join(rows)}")


def progress_bar(batches: Iterable[Batch], total: int, initial: int) -> Iterable[Batch]:
    """The batches, with a bar on the first host's terminal, if it has one."""
    from tqdm import tqdm

    off = True if jax.process_index() else None
    return tqdm(batches, "train", total, initial=initial, unit="batch", disable=off)


def write_digits(directory: Path) -> None:
    """Writes scikit-learn's digits as ArrayRecord files, unless they are there.

    The folder gets its name when it is complete, so a run that is killed leaves no half of it.
    """
    if any(directory.glob("train-*")):
        say(f"found the digits in {directory}")
        return
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    records = [bytes([*digits.images[i].astype(int).flat, digits.target[i]]) for i in order]
    splits = {"test": records[:_TEST_IMAGES], "train": records[_TEST_IMAGES:]}
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as scratch:
        complete = Path(scratch, "digits")
        complete.mkdir()
        for split, files in _FILES.items():
            for file in range(files):
                name = f"{split}-{file:05d}-of-{files:05d}.array_record"
                writer = ArrayRecordWriter(str(complete / name), "group_size:1")
                for record in splits[split][file::files]:
                    writer.write(record)
                writer.close()
        try:
            complete.rename(directory)
        except OSError:
            if not any(directory.glob("train-*")):  # or another process was faster
                raise GrainShardError(f"{directory} is no empty folder.") from None
    say(f"wrote the digits to {directory}")


def verdict(promises: dict[str, bool]) -> int:
    """Says which promises were kept (those that were not, on every host); the exit code."""
    for promise, kept in promises.items():
        if kept:
            say(f"  ok: {promise}")
        else:
            print(f"FAILED: {promise}", flush=True)
    return 0 if all(promises.values()) else 1


def say(text: str) -> None:
    """Prints on the first host."""
    if jax.process_index() == 0:
        print(text, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data-dir", type=Path, default=Path("/tmp/demo_wk/cache/digits"))
    parser.add_argument("--hosts", type=int, default=1)
    parser.add_argument("--distributed")


def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as scratch:
        directory = epath.Path(args.distributed or scratch)
        if args.distributed:
            jax.distributed.initialize()
        else:
            jax.config.update("jax_num_cpu_devices", _VIRTUAL_DEVICES)
        write_digits(args.data_dir)
        return (compare if args.hosts > 1 else run)(args, directory)
