# /// script
# requires-python = "==3.13.*"
# dependencies = ["flax==0.12.12", "jax==0.12.0.1", "jaxlib==0.12.0.1"]
#
# [tool.clients]
# lowest = ["flax==0.12.6", "jax==0.9.0", "jaxlib==0.9.0"]
# lowest-python = "==3.11.*"
# ///
"""A loop like that of flax's mnist example: a small CNN of NNX, on Explicit and on Auto axes."""

import dataclasses
import itertools

import grain
import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType

import grain_shard
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from grain_shard.training import place_nnx_state_on_shards
from tests.clients import checking

NUM_EPOCHS, TEST_ROWS = 2, 40
# Six batches an epoch, of which the last one has ten rows.
LABELS = np.random.default_rng(0).integers(0, 4, 90)
IMAGES = np.random.default_rng(1).normal(scale=0.3, size=(90, 8, 8, 1)).astype(np.float32)
IMAGES[np.arange(90), LABELS * 2] += 1


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 4, (3, 3), use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(64, 4, rngs=rngs)

    def __call__(self, images, mask=None):
        where = None if mask is None else mask[:, None, None, None]
        x = self.norm(self.conv(images), mask=where)
        x = nnx.avg_pool(nnx.relu(x), (2, 2), (2, 2))
        return self.out(x.reshape(len(x), -1))


# recipe
def batches_of(images, labels, mesh, num_epochs=1):
    ds = grain.MapDataset.source(grain_shard.ArraySource({"image": images, "label": labels}))
    return ds.seed(0).shuffle().batch(16).repeat(num_epochs).shard_to(mesh)


def loss_fn(model, batch):
    logits = model(batch["image"], mask=batch["valid_mask"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(where=batch["valid_mask"]), (logits, losses)


# end of recipe


@nnx.jit
def train_step(model, optimizer, batch):
    (loss, _), gradients = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
    optimizer.update(model, gradients)
    return loss


@nnx.jit
def eval_step(model, metrics, batch):
    _, (logits, losses) = loss_fn(model, batch)
    metrics.update(logits=logits, labels=batch["label"], loss=losses, mask=batch["valid_mask"])


def make_model():
    """A model and its optimizer, whose arrays are on the mesh in use."""
    model = CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.02), wrt=nnx.Param)
    state = nnx.state((model, optimizer))
    placed = place_nnx_state_on_shards(state, jax.sharding.get_mesh(), {...: jax.P()})
    nnx.update((model, optimizer), placed)
    return model, optimizer


def make_metrics():
    return nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))


@nnx.jit
def own_step(model, optimizer, batch):
    def loss_fn(model):
        logits = model(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()

    loss, gradients = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, gradients)
    return loss


def own_train(job, mesh):
    """The same loop with Grain alone, on one host: each epoch ends with a short batch."""

    def batches_of(count, epochs=1):
        source = grain_shard.ArraySource({"image": IMAGES[:count], "label": LABELS[:count]})
        ds = grain.MapDataset.source(source).seed(0).shuffle().batch(16).repeat(epochs)
        return (jax.device_put(batch, jax.NamedSharding(mesh, jax.P("data"))) for batch in ds)

    model, optimizer = make_model()
    for batch in itertools.islice(batches_of(len(LABELS), NUM_EPOCHS), job.stop):
        job.step(batch, own_step(model, optimizer, batch))
    model.eval()
    for _ in range(2):
        metrics = make_metrics()
        for batch in batches_of(TEST_ROWS):
            logits = model(batch["image"])
            losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
            metrics.update(logits=logits, labels=batch["label"], loss=losses)
        note(metrics, job)


def valid_rows(batch):
    """The global rows of a batch, without padding: the loop's own input has none."""
    rows = multihost_utils.process_allgather(batch, tiled=True)
    mask = rows.pop("valid_mask")
    return {name: array[mask] for name, array in rows.items()}


def note(metrics, job):
    job.evaluations.append([f"{name} {value:.4f}" for name, value in metrics.compute().items()])


def train(job, mesh):
    model, optimizer = make_model()
    state = nnx.state((model, optimizer))
    folder = job.checkpoints / mesh.axis_types[0].name
    ds = batches_of(IMAGES, LABELS, mesh, NUM_EPOCHS)
    with ocp.CheckpointManager(folder) as manager, iter(ds) as batches:
        if (step := manager.latest_step()) is not None:
            items = {"state": ocp.args.StandardRestore(state), "data": CheckpointRestore(batches)}
            state = manager.restore(step, args=ocp.args.Composite(**items))["state"]
            nnx.update((model, optimizer), state)
        for batch in itertools.islice(batches, job.stop - (step or 0)):
            job.step(valid_rows(batch), train_step(model, optimizer, batch))
        state = nnx.state((model, optimizer))
        items = {"state": ocp.args.StandardSave(state), "data": CheckpointSave(batches)}
        manager.save(job.stop, args=ocp.args.Composite(**items))
    model.eval()
    for _ in range(2):
        metrics = make_metrics()
        for batch in batches_of(IMAGES[:TEST_ROWS], LABELS[:TEST_ROWS], mesh):
            eval_step(model, metrics, batch)
        note(metrics, job)


def run(job):
    parts = []
    for axes in (AxisType.Explicit, AxisType.Auto):
        part = dataclasses.replace(job, batches=[], losses=[], evaluations=[])
        mesh = jax.make_mesh((jax.device_count(),), ("data",), (axes,))
        with jax.set_mesh(mesh):
            (train if job.ours else own_train)(part, mesh)
        parts.append(part)
    explicit, auto = parts
    assert auto.batches == explicit.batches
    np.testing.assert_allclose(auto.losses, explicit.losses, rtol=1e-5)
    assert auto.evaluations == explicit.evaluations
    vars(job).update(vars(explicit))


if __name__ == "__main__":
    checking.main(run, off_own=1e-5)
