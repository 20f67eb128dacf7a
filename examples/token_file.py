"""The model of language_model.py, trained on windows of a file of tokens, as nanoGPT writes it.

    python examples/token_file.py train.bin --checkpoint-dir /tmp/tokens

The file holds uint16 tokens, each below 256 for this small model. It is mapped into memory, and the
rows are gathered from there in a shuffled order. All else is as in language_model.py.
"""

import sys

import grain
import jax.numpy as jnp
import language_model as model
import numpy as np
from jax.sharding import PartitionSpec as P
from numpy.lib.stride_tricks import sliding_window_view

import grain_shard


def batches_of(file):
    """Returns `make_batches` for windows of a file, in another order in each of endless epochs."""
    tokens = np.memmap(file, np.uint16, mode="r")
    windows = sliding_window_view(tokens, model.LENGTH + 1, subok=True)[:: model.LENGTH]
    source = grain_shard.ArraySource({"inputs": windows[:, :-1], "targets": windows[:, 1:]})
    rows = grain.MapDataset.source(source).seed(42).shuffle().repeat()

    def make_batches(mesh):
        ds = rows.batch(model.GLOBAL_BATCH_SIZE)
        return ds.shard_to(mesh, P("data"), microbatches=model.MICROBATCHES)

    return make_batches


def train_step(params, optimizer_state, batch, step=model.train_step):
    """A step in which each window is one document, from its first token on."""
    inputs, targets = (batch[name].astype(jnp.int32) for name in ("inputs", "targets"))
    ones = jnp.ones_like(inputs)
    batch = {
        "inputs": inputs,
        "inputs_positions": jnp.cumsum(ones, axis=-1) - 1,
        "inputs_segment_ids": ones,
        "targets": targets,
        "targets_segment_ids": ones,
        "valid_mask": batch["valid_mask"],
    }
    return step(params, optimizer_state, batch)


if __name__ == "__main__":
    file = sys.argv.pop(1)
    model.make_batches, model.train_step = batches_of(file), train_step
    model.main()
