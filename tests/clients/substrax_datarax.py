# /// script
# requires-python = "==3.13.*"
# dependencies = ["datarax==0.1.17", "substrax==0.1.22", "jax==0.11.1", "jaxlib==0.11.1", "pytest"]
#
# [tool.clients]
# note = "substrax 0.1.22, which asks for jax<0.11.2"
# ///
"""datarax's `Pipeline` with substrax's meshes, training step and checkpoint store."""

import importlib
import re
import subprocess
import sys
import types

import datarax
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from substrax.checkpoint import OrbaxCheckpointStore

import grain_shard
from tests.clients import checking

THEIRS = ("substrax.devices", "substrax.mesh", "substrax.spmd", "datarax")
OURS = ("grain_shard.placement", "grain_shard.training")
ARRAYS = {"x": np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)}
ARRAYS["y"] = ARRAYS["x"].sum(1, keepdims=True)


def compare_names(folder):
    """The table of docs/coming_from.md, beside what is installed here."""
    tests = ["tests/test_coming_from.py", "-k", "TestNames"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout
    print(said, flush=True)
    assert re.search(r"^\d+ passed, \d+ deselected in", said, re.MULTILINE)


def names_of(modules):
    """The public names of several modules, so that one program runs with either's."""
    found = [importlib.import_module(module) for module in modules]
    return types.SimpleNamespace(
        **{n: getattr(module, n) for module in found for n in module.__all__}
    )


def loss_fn(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def make_model(names, mesh):
    """The part in which only the import changes."""
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    state = nnx.state((model, optimizer))
    nnx.update((model, optimizer), names.place_nnx_state_on_shards(state, mesh, {...: jax.P()}))
    train_step = nnx.jit(
        lambda model, optimizer, batch: names.spmd_train_step(model, optimizer, loss_fn, batch)
    )
    return model, lambda batch: train_step(model, optimizer, batch)


# recipe
def batches_of(arrays, mesh):
    ds = grain.MapDataset.source(grain_shard.ArraySource(arrays))
    return iter(ds.batch(16).shard_to(mesh))


def train(model, train_step, batches, store, last_step, on_step):
    first = store.latest_step() or 0
    if first:
        items = store.restore(first, templates={"model": nnx.to_pure_dict(nnx.state(model))}).items
        nnx.update(model, items["model"])
        batches.set_state(items["data_iterator"])
    for _ in range(first, last_step):
        batch = next(batches)
        on_step(batch, train_step(batch))
    items = {"model": nnx.to_pure_dict(nnx.state(model)), "data_iterator": batches.get_state()}
    store.save(last_step, items)


# end of recipe


def own_train(names, job):
    mesh = names.DeviceMeshManager.create_data_parallel_mesh()
    _, train_step = make_model(names, mesh)
    rows = names.create_data_parallel_sharding(mesh)
    pipeline = datarax.Pipeline.from_arrays(ARRAYS, batch_size=16, seed=0)
    for _, batch in zip(range(job.stop), pipeline, strict=False):
        batch = names.place_batch_on_shards(batch, rows)
        job.step(batch, train_step(batch))
    for _ in range(2):
        test = {name: array[:48] for name, array in ARRAYS.items()}
        pipeline = datarax.Pipeline.from_arrays(test, batch_size=16, seed=0)
        job.evaluation(names.prefetch_to_device(iter(pipeline), device=rows))


def run(job):
    names = names_of(OURS if job.ours else THEIRS)
    if not job.ours:
        own_train(names, job)
        return
    mesh = names.create_1d_mesh()
    model, train_step = make_model(names, mesh)
    with OrbaxCheckpointStore(job.checkpoints) as store, batches_of(ARRAYS, mesh) as batches:
        train(model, train_step, batches, store, job.stop, job.step)
    with batches_of({name: array[:48] for name, array in ARRAYS.items()}, mesh) as batches:
        job.evaluation(batches)
        batches.reset()
        job.evaluation(batches)


if __name__ == "__main__":
    checking.main(run, compare_names)
