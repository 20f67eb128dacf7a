"""Trains the model of language_model.py on windows of a token file in nanoGPT's format.

    python examples/token_file.py train.bin --checkpoint-dir /tmp/tokens

The file holds uint16 tokens, each below 256 for this small model. The file is mapped into memory,
and rows are read from there in a shuffled order. The rest of the script is language_model.py.
"""

import grain
import jax.numpy as jnp
import language_model as model
import numpy as np
from jax.sharding import PartitionSpec as P
from numpy.lib.stride_tricks import sliding_window_view

import grain_shard


def batches_of(file):
    """Returns a function `make_batches(mesh)` for the windows of a file.

    The batches never end. Each epoch has another order.
    """
    tokens = np.memmap(file, np.uint16, mode="r")
    windows = sliding_window_view(tokens, model.LENGTH + 1, subok=True)[:: model.LENGTH]
    source = grain_shard.ArraySource({"inputs": windows[:, :-1], "targets": windows[:, 1:]})
    rows = grain.MapDataset.source(source).seed(42).shuffle().repeat()

    def make_batches(mesh):
        return rows.batch(model.GLOBAL_BATCH_SIZE).shard_to(mesh, P("data"))

    return make_batches


def train_step(params, optimizer_state, batch, step=model.train_step):
    """Runs the training step of language_model.py, with each window as a single document."""
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
    parser = model.make_parser(__doc__)
    parser.add_argument("file", help="uint16 tokens")
    args = parser.parse_args()
    model.make_batches, model.train_step = batches_of(args.file), train_step
    model.main(args)
