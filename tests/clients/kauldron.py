# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "kauldron==1.4.4",
#     "jax==0.12.0.1",
#     "jaxlib==0.12.0.1",
#     "altair",
#     "chex",
#     "clu",
#     "einops",
#     "etils[edc,enp,epath,epy,etree]",
#     "graphviz",
#     "immutabledict",
#     "jaxtyping",
#     "lark",
#     "mediapy",
#     "ml_collections",
#     "opencv-python-headless",
#     "pandas",
#     "scikit-image",
#     "scikit-learn",
#     "tabulate",
#     "tensorboard",
#     "tensorflow-cpu==2.21.0",
#     "tensorflow_datasets==4.9.10",
#     "tqdm",
#     "typeguard",
#     "xmanager",
# ]
#
# [tool.clients]
# no-deps = ["kauldron", "xmanager"]
# ///
"""Kauldron's `Trainer`, `Checkpointer` and `Evaluator`, with its own pipeline of Grain."""

import dataclasses

import jax
import numpy as np
import optax
from flax import linen as nn
from kauldron import kd
from kauldron.data.iterators import PyGrainIterator

import grain_shard  # noqa: F401
from grain_shard.checkpoint import CheckpointItem
from tests.clients import checking


class Lines:
    def __init__(self, rows):
        self.x = np.random.default_rng(0).normal(size=(rows, 4)).astype(np.float32)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return {"x": self.x[index], "y": self.x[index].sum(keepdims=True)}


class Model(nn.Module):
    x: kd.kontext.Key = "batch.x"

    @nn.compact
    def __call__(self, x):
        return nn.Dense(1)(x)


# recipe
class ShardedIterator(CheckpointItem, PyGrainIterator): ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sharded(kd.data.py.DataSource):  # or of Tfds, or of your data source
    shard_by_process: bool = False  # .shard_to divides the records

    def __iter__(self):
        ds = self._root_map_ds.batch(self.batch_size)
        ds = ds.shard_to(kd.sharding.FIRST_DIM, remainder="drop", mask_key=None)
        return ShardedIterator(source=self, iter=iter(ds))


def device_put(arrays, sharding, place=kd.sharding.device_put):  # batches are placed already
    return jax.tree.map(lambda x: x if isinstance(x, jax.Array) else place(x, sharding), arrays)


kd.sharding.device_put = device_put

# end of recipe


@dataclasses.dataclass(frozen=True, eq=True, kw_only=True)
class NotedStep(kd.train.TrainStep):
    job: checking.Run = dataclasses.field(hash=False, compare=False)

    def step(self, state, batch, **kwargs):
        is_noted = int(jax.device_get(state.step)) < self.job.stop
        state, aux = super().step(state, batch, **kwargs)
        if is_noted:
            with jax.transfer_guard("allow"):
                self.job.step(batch, aux.compute(flatten=False).loss_values["total"])
        return state, aux


def run(job):
    def pipeline(rows, num_epochs):
        kind = Sharded if job.ours else kd.data.py.DataSource
        return kind(
            data_source=Lines(rows),
            shuffle=True,
            batch_size=16,
            num_epochs=num_epochs,
            num_workers=0,
        )

    evaluator = kd.evals.Evaluator(run=kd.evals.EveryNSteps(4), ds=pipeline(48, 1))
    trainer = kd.train.Trainer(
        seed=1,
        workdir=str(job.checkpoints),
        train_ds=pipeline(200, None),
        model=Model(),
        optimizer=optax.sgd(0.1),
        train_losses={"loss": kd.losses.L2(preds="preds", targets="batch.y")},
        num_train_steps=job.stop,
        log_metrics_every=1,
        checkpointer=kd.ckpts.Checkpointer(save_interval_steps=checking.STOP),
        trainstep=NotedStep(job=job),
        evals={"eval": evaluator},
        writer=None,
    )
    trainer.train()
    with jax.transfer_guard("allow"):
        for _ in range(2):
            job.evaluation(trainer.evals["eval"].ds_iter)


if __name__ == "__main__":
    checking.main(run)
