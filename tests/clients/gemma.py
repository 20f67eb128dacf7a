# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "flax==0.12.12",
#     "jax==0.12.0.1",
#     "jaxlib==0.12.0.1",
#     "clu==0.0.12",
#     "jaxtyping==0.3.11",
#     "ml-collections==1.1.0",
#     "sentencepiece==0.2.3",
#     "tensorboard==2.20.0",
#     "tensorflow-cpu==2.21.0",
#     "tensorflow-datasets==4.9.10",
# ]
#
# [tool.clients]
# sources = "flax==0.12.12"
# ///
"""flax's gemma example: its `train_and_evaluate`, out of the source archive of flax."""

import dataclasses
import importlib
import os
import sys
import types
from pathlib import Path

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import sentencepiece

import grain_shard
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from tests.clients import checking

sys.path += map(str, Path(os.environ["CLIENT_SOURCES"]).glob("flax-*/examples/gemma"))
import input_pipeline_grain as example
import train as trainer

NUM_FEEDS = 4
# recipe
preprocess_data = example.preprocess_data


def sharded(dataset, *, batch_size, data_sharding, **options):  # replaces preprocess_data
    options |= {"batch_size": 1, "prefetch_num_workers": 0}

    def make_feed(feed):
        part = dataset[feed.shard_index :: feed.shard_count]
        rows = preprocess_data(part, **options)  # batches of 1
        return rows.map(lambda row: jax.tree.map(lambda x: np.asarray(x)[0], row))

    ds = grain_shard.feeds(make_feed, num_feeds=NUM_FEEDS).batch(batch_size * jax.process_count())
    return ds.shard_to(data_sharding, mask_key=None)


class WithData(ocp.CheckpointManager):  # replaces ocp.CheckpointManager
    batches = None

    def save(self, step, args):
        data = CheckpointSave(self.batches)
        return super().save(step, args=ocp.args.Composite(model=args, data=data))

    def restore(self, step, args):
        data = CheckpointRestore(self.batches)
        return super().restore(step, args=ocp.args.Composite(model=args, data=data))["model"]


# end of recipe


def make_data(folder):
    """The paragraphs of our documents, a line each, and a vocabulary for them."""
    docs = Path(grain_shard.__file__).parents[1] / "docs"
    pages = [page.read_text() for page in sorted(docs.glob("*.md"))]
    texts = [" ".join(text.split()) for page in pages for text in page.split("\n\n")]
    texts = [text for text in texts if len(text) > 40]
    (folder / "train.txt").write_text("\n".join(texts))
    (folder / "test.txt").write_text("\n".join(text[:200] for text in texts[:32]))
    sentencepiece.SentencePieceTrainer.Train(
        input=str(folder / "train.txt"),
        model_prefix=str(folder / "vocabulary"),
        vocab_size=512,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    )


class Noted:
    """The evaluation's batches; the job notes each."""

    def __init__(self, batches, job):
        self._batches, self._job = batches, job

    def __iter__(self):
        self._job.evaluations.append([])
        for batch in self._batches:
            self._job.evaluations[-1].append(checking.digest(batch))
            yield batch


def run(job):
    global NUM_FEEDS
    NUM_FEEDS = job.feeds
    if job.ours:
        example.preprocess_data = sharded
        trainer.ocp.CheckpointManager = WithData

    def get_raw_dataset(name, split):  # the example's own is TFDS, and cut by process
        lines = (job.data / f"{split}.txt").read_text().splitlines()
        ds = grain.MapDataset.source(lines)
        return ds.map(lambda line: {"inputs": line, "targets": line})

    example.get_raw_dataset = get_raw_dataset
    get_datasets = trainer.input_pipeline.get_datasets

    def noting(**options):
        train_ds, eval_ds, encoder = get_datasets(**options)
        WithData.batches = iter(train_ds)

        def batches():
            for batch in WithData.batches:
                job.batch(batch)
                yield batch

        return batches(), Noted(eval_ds, job), encoder

    trainer.input_pipeline.get_datasets = noting
    of_all = 0.0

    def info(message, *args):
        nonlocal of_all
        if message.startswith("Finished training step"):
            total = float(args[2]) * (len(job.losses) + 1)  # it logs the mean of all so far
            job.loss(total - of_all)
            of_all = total

    trainer.logging = types.SimpleNamespace(info=info, debug=lambda *args: None)
    writes_nothing = types.SimpleNamespace(text=["no text"])
    trainer.sampler_lib = types.SimpleNamespace(
        Sampler=lambda **_: lambda *args, **options: writes_nothing
    )
    config = importlib.import_module("configs.tiny").get_config()
    config = dataclasses.replace(
        config,
        vocab_path=str(job.data / "vocabulary.model"),
        per_device_batch_size=4,
        eval_per_device_batch_size=4,
        prefetch_num_workers=0,
        num_train_steps=job.stop,
        num_eval_steps=100,
        eval_every_steps=3,
        learning_rate=0.01,
        warmup_steps=2,
        max_target_length=64,
        max_eval_target_length=256,
        use_bfloat16=False,
        checkpoint_every_steps=1000,
        transformer_params={
            "num_layers": 1,
            "embed_dim": 32,
            "hidden_dim": 64,
            "num_heads": 2,
            "head_dim": 16,
            "num_kv_heads": 1,
            "use_post_attn_norm": False,
            "use_post_ffw_norm": False,
            "attention_types": (1,),
            "final_logit_softcap": None,
        },
    )
    trainer.train_and_evaluate(config, str(job.checkpoints))


if __name__ == "__main__":
    checking.main(run, make_data, one_feed=True)
