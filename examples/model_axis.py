"""Trains an MLP of flax nnx whose weights are sharded over a mesh axis "model".

    python examples/model_axis.py                  # eight virtual devices of this CPU
    python examples/model_axis.py --distributed    # on every host of a pod

The rows of a batch are sharded over "data", and the hidden units over "model". Each host reads the
rows of its own devices.
"""

import argparse

import jax

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--distributed", action="store_true", help="call jax.distributed.initialize()")
args = parser.parse_args()
if args.distributed:
    jax.distributed.initialize()
elif jax.config.jax_num_cpu_devices < 0:
    jax.config.update("jax_num_cpu_devices", 8)

import grain  # noqa: E402 (the devices are set up before)
import numpy as np  # noqa: E402
import optax  # noqa: E402
from flax import nnx  # noqa: E402
from jax.sharding import AxisType, PartitionSpec  # noqa: E402

import grain_shard  # noqa: E402, F401 (it gives datasets the method .shard_to)

# With Explicit axes, the layers of nnx raise "Contracting dimensions are sharded" where the weights
# are sharded over "model". With Auto axes the compiler finds the sharding of each result.
mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


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
        return self.down(nnx.relu(self.up(x)))[:, 0]


@nnx.jit
def train_step(model: Model, optimizer: nnx.Optimizer, batch: dict[str, jax.Array]) -> jax.Array:
    def loss_of(model: Model) -> jax.Array:
        return ((model(batch["x"]) - batch["y"]) ** 2).mean(where=batch["valid_mask"])

    loss, gradients = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, gradients)
    return loss


ds = grain.MapDataset.range(1000).map(record).seed(0).shuffle().batch(64).repeat(10)
with jax.set_mesh(mesh):
    model = nnx.jit(lambda: Model(nnx.Rngs(0)))()  # inside of jit, so that it is sharded at once
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    for step, batch in enumerate(ds.shard_to(mesh, PartitionSpec("data")), start=1):
        loss = train_step(model, optimizer, batch)
        if step % 40 == 0:
            print(f"step {step:3}: loss {loss:.5f}", flush=True)
    print("kernel of the first layer:", model.up.kernel.get_value().sharding.spec)
