"""A language model, with packed text as feeds, a mesh with Explicit axes, and microbatches.

A small decoder learns to predict the bytes of NumPy's docstrings. Rows are sharded over the `data`
axis of the mesh, and heads and hidden units over its `tensor` axis. On one host, with its
accelerators or eight virtual CPU devices, it takes about a minute:

    python examples/language_model.py --checkpoint-dir /tmp/language

Run it a second time, with a larger `--steps`, and it goes on from its last checkpoint. The same
script runs on two hosts of four devices each, with losses that are equal up to rounding:

    python -m grain_shard rehearse --hosts 2 --devices-per-host 4 \
        examples/language_model.py --distributed --checkpoint-dir /tmp/language-2

For text of your own, replace the function `documents`, and `np.frombuffer` by your tokenizer.
"""

import argparse
import inspect
import json
import os
from pathlib import Path

os.environ.setdefault("PJRT_NPROC", "32")  # enough threads for the collectives of 8 devices

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from grain_shard.training import microbatches

VOCABULARY, LENGTH, WIDTH, HEADS, LAYERS = 256, 128, 64, 4, 2
GLOBAL_BATCH_SIZE, MICROBATCHES, NUM_FEEDS = 32, 2, 8
SAVE_EVERY = 50  # steps between two checkpoints


def documents():
    """Returns the docstrings of NumPy's public functions and classes, as bytes."""
    found = {inspect.getdoc(getattr(np, name)) or "" for name in dir(np) if name[0] != "_"}
    return [text.encode() for text in sorted(found)]


def shift(tokens):
    """Returns the tokens that the model sees, and for each the next token, which it predicts."""
    return {"inputs": tokens[:-1], "targets": tokens[1:]}


def make_feed(feed):
    """Returns one of NUM_FEEDS streams: a part of the documents, packed into rows of LENGTH."""
    cuts = LENGTH + 1
    pieces = [text[i : i + cuts] for text in documents() for i in range(0, len(text), cuts)]
    stream = (
        grain.MapDataset.source(pieces)
        .seed(42)
        .shuffle()
        .repeat()[feed.shard_index :: feed.shard_count]
        .map(lambda text: np.frombuffer(text, np.uint8).astype(np.int32))
        .map(shift)
        .to_iter_dataset()
        .filter(lambda piece: len(piece["inputs"]) >= 16)
    )
    row = {"inputs": LENGTH, "targets": LENGTH}
    return grain.experimental.FirstFitPackIterDataset(stream, length_struct=row, num_packing_bins=4)


def make_batches(mesh):
    """Returns the batches: leaves [rows, LENGTH], rows sharded over `data`."""
    feeds = grain_shard.feeds(make_feed, num_feeds=NUM_FEEDS).batch(GLOBAL_BATCH_SIZE)
    return feeds.shard_to(mesh, P("data"))


# The spec by which each weight is sharded, and its shape.
OF_A_LAYER = {
    "qkv": (P(None, None, "tensor", None), (WIDTH, 3, HEADS, WIDTH // HEADS)),
    "out": (P("tensor", None, None), (HEADS, WIDTH // HEADS, WIDTH)),
    "up": (P(None, "tensor"), (WIDTH, 4 * WIDTH)),
    "down": (P("tensor", None), (4 * WIDTH, WIDTH)),
}
WEIGHTS = {
    "tokens": (P(None, None), (VOCABULARY, WIDTH)),
    "positions": (P(None, None), (LENGTH, WIDTH)),
    "layers": [OF_A_LAYER] * LAYERS,
    "logits": (P(None, None), (WIDTH, VOCABULARY)),
}
ADAM = optax.adam(5e-3, eps=1e-4)


@jax.jit
def create():
    """Returns new weights and the optimizer's state, which are made sharded over the mesh."""
    described, structure = jax.tree.flatten(WEIGHTS, is_leaf=lambda x: isinstance(x, tuple))
    keys = jax.random.split(jax.random.key(0), len(described))
    params = jax.tree.unflatten(
        structure,
        [
            0.1 * jax.random.normal(key, shape, out_sharding=spec)
            for key, (spec, shape) in zip(keys, described, strict=True)
        ],
    )
    return params, ADAM.init(params)


def normalized(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def logits_of(params, batch):
    """Returns the logits, float32[rows, LENGTH, VOCABULARY]. Explicit axes need `out_sharding`."""
    rows, places = P("data", None, None), jnp.arange(LENGTH)
    segments = batch["inputs_segment_ids"]
    same_document = segments[:, :, None] == segments[:, None, :]
    may_attend = same_document & (places[:, None] >= places)
    x = params["tokens"].at[batch["inputs"]].get(out_sharding=rows)
    x += params["positions"].at[batch["inputs_positions"]].get(out_sharding=rows)
    for layer in params["layers"]:
        query, key, value = jnp.moveaxis(
            jnp.einsum("bld,dnhk->blnhk", normalized(x), layer["qkv"]), 2, 0
        )
        scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / (WIDTH // HEADS) ** 0.5
        weights = jax.nn.softmax(jnp.where(may_attend[:, None], scores, -1e9))
        attended = jnp.einsum("bhqs,bshk->bqhk", weights, value)
        x += jnp.einsum("bqhk,hkd->bqd", attended, layer["out"], out_sharding=rows)
        hidden = jax.nn.gelu(jnp.einsum("bld,df->blf", normalized(x), layer["up"]))
        x += jnp.einsum("blf,fd->bld", hidden, layer["down"], out_sharding=rows)
    return jnp.einsum("bld,dv->blv", normalized(x), params["logits"])


@jax.jit(donate_argnums=(0, 1))
def train_step(params, optimizer_state, batch):
    """Makes an update by the mean loss over all tokens. Returns new weights and state, and loss."""
    batch["counts"] = (batch["targets_segment_ids"] > 0) & batch["valid_mask"][:, None]

    def loss_sum(params, microbatch):
        log_probs = jax.nn.log_softmax(logits_of(params, microbatch))
        targets = jax.nn.one_hot(microbatch["targets"], VOCABULARY)
        return -jnp.sum(jnp.sum(log_probs * targets, axis=-1) * microbatch["counts"])

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_sum)(params, microbatch)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (loss, gradients), _ = jax.lax.scan(add, zeros, microbatches(batch, MICROBATCHES))
    count = jnp.sum(batch["counts"])
    gradients = jax.tree.map(lambda gradient: gradient / count, gradients)
    updates, optimizer_state = ADAM.update(gradients, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state, loss / count


def train(directory, stop):
    """Trains from the last checkpoint up to a step. Writes the loss of each step into a file."""
    tensor = 2 - jax.device_count() % 2  # 1 with an odd number of devices, as on a single GPU
    mesh = jax.make_mesh((jax.device_count() // tensor, tensor), ("data", "tensor"))  # Explicit
    file = directory / "losses.json"
    with (
        jax.set_mesh(mesh),
        ocp.CheckpointManager(directory / "checkpoints") as checkpoints,
        iter(make_batches(mesh)) as batches,
    ):
        state, losses, start = create(), [], checkpoints.latest_step() or 0
        if start:
            items = {"state": ocp.args.StandardRestore(state), "data": CheckpointRestore(batches)}
            state = checkpoints.restore(start, args=ocp.args.Composite(**items)).state
            losses = json.loads(file.read_text())[:start]
        for step in range(start + 1, stop + 1):
            *state, loss = train_step(*state, next(batches))
            losses.append(loss)
            if step % SAVE_EVERY and step < stop:
                continue
            losses = [float(loss) for loss in losses]
            if jax.process_index() == 0:
                file.write_text(json.dumps(losses))  # first: it has each step of a checkpoint
                print(f"step {step:3} of {stop}: loss {losses[-1]:.4f}", flush=True)
            items = {"state": ocp.args.StandardSave(tuple(state)), "data": CheckpointSave(batches)}
            checkpoints.save(step, args=ocp.args.Composite(**items))


def make_parser(text):
    parser = argparse.ArgumentParser(description=text.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=300, help="last step (default: 300)")
    parser.add_argument("--checkpoint-dir", type=Path, required=True, help="shared by all hosts")
    parser.add_argument("--distributed", action="store_true", help="train as one of several hosts")
    return parser


def main(args):
    if args.distributed:
        jax.distributed.initialize()
    else:
        jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, without an accelerator
    train(args.checkpoint_dir.resolve(), args.steps)


if __name__ == "__main__":
    main(make_parser(__doc__).parse_args())
