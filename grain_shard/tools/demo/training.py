"""The demo's model and its training: the part that a project would copy."""

from __future__ import annotations

import time
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp
from etils import epath
from flax import nnx

from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.training import spmd_train_step
from grain_shard.trees import Batch


class Classifier(nnx.Module):
    """Two convolutions and a linear layer: float32[B, 8, 8, 1] to the logits float32[B, 10].

    It is smooth, so that rounding errors stay small: with relu, max_pool and Adam's usual eps they
    grow to differences of 1e-2 in some parameters, on another number of devices already.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.conv1: nnx.Conv = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.conv2: nnx.Conv = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.linear: nnx.Linear = nnx.Linear(4 * 4 * 64, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = nnx.silu(self.conv1(image))
        x = nnx.avg_pool(nnx.silu(self.conv2(x)), window_shape=(2, 2), strides=(2, 2))
        return self.linear(x.reshape(x.shape[0], -1))


@nnx.jit  # so that every device of the mesh has a copy
def create() -> tuple[Classifier, nnx.Optimizer]:
    """A new model and its optimizer, on the mesh that is set."""
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(2e-2, eps=1e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model: Classifier, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """One update by the mean loss of the valid rows, which it returns."""

    def mean_loss(model: Classifier, batch: Batch) -> jax.Array:
        logits, mask = model(batch["image"]), batch["valid_mask"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.sum(loss * mask) / jnp.sum(mask)

    return spmd_train_step(model, optimizer, mean_loss, batch)


@nnx.jit
def eval_step(model: Classifier, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Counts the valid rows that the model gets right, and the valid rows."""
    right = jnp.argmax(model(batch["image"]), axis=-1) == batch["label"]
    return jnp.sum(right & batch["valid_mask"]), jnp.sum(batch["valid_mask"])


def train(
    ds: ShardedDataset, directory: epath.Path, stop_at: int | None = None
) -> tuple[Classifier, float]:
    """Trains to the end of the dataset, from the last checkpoint if there is one.

    Args:
        ds: The global batches of all epochs.
        directory: Where the checkpoints are; on several hosts, a folder that they share.
        stop_at: Save and give up after this step, as a job does that is preempted.

    Returns:
        The model, and the seconds that the loop took.
    """
    from tqdm import tqdm  # here, since --help has to work without the extra

    model, optimizer = create()
    with ocp.CheckpointManager(directory) as checkpoints, iter(ds) as batches:
        step = checkpoints.latest_step() or 0
        if step:
            state = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            items = ocp.args.Composite(state=state, data=CheckpointRestore(batches))
            nnx.update((model, optimizer), checkpoints.restore(step, args=items).state)

        off = jax.process_index() > 0 or None  # None: off unless there is a terminal
        began = time.perf_counter()
        for batch in tqdm(batches, "train", len(ds), unit="batch", initial=step, disable=off):
            train_step(model, optimizer, batch)
            step += 1
            if step == stop_at:
                break
        jax.block_until_ready(nnx.state(model))
        seconds = time.perf_counter() - began

        state = ocp.args.StandardSave(nnx.state((model, optimizer)))
        items = ocp.args.Composite(state=state, data=CheckpointSave(batches))
        checkpoints.save(step, args=items)
    return model, seconds


def evaluate(model: Classifier, ds: Iterable[Batch]) -> tuple[int, int]:
    """Counts the records of the dataset that the model gets right, and all records."""
    counts = [eval_step(model, batch) for batch in ds]
    right, records = (int(sum(column)) for column in zip(*counts, strict=True))
    return right, records
