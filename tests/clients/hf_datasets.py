# /// script
# requires-python = "==3.12.*"
# dependencies = ["datasets==5.2.0", "orbax-checkpoint==0.12.8", "jax==0.11.1", "jaxlib==0.11.1"]
#
# [tool.clients]
# lowest = ["datasets==3.1.0", "orbax-checkpoint==0.11.32", "jax==0.9.0", "jaxlib==0.9.0"]
# ///
"""Hugging Face `datasets`: a table on disk, shuffled and mapped by `datasets`, read by row."""

import datasets
import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from datasets.distributed import split_dataset_by_node

import grain_shard
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from tests.clients import checking


def make_data(folder):
    rng = np.random.default_rng(0)
    for split, rows in (("train", 200), ("test", 48)):
        x = rng.normal(size=(rows, 4)).astype(np.float32)
        columns = {"x": x, "y": x.sum(1), "name": [f"row {i}" for i in range(rows)]}
        datasets.Dataset.from_dict(columns).save_to_disk(folder / split)


def prepared(folder, split):
    """The part that stays as it is: whatever `datasets` does before the batches."""
    table = datasets.load_from_disk(str(folder / split)).remove_columns("name")
    table = table.map(lambda row: {"y": 2 * row["y"] + 1}, keep_in_memory=True)
    return table.shuffle(seed=3).with_format("numpy")


@jax.jit
def train_step(state, batch):
    def loss(w):
        return jnp.mean((batch["x"] @ w["w"] + w["b"] - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["w"])
    w = jax.tree.map(lambda w, g: w - 0.1 * g, state["w"], gradient)
    return {"w": w, "step": state["step"] + 1}, value


def make_state():
    return {"w": {"w": jnp.zeros(4), "b": jnp.zeros(())}, "step": jnp.zeros((), jnp.int32)}


# recipe
def batches_of(table, mesh):
    return grain.MapDataset.source(table).batch(16).shard_to(mesh)


def train(table, mesh, manager, last_step, on_step):
    state = make_state()
    with iter(batches_of(table, mesh)) as batches:
        if (step := manager.latest_step()) is not None:
            items = {"state": ocp.args.StandardRestore(state), "data": CheckpointRestore(batches)}
            state = manager.restore(step, args=ocp.args.Composite(**items))["state"]
        for batch in batches:
            state, loss = train_step(state, batch)
            on_step(batch, loss)
            if state["step"] == last_step:
                break
        items = {"state": ocp.args.StandardSave(state), "data": CheckpointSave(batches)}
        manager.save(last_step, args=ocp.args.Composite(**items))


# end of recipe


def run(job):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    table, test = prepared(job.data, "train"), prepared(job.data, "test")
    with jax.set_mesh(mesh):
        if job.ours:
            with ocp.CheckpointManager(job.checkpoints) as manager:
                train(table, mesh, manager, job.stop, job.step)
            with iter(batches_of(test, mesh)) as batches:
                job.evaluation(batches)
                batches.reset()
                job.evaluation(batches)
        else:
            state = make_state()
            for batch, _ in zip(table.iter(16), range(job.stop), strict=False):
                state, loss = train_step(state, grain_shard.placement.distribute_batch(batch, mesh))
                job.step(batch, loss)
            for _ in range(2):
                job.evaluation(test.iter(16))


def streams(job):
    """What `datasets` reads in order, as with ``streaming=True``."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))

    def rows():
        table = prepared(job.data, "train").with_format(None)
        return table.to_iterable_dataset(num_shards=4).with_format("numpy")

    def whole():
        return grain_shard.from_iterable(rows().batch(16), rows="global").shard_to(mesh)

    def divided():
        own = split_dataset_by_node(rows(), jax.process_index(), job.hosts)
        own = own.batch(16 // job.hosts)
        return grain_shard.from_iterable(own, rows="local").shard_to(mesh)

    def make_feed(feed):
        return grain_shard.from_iterable(rows().shard(feed.shard_count, feed.shard_index))

    job.resumes("IterableDataset", whole)
    job.resumes("split_dataset_by_node", divided)
    feeds = grain_shard.feeds(make_feed, num_feeds=4)
    job.resumes("feeds of an IterableDataset", lambda: feeds.batch(16).shard_to(mesh))


if __name__ == "__main__":
    checking.main(run, make_data, streams=streams)
