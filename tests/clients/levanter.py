# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "marin-levanter==0.2.227.dev40316220070",
#     "marin-finelog==0.2.71.dev40003900277",
#     "marin-iris-native==0.1.15.dev39984932175",
#     "jax==0.11.2",
#     "jaxlib==0.11.2",
#     "tensorstore==0.1.84",
#     "pyarrow==26.0.1",
#     "datasets==4.8.5",
# ]
#
# [tool.clients]
# note = "a pre-release, which asks for jax<0.12"
# ///
"""Levanter's `Trainer`, with a tiny GPT-2."""

import grain
import haliax as hax
import jax
import numpy as np
import optax
from levanter.checkpoint import CheckpointerConfig
from levanter.data.dataset import ListAsyncDataset
from levanter.distributed import DistributedConfig
from levanter.models.gpt2 import Gpt2Config
from levanter.models.lm_model import LmExample
from levanter.tracker import NoopConfig
from levanter.trainer import Trainer, TrainerConfig

import grain_shard
from tests.clients import checking

MODEL = Gpt2Config(max_seq_len=16, hidden_dim=16, num_layers=1, num_heads=2)
Pos, Vocab = MODEL.max_Pos, hax.Axis("vocab", 32)
EOS = 0
TOKENS = (np.random.default_rng(0).integers(0, 32, (200, 16)) // 4 * 4).astype(np.int32)


def config(job):
    saved = CheckpointerConfig(
        base_path=str(job.checkpoints), save_interval=None, append_run_id_to_base_path=False
    )
    return TrainerConfig(
        id="run",
        tracker=NoopConfig(),
        train_batch_size=16,
        num_train_steps=job.stop,
        checkpointer=saved,
        distributed=DistributedConfig(initialize_jax_distributed=False),
        require_accelerator=False,
        log_jaxprs=False,
        log_xla_hlo=False,
        log_dir=job.checkpoints / "logs",
    )


# recipe
def batches_from(step, trainer, ds):
    """Replaces `trainer.data_loader(dataset).iter_from_step(step)`."""
    mapping, batch_name = trainer.compute_axis_mapping, trainer.config.batch_axis_name
    Batch = hax.Axis(batch_name, trainer.config.train_batch_size)

    @hax.named_jit(axis_resources=mapping)
    def examples(tokens):
        return hax.vmap(LmExample.causal, Batch)(hax.named(tokens, (Batch, Pos)), eos_id=EOS)

    ds = ds.batch(Batch.size)
    ds = ds.shard_to(trainer.device_mesh, jax.P(mapping[batch_name]), mask_key=None)
    with iter(ds) as batches:
        batches.seek(int(step))
        yield from map(examples, batches)


# end of recipe


TRAIN = grain.MapDataset.source(grain_shard.ArraySource(TOKENS)).seed(0).shuffle()
TEST = grain.MapDataset.source(grain_shard.ArraySource(TOKENS[:48]))


def own(ds):
    """Levanter's own dataset of the records of ours."""
    return ListAsyncDataset([LmExample.causal(hax.named(row, Pos), eos_id=EOS) for row in ds])


def run(job):
    def loss_function(model, example, *, key=None):
        return model.compute_next_token_loss(example, key=key)

    given = config(job)
    given.initialize()
    key, model_key = jax.random.split(jax.random.PRNGKey(0))
    with Trainer(given, optax.adam(1e-2), loss_function) as trainer:
        state = trainer.initial_state(key, model_init=lambda: MODEL.build(Vocab, key=model_key))
        if job.ours:
            batches = batches_from(state.step, trainer, TRAIN.repeat())
        else:
            batches = trainer.data_loader(own(TRAIN)).iter_from_step(state.step)

        def noted():
            for batch in batches:
                job.batch(batch)
                yield batch

        def note_loss(info):  # the last step's comes twice
            if len(job.losses) < len(job.batches):
                job.loss(info.loss)

        trainer.add_hook(note_loss, every=1)
        trainer.train(state, noted())
        for _ in range(2):
            if job.ours:
                job.evaluation(batches_from(0, trainer, TEST))
            else:
                job.evaluation(trainer.data_loader(own(TEST)))


if __name__ == "__main__":
    checking.main(run)
