"""The demo's model and its training: code to copy into a project of your own."""

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

    All layers are smooth functions, so that rounding errors stay small. With relu, max_pool and
    Adam's usual eps, another number of devices changes some parameters by 1e-2.
    """

    def __init__(self, rngs: nnx.Rngs):
        self.conv1: nnx.Conv = nnx.Conv(1, 32, kernel_size=(3, 3), rngs=rngs)
        self.conv2: nnx.Conv = nnx.Conv(32, 64, kernel_size=(3, 3), rngs=rngs)
        self.linear: nnx.Linear = nnx.Linear(4 * 4 * 64, 10, rngs=rngs)

    def __call__(self, image: jax.Array) -> jax.Array:
        x = nnx.silu(self.conv1(image))
        x = nnx.avg_pool(nnx.silu(self.conv2(x)), window_shape=(2, 2), strides=(2, 2))
        return self.linear(x.reshape(x.shape[0], -1))


@nnx.jit  # under jit the parameters are made on every device of the mesh
def create() -> tuple[Classifier, nnx.Optimizer]:
    """Returns a new model and its optimizer, replicated on the mesh of `jax.set_mesh`."""
    model = Classifier(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(2e-2, eps=1e-3), wrt=nnx.Param)


@nnx.jit
def train_step(model: Classifier, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """Updates the model and the optimizer, and returns the mean loss of the valid rows."""

    def mean_loss(model: Classifier, batch: Batch) -> jax.Array:
        logits, mask = model(batch["image"]), batch["valid_mask"]
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return jnp.sum(loss * mask) / jnp.sum(mask)

    return spmd_train_step(model, optimizer, mean_loss, batch)


@nnx.jit
def eval_step(model: Classifier, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns two counts: valid rows that are classified correctly, and all valid rows."""
    right = jnp.argmax(model(batch["image"]), axis=-1) == batch["label"]
    return jnp.sum(right & batch["valid_mask"]), jnp.sum(batch["valid_mask"])


def train(
    ds: ShardedDataset, directory: epath.Path, stop_at: int | None = None
) -> tuple[Classifier, float]:
    """Trains from the last checkpoint, if there is one, and saves a checkpoint when it stops.

    Args:
        ds: The global batches of all epochs.
        directory: Folder of the checkpoints, which all hosts share.
        stop_at: The step after which to save and stop, like a preempted job; None for the end of
            the dataset.

    Returns:
        The model, and the seconds that the loop took.
    """
    from tqdm import tqdm  # imported only here: --help must work without the optional packages

    model, optimizer = create()
    with ocp.CheckpointManager(directory) as checkpoints, iter(ds) as batches:
        step = checkpoints.latest_step() or 0
        if step:
            state = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            items = ocp.args.Composite(state=state, data=CheckpointRestore(batches))
            nnx.update((model, optimizer), checkpoints.restore(step, args=items).state)

        off = jax.process_index() > 0 or None  # None shows the progress bar on a terminal only
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
    """Returns two counts: records that the model classifies correctly, and all records."""
    counts = [eval_step(model, batch) for batch in ds]
    right, records = (int(sum(column)) for column in zip(*counts, strict=True))
    return right, records
