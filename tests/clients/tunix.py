# /// script
# requires-python = "==3.12.*"
# dependencies = ["google-tunix==0.1.7", "jax==0.12.0.1", "jaxlib==0.12.0.1"]
# ///
"""Tunix: its `PeftTrainer`, with its own `TrainingInput` for the batches."""

import flax.nnx as nnx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.sft import hooks
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

import grain_shard  # noqa: F401
from tests.clients import checking


# recipe
class Sharded(hooks.DataHooks):
    def __init__(self, trainer, mesh, train_ds, eval_ds):  # both end in .batch(global_batch_size)
        spec = jax.P(*trainer.config.data_sharding_axis)
        self.train_batches = iter(train_ds.shard_to(mesh, spec, mask_key=None))
        self.eval_batches = iter(eval_ds.shard_to(mesh, spec, mask_key=None))
        self.train_batches.seek(trainer.iter_steps)  # 0 in a new run

    def load_next_train_batch(self, trainer):
        return next(self.train_batches, None)

    def load_next_eval_batch(self, trainer):
        batch = next(self.eval_batches, None)
        if batch is None:
            self.eval_batches.reset()
        return batch


def train(trainer, mesh, train_ds, eval_ds):
    data = Sharded(trainer, mesh, train_ds, eval_ds)
    trainer.with_data_hooks(data)
    trainer.train(data.train_batches, data.eval_batches)


# end of recipe


def pipeline(first, end):
    def tokens(i, rng):
        length = rng.integers(5, 17)
        row = np.where(np.arange(16) < length, (i * 7 + np.arange(16) * (i % 3 + 1)) % 50 + 1, 0)
        return TrainingInput(row.astype(np.int32), (row > 0).astype(np.int32))

    return grain.MapDataset.range(first, end).seed(1).shuffle().random_map(tokens)


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(64, 16, rngs=rngs)
        self.hidden = nnx.Linear(16, 32, rngs=rngs)
        self.logits = nnx.Linear(32, 64, rngs=rngs)

    def __call__(self, tokens, positions, cache, attention_mask):
        return self.logits(nnx.tanh(self.hidden(self.embedding(tokens)))), None


@nnx.jit
def make_model():
    model = Model(nnx.Rngs(0))
    state = jax.lax.with_sharding_constraint(nnx.state(model), jax.P())
    nnx.update(model, state)
    return model


def model_input(example):
    length = example.input_tokens.shape[1]
    return {
        "input_tokens": example.input_tokens,
        "input_mask": example.input_mask,
        "positions": jnp.broadcast_to(jnp.arange(length), example.input_tokens.shape),
        "attention_mask": None,
    }


class Losses(hooks.TrainingHooks):
    def __init__(self, job):
        self._job = job

    def on_train_step_end(self, trainer, step, loss):
        self._job.loss(loss)

    def on_nothing(self, *args):
        pass

    on_train_start = on_train_end = on_train_step_start = on_nothing
    on_eval_step_start = on_eval_step_end = on_nothing


def run(job):
    class Noting(PeftTrainer):
        def _prepare_inputs(self, batch):
            if "eval" in str(self._mode).lower():
                job.evaluations[-1].append(checking.digest(batch))
            else:
                job.batch(batch)
            return batch

        def _run_eval(self, *args):
            job.evaluations.append([])
            super()._run_eval(*args)

    mesh = jax.make_mesh((jax.device_count(),), ("fsdp",), (jax.sharding.AxisType.Auto,))
    with mesh:
        config = TrainingConfig(
            eval_every_n_steps=3,
            max_steps=job.stop,
            checkpoint_root_directory=str(job.checkpoints),
        )
        trainer = Noting(make_model(), optax.adam(0.02), config)
        trainer.with_gen_model_input_fn(model_input).with_training_hooks(Losses(job))
        train_ds, eval_ds = pipeline(0, 400).batch(16), pipeline(400, 448).batch(16)
        if job.ours:
            train(trainer, mesh, train_ds, eval_ds)
        else:
            eval_ds = eval_ds.to_iter_dataset()
            trainer.train(train_ds.to_iter_dataset(), eval_ds)


if __name__ == "__main__":
    checking.main(run)
