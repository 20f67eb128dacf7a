# /// script
# requires-python = "==3.12.*"
# dependencies = [
#     "maxtext==0.2.5",
#     "aqtp==0.9.0",
#     "array-record==0.8.6",
#     "blobfile==3.3.0",
#     "chex==0.1.92",
#     "cloud-accelerator-diagnostics==0.1.1",
#     "datasets==5.2.0",
#     "drjax==0.2.1",
#     "evaluate==0.4.6",
#     "flax==0.12.12",
#     "gcsfs==2026.10.1",
#     "google-cloud-monitoring==2.32.0",
#     "google-cloud-mldiagnostics==1.0.10",
#     "grain==0.2.18",
#     "huggingface-hub==2.4.0",
#     "jax==0.12.0.1",
#     "jaxlib==0.12.0.1",
#     "jaxtyping==0.3.11",
#     "jinja2==3.1.6",
#     "jsonlines==4.0.0",
#     "ml-collections==1.1.0",
#     "ml-goodput-measurement==0.2.3",
#     "nltk==3.10.4",
#     "omegaconf==2.4.0",
#     "optax==0.2.8",
#     "orbax-checkpoint==0.12.8",
#     "pathwaysutils==0.1.13",
#     "pillow==13.0.0",
#     "psutil==7.2.2",
#     "pydantic==2.14.3",
#     "qwix==0.1.8",
#     "sentencepiece==0.2.3",
#     "sympy==1.14.0",
#     "tensorboardx==2.6.5",
#     "tensorflow==2.21.0",
#     "tensorflow-datasets==4.9.10",
#     "tiktoken==0.14.0",
#     "tokamax==0.0.17",
#     "transformers==5.23.0",
# ]
#
# [tool.clients]
# note = "maxtext lists no dependencies; the check installs the packages that its trainer imports"
# ///
"""MaxText: its pre-training loop, with its own Grain input and with feeds of it.

The loop of ``maxtext.trainers.pre_train.train`` runs as it is: packed text, an evaluation every six
steps, checkpoints by MaxText's own manager.
"""

import functools
from pathlib import Path

import jax
import maxtext
from array_record.python.array_record_module import ArrayRecordWriter
from maxtext.common import data_loader, grain_utility, metric_logger
from maxtext.input_pipeline import data_processing_utils as processing
from maxtext.input_pipeline import input_pipeline_interface as interface
from maxtext.input_pipeline import multihost_dataloading as multihost
from maxtext.trainers.pre_train import train as trainer
from maxtext.utils.sharding import get_input_data_sharding

import grain_shard
from tests.clients import checking

NUM_FEEDS = 4
# MaxText sends SIGTERM to orphans of multiprocessing on the whole machine. Here it must not.
multihost._cleanup_orphaned_multiprocessing_processes = lambda: None
# recipe
format_and_batch = processing.format_and_batch


class Rows:  # a config with which MaxText packs and shifts rows, but does not batch them
    grain_use_elastic_iterator = True  # then MaxText makes no batches

    def __init__(self, config):
        self.config = config

    def __getattr__(self, name):
        return getattr(self.config, name)


def sharded(make_iterator, batch_size, config, mesh, process_indices):
    def make_feed(feed):
        hosts = [None] * feed.shard_count  # MaxText reads the part at this host's place in it
        hosts[feed.shard_index] = jax.process_index()
        return make_iterator(config, mesh, hosts)

    ds = grain_shard.feeds(make_feed, num_feeds=NUM_FEEDS).batch(getattr(config, batch_size))
    return iter(ds.shard_to(get_input_data_sharding(config, mesh), mask_key=None))


def take_over(bins):  # bins: number of packing bins of each feed
    processing.format_and_batch = lambda ds, config, _, *args, **kwargs: format_and_batch(
        ds, Rows(config), bins, *args, **kwargs
    )
    del multihost.MultiHostDataLoadIterator, grain_utility.for_restore  # an error if renamed
    multihost.MultiHostDataLoadIterator = lambda loader, *_, **__: loader
    for kind, size in (("train", "to_load"), ("eval", "to_load_eval")):
        name, size = f"make_grain_{kind}_iterator", f"global_batch_size_{size}"
        setattr(interface, name, functools.partial(sharded, getattr(interface, name), size))
    grain_utility.for_restore = lambda manager, step, iterator, factor: iterator


# end of recipe


def arguments(data, folder, settings):
    """The command line of MaxText: what it reads, where it writes, and more settings."""
    package = Path(maxtext.__file__).parent
    settings = {
        "run_name": "run",
        "base_output_directory": folder,
        "hardware": "cpu",
        "dataset_type": "grain",
        "grain_train_files": data / "train.array_record",
        "grain_eval_files": data / "eval.array_record",
        "grain_worker_count": 0,
        "grain_worker_count_eval": 0,
        "tokenizer_path": package / "assets" / "tokenizers" / "tokenizer.llama2",
        "tokenizer_type": "sentencepiece",
        "enable_tensorboard": False,
        "enable_goodput_recording": False,
        "log_config": False,
    } | settings
    config = [f"{name}={value}" for name, value in settings.items()]
    return ["train", str(package / "configs" / "base.yml"), *config]


def make_data(folder):
    """The paragraphs of our documents, as text in tf.train.Examples."""
    from maxtext.input_pipeline.protos import example_pb2

    docs = Path(grain_shard.__file__).parents[1] / "docs"
    pages = [page.read_text() for page in sorted(docs.glob("*.md"))]
    texts = [text for page in pages for text in page.split("\n\n") if len(text) > 40]
    for name, chosen in (("eval", texts[:60]), ("train", texts[60:])):
        writer = ArrayRecordWriter(str(folder / f"{name}.array_record"), "group_size:1")
        for text in chosen:
            example = example_pb2.Example()
            example.features.feature["text"].bytes_list.value.append(text.encode())
            writer.write(example.SerializeToString())
        writer.close()


class Noted:
    """An iterator over the evaluation's batches; the job notes each."""

    def __init__(self, batches, job):
        self._batches, self._job = batches, job

    def __getattr__(self, name):
        return getattr(self._batches, name)

    def __iter__(self):
        self._job.evaluations.append([])
        for batch in self._batches:
            self._job.evaluations[-1].append(checking.digest(batch))
            yield batch


def run(job):
    global NUM_FEEDS
    if job.ours:
        NUM_FEEDS = job.feeds
        take_over(8)

    load_next_batch = data_loader.DataLoader.load_next_batch

    def noting(self, *args, **kwargs):
        batch = load_next_batch(self, *args, **kwargs)
        job.batch(batch)
        return batch

    data_loader.DataLoader.load_next_batch = noting
    create = interface.create_data_iterator

    def create_data_iterator(config, mesh):
        train, evaluation = create(config, mesh)
        return train, Noted(evaluation, job)

    interface.create_data_iterator = create_data_iterator
    write_metrics = metric_logger.MetricLogger.write_metrics

    def noting_losses(self, metrics, step, metric_type="train"):
        if metric_type == "train":
            job.loss(metrics["scalar"]["learning/loss"])
        return write_metrics(self, metrics, step, metric_type)

    metric_logger.MetricLogger.write_metrics = noting_losses
    settings = {
        "skip_jax_distributed_system": True,
        "model_name": "gpt3-52k",
        "override_model_config": True,
        "vocab_size": 32000,
        "dtype": "float32",
        "steps": job.stop,
        "learning_rate_schedule_steps": checking.STEPS,
        "learning_rate": 0.01,
        "per_device_batch_size": 4,
        "max_target_length": 64,
        "eval_interval": checking.STOP,
        "eval_steps": 2,
        "enable_checkpointing": True,
        "checkpoint_period": 1000,
    }
    trainer.main(arguments(job.data, job.checkpoints, settings))


if __name__ == "__main__":
    checking.main(run, make_data, one_feed=True)
