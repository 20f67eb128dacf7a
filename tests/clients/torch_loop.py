# /// script
# requires-python = "==3.11.*"
# dependencies = ["torch==2.13.0", "torchdata==0.11.0", "jax==0.10.2", "jaxlib==0.10.2"]
#
# [tool.clients]
# lowest = ["torch==2.13.0", "jax==0.9.0", "jaxlib==0.9.0"]
# note = "only this torch: others bring gigabytes of CUDA"
# ///
"""A loop over a PyTorch `DataLoader` with a `DistributedSampler`, saved by `torch.save`."""

import functools
import itertools

import grain
import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

import grain_shard
from grain_shard.training import place_model_state_on_shards
from tests.clients import checking

NUM_EPOCHS = 5


class Lines(torch.utils.data.Dataset):
    def __init__(self, rows):
        self.x = torch.from_numpy(np.random.default_rng(rows).normal(size=(rows, 4))).float()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.x[index].sum()}


@jax.jit
def train_step(state, batch):
    def loss(w):
        return jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.1 * gradient, "step": state["step"] + 1}, value


def make_state():
    return {"w": jnp.zeros(4), "step": 0}


def own_train(dataset, sampler, job, place):
    loader = DataLoader(dataset, batch_size=16, sampler=sampler)
    state = make_state()
    for epoch in range(NUM_EPOCHS):
        sampler.set_epoch(epoch)
        for batch in loader:
            batch = place(jax.tree.map(np.asarray, batch))
            state, loss = train_step(state, batch)
            job.step(batch, loss)
            if state["step"] == job.stop:
                return


# recipe
def batches_of(dataset, sampler, mesh, num_epochs):
    def order(epoch):  # sampler: DistributedSampler(dataset, num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        return sampler

    indices = [index for epoch in range(num_epochs) for index in order(epoch)]
    rows = grain.MapDataset.source(indices).map(lambda i: jax.tree.map(np.asarray, dataset[i]))
    return rows.batch(16).shard_to(mesh)


def train(dataset, sampler, mesh, path, last_step, on_step):
    state = make_state()
    with iter(batches_of(dataset, sampler, mesh, NUM_EPOCHS)) as batches:
        if path.exists():
            saved = torch.load(path, weights_only=False)
            state = place_model_state_on_shards(saved["state"], mesh)
            batches.set_state(saved["data"])
        for batch in itertools.islice(batches, last_step - int(state["step"])):
            state, loss = train_step(state, batch)
            on_step(batch, loss)
        if jax.process_index() == 0:
            state = jax.tree.map(np.asarray, state)
            torch.save({"state": state, "data": batches.get_state()}, path)


# end of recipe


def run(job):
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    place = functools.partial(grain_shard.placement.distribute_batch, sharding=mesh)
    dataset, test = Lines(80), Lines(48)
    sampler = DistributedSampler(dataset, num_replicas=1, rank=0, seed=7)
    with jax.set_mesh(mesh):
        if job.ours:
            train(dataset, sampler, mesh, job.checkpoints / "last.pt", job.stop, job.step)
            rows = grain.MapDataset.source(test).map(lambda row: jax.tree.map(np.asarray, row))
            with iter(rows.batch(16).shard_to(mesh)) as batches:
                job.evaluation(batches)
                batches.reset()
                job.evaluation(batches)
        else:
            own_train(dataset, sampler, job, place)
            for _ in range(2):
                loader = DataLoader(test, batch_size=16)
                job.evaluation(jax.tree.map(np.asarray, batch) for batch in loader)


class Halves(torch.utils.data.IterableDataset):
    """A dataset whose own state has a leaf that no state can have."""

    def __iter__(self):
        return iter(Lines(80))

    def state_dict(self):
        return {"scale": torch.ones(2, dtype=torch.bfloat16)}

    def load_state_dict(self, state):
        raise AssertionError("it was never saved")


def streams(job):
    """Loaders of torchdata, as they are."""
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    # What is restored begins with another seed, which the generator in the state replaces.
    seeds = itertools.chain([7], itertools.cycle([7, 8]))

    def shuffled():
        generator = torch.Generator().manual_seed(next(seeds))
        loader = StatefulDataLoader(Lines(80), 16, shuffle=True, generator=generator)
        return grain_shard.from_iterable(loader, rows="global").shard_to(mesh)

    def divided():
        sampler = StatefulDistributedSampler(Lines(80), job.hosts, jax.process_index(), seed=7)
        loader = StatefulDataLoader(Lines(80), 16 // job.hosts, sampler=sampler)
        return grain_shard.from_iterable(loader, rows="local").shard_to(mesh)

    job.resumes("StatefulDataLoader", shuffled)
    job.resumes("StatefulDistributedSampler", divided)
    halves = grain_shard.from_iterable(StatefulDataLoader(Halves(), 16), rows="global")
    refusal = ""
    with iter(halves.shard_to(mesh)) as batches:
        try:
            batches.get_state()
        except grain_shard.StateError as error:
            refusal = str(error)
    assert "['scale'] is of type torch.bfloat16[2]" in refusal, refusal


if __name__ == "__main__":
    checking.main(run, streams=streams)
