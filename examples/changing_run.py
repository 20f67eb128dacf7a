"""A training run whose mixture, batch size and number of hosts change, with microbatches.

A small decoder learns to predict the bytes of Python's documentation and of Python's own source.
Up to record 200 it reads three times as much documentation as source, and then as much of both.
From step 8 on batches are twice as large. The step cuts each batch into four microbatches. On
one host, with its accelerators or eight virtual CPU devices:

    python examples/changing_run.py --checkpoint-dir /tmp/uninterrupted

The same run again. Now it is stopped after ten steps on four hosts, and continued on two. The last
command draws its losses over those of the first run:

    python -m grain_shard rehearse --hosts 4 --devices-per-host 2 \
        examples/changing_run.py --distributed --checkpoint-dir /tmp/changing --steps 10
    python -m grain_shard rehearse --hosts 2 --devices-per-host 4 \
        examples/changing_run.py --distributed --checkpoint-dir /tmp/changing
    python examples/changing_run.py --checkpoint-dir /tmp/changing --picture losses.png \
        --against /tmp/uninterrupted

Each run writes its losses to losses.json in its folder. The losses of both runs are equal up to
rounding. A run takes half a minute, and needs no network and no accelerator. It saves at its end
only.
"""

import argparse
import inspect
import json
import os
import pydoc_data.topics
from pathlib import Path

os.environ.setdefault("PJRT_NPROC", "32")  # enough threads for the collectives of 8 devices

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import nnx
from jax.sharding import AxisType

import grain_shard
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from grain_shard.training import microbatches

LENGTH, WIDTH, HEADS, LAYERS = 64, 64, 4, 3
WEIGHTS = {0: [3, 1], 200: [1, 1]}  # weights of prose and code, by the first record they hold for
GLOBAL_BATCH_SIZES = {0: 32, 8: 64}  # batch sizes, by the first step they hold for
MICROBATCHES = 4


def pieces(text):
    """Returns a text cut into records of LENGTH + 1 bytes, int32[records, LENGTH + 1]."""
    data = np.frombuffer(text.encode(), np.uint8).astype(np.int32)
    count = len(data) // (LENGTH + 1)
    return data[: count * (LENGTH + 1)].reshape(count, LENGTH + 1)


def make_batches(mesh):
    prose = pieces("\n".join(pydoc_data.topics.topics.values()))
    code = pieces("\n".join(map(inspect.getsource, (argparse, inspect, json.decoder))))
    sources = [
        grain.MapDataset.source(source)
        .seed(seed)
        .shuffle()
        .map(lambda tokens: {"inputs": tokens[:-1], "targets": tokens[1:]})
        .repeat()
        for seed, source in enumerate((prose, code))
    ]
    records = grain_shard.mix(sources, WEIGHTS)
    batches = records.pipe(grain_shard.BatchSchedule(GLOBAL_BATCH_SIZES))
    return batches.shard_to(mesh)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.norm_1 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.norm_2 = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.qkv = nnx.Linear(WIDTH, 3 * WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        split = self.qkv(self.norm_1(x)).reshape(*x.shape[:2], 3, HEADS, -1)
        attended = jax.nn.dot_product_attention(*jnp.moveaxis(split, 2, 0), is_causal=True)
        x = x + self.out(attended.reshape(x.shape))
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.tokens = nnx.Embed(256, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])
        self.logits = nnx.Linear(WIDTH, 256, rngs=rngs)

    def __call__(self, tokens):
        x = self.tokens(tokens) + self.positions(jnp.arange(LENGTH))
        for layer in self.layers:
            x = layer(x)
        return self.logits(x)


@nnx.jit
def create():
    """Returns the model and its optimizer, replicated on the mesh."""
    model = Decoder(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adam(3e-3, eps=1e-4), wrt=nnx.Param)


@nnx.jit
def train_step(model, optimizer, batch):
    """Updates the model by the mean loss of a batch, and returns this loss.

    Microbatches may have different numbers of records. So losses are summed over all microbatches,
    and the sum is divided once at the end.
    """
    graph, params = nnx.split(model)

    def loss_sum(params, microbatch):
        logits = nnx.merge(graph, params)(microbatch["inputs"])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, microbatch["targets"])
        return jnp.sum(losses * microbatch["valid_mask"][:, None])

    def add(total, microbatch):
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_sum)(params, microbatch)), None

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    (loss, gradients), _ = jax.lax.scan(add, zeros, microbatches(batch, MICROBATCHES))
    count = jnp.sum(batch["valid_mask"]) * LENGTH
    optimizer.update(model, jax.tree.map(lambda gradient: gradient / count, gradients))
    return loss / count


def train(directory, stop):
    """Trains up to the step `stop`, from the last checkpoint if there is one.

    The only checkpoint is made at its end. Returns the step at which training started, and the
    losses of the steps after it.
    """
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    with (
        jax.set_mesh(mesh),
        ocp.CheckpointManager(directory / "checkpoints") as checkpoints,
        iter(make_batches(mesh)) as batches,
    ):
        model, optimizer = create()
        start = checkpoints.latest_step() or 0
        if start:
            state = ocp.args.StandardRestore(nnx.state((model, optimizer)))
            items = ocp.args.Composite(state=state, data=CheckpointRestore(batches))
            nnx.update((model, optimizer), checkpoints.restore(start, args=items).state)
        losses = [float(train_step(model, optimizer, next(batches))) for _ in range(start, stop)]
        if losses:
            state = ocp.args.StandardSave(nnx.state((model, optimizer)))
            items = ocp.args.Composite(state=state, data=CheckpointSave(batches))
            checkpoints.save(stop, args=items)
    return start, losses


def losses_of(directory):
    """Returns the losses that a run has written, one for each step; [] if there is no file."""
    file = directory / "losses.json"
    return json.loads(file.read_text()) if file.exists() else []


def draw(directory, against, file):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="loss")
    if against is not None:
        axes.plot(losses_of(against), color="0.8", lw=6, label=against.name)
    losses = losses_of(directory)
    axes.plot(losses, color="#D55E00", lw=1.5, label=directory.name)
    # The folder is listed without a CheckpointManager, which would wait for the other hosts.
    saved = [int(folder.name) for folder in (directory / "checkpoints").iterdir()]
    stops = sorted(step for step in saved if step < len(losses))
    axes.plot(stops, [losses[step] for step in stops], "o", color="black", label="continued here")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=120)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=24, help="last step (default: 24)")
    parser.add_argument(
        "--checkpoint-dir", type=Path, required=True, help="folder that all hosts share"
    )
    parser.add_argument("--distributed", action="store_true", help="train as one of several hosts")
    parser.add_argument("--picture", type=Path, help="file to draw the losses into")
    parser.add_argument("--against", type=Path, help="folder of another run to draw as well")
    args = parser.parse_args()
    if args.distributed:
        jax.distributed.initialize()
    else:
        jax.config.update("jax_num_cpu_devices", 8)  # virtual ones, without an accelerator
    directory = args.checkpoint_dir.resolve()
    start, losses = train(directory, args.steps)
    if jax.process_index() == 0:
        (directory / "losses.json").write_text(json.dumps(losses_of(directory)[:start] + losses))
        if args.picture is not None:
            draw(directory, args.against, args.picture)


if __name__ == "__main__":
    main()
