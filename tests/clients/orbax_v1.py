# /// script
# requires-python = "==3.13.*"
# dependencies = ["orbax-checkpoint==0.12.8", "jax==0.12.0.1", "jaxlib==0.12.0.1"]
#
# [tool.clients]
# lowest = ["orbax-checkpoint==0.11.32", "jax==0.9.0", "jaxlib==0.9.0"]
# lowest-python = "==3.11.*"
# ///
"""Orbax's v1 API: its `Checkpointer` saves the model and the data, on 1 and on 2 hosts."""

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint.experimental.v1 as ocp

import grain_shard  # noqa: F401
from tests.clients import checking

mesh = None


def pipeline():
    ds = grain.MapDataset.range(300).seed(1).shuffle()
    return ds.random_map(lambda i, rng: {"x": np.float32([i / 300, rng.random()])}).batch(16)


def make_state():
    return {"w": jnp.zeros(2), "step": jnp.zeros((), jnp.int32)}


@jax.jit
def train_step(state, batch):
    def loss(w):
        return jnp.mean((batch["x"] @ w - 2 * batch["x"][:, 0] - 1) ** 2)

    value, gradient = jax.value_and_grad(loss)(state["w"])
    return {"w": state["w"] - 0.3 * gradient, "step": state["step"] + 1}, value


# recipe
def train(ds, folder, last_step, on_step):
    with ocp.training.Checkpointer(folder) as checkpointer, iter(ds.shard_to(mesh)) as batches:
        state = make_state()
        if checkpointer.latest is not None:
            like = {"state": state, "data": batches}
            state = checkpointer.load_checkpointables(abstract_checkpointables=like)["state"]
        for _ in range(int(state["step"]) + 1, last_step + 1):
            batch = next(batches)
            state, loss = train_step(state, batch)
            on_step(batch, loss)
        checkpointer.save_checkpointables(last_step, {"state": state, "data": batches})


# end of recipe


def run(job):
    global mesh
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    with jax.set_mesh(mesh):
        if job.ours:
            train(pipeline(), job.checkpoints, job.stop, job.step)
        else:
            state = make_state()
            batches = iter(pipeline())
            for _ in range(job.stop):
                batch = jax.device_put(next(batches), jax.NamedSharding(mesh, jax.P("data")))
                state, loss = train_step(state, batch)
                job.step(batch, loss)


if __name__ == "__main__":
    checking.main(run)
