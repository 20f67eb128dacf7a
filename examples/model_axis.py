"""Trains an MLP of flax nnx whose weights are sharded over a mesh axis "model".

    python examples/model_axis.py --checkpoint-dir /tmp/model              # eight virtual devices
    python examples/model_axis.py --checkpoint-dir /tmp/model --explicit   # on Explicit axes
    python examples/model_axis.py --checkpoint-dir ... --distributed       # on every host of a pod

The rows of a batch are sharded over "data", and the hidden units over the four devices of "model".
Each host reads the rows of its own devices. A run that is started again, on any number of hosts and
on axes of either type, goes on after the last checkpoint.
"""

import argparse
from pathlib import Path

import jax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--checkpoint-dir", type=Path, required=True, help="a folder of all hosts")
parser.add_argument("--explicit", action="store_true", help="use Explicit axes and no Auto axes")
parser.add_argument("--distributed", action="store_true", help="call jax.distributed.initialize()")
args = parser.parse_args()
if args.distributed:
    jax.distributed.initialize()
elif jax.config.jax_num_cpu_devices < 0:
    jax.config.update("jax_num_cpu_devices", 8)

import grain  # noqa: E402 (the devices are set up before)
import numpy as np  # noqa: E402
import optax  # noqa: E402
import orbax.checkpoint as ocp  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

import grain_shard  # noqa: E402, F401 (it gives datasets the method .shard_to)
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave  # noqa: E402

# With Auto axes the compiler finds the sharding of each result. With Explicit axes each layer with
# sharded weights needs the sharding of its result, or JAX raises "Contracting dimensions are
# sharded".
axis_type, of_hidden, of_result = AxisType.Auto, None, None
if args.explicit:
    axis_type = AxisType.Explicit
    of_hidden, of_result = PartitionSpec("data", "model"), PartitionSpec("data", None)
shape = jax.device_count() // 4, 4
mesh = jax.make_mesh(shape, ("data", "model"), axis_types=(axis_type,) * 2)
SAVE_EVERY = 40  # steps


def record(index: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(index).standard_normal(8).astype(np.float32)
    return {"x": x, "y": np.float32(x[0] * x[1])}


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal()
        columns = nnx.with_partitioning(init, (None, "model"))
        rows = nnx.with_partitioning(init, ("model", None))
        self.up = nnx.Linear(8, 64, kernel_init=columns, rngs=rngs)
        self.down = nnx.Linear(64, 1, kernel_init=rows, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.relu(self.up(x, out_sharding=of_hidden))
        return self.down(x, out_sharding=of_result)[:, 0]


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    def loss_of(model: Model) -> jax.Array:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean(where=batch["valid_mask"])

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


ds = grain.MapDataset.range(1000).map(record).seed(0).shuffle().batch(64).repeat(10)
with (
    jax.set_mesh(mesh),
    ocp.CheckpointManager(args.checkpoint_dir.resolve()) as checkpoints,
    iter(ds.shard_to(mesh, PartitionSpec("data"))) as batches,
):
    model = nnx.jit(lambda: Model(nnx.Rngs(0)))()  # inside of jit, so that it is sharded at once
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    if last := checkpoints.latest_step():
        state = ocp.args.StandardRestore(nnx.state((model, optimizer)))
        items = ocp.args.Composite(state=state, data=CheckpointRestore(batches))
        nnx.update((model, optimizer), checkpoints.restore(last, args=items).state)
        print(f"goes on after step {last}", flush=True)
    for step, batch in enumerate(batches, start=1 + (last or 0)):
        loss = train_step(model, optimizer, batch)
        if step % SAVE_EVERY == 0:
            print(f"step {step:3}: loss {loss:.5f}", flush=True)
            state = ocp.args.StandardSave(nnx.state((model, optimizer)))
            items = ocp.args.Composite(state=state, data=CheckpointSave(batches))
            checkpoints.save(step, args=items)
    print("kernel of the first layer:", model.up.kernel.get_value().sharding.spec)
