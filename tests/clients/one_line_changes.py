# /// script
# requires-python = "==3.13.*"
# dependencies = [
#   "equinox==0.13.8", "blackjax==1.7.1", "clu==0.0.12", "flax==0.12.12", "numpyro==0.22.0",
#   "jax==0.12.0.1", "jaxlib==0.12.0.1",
# ]
#
# [tool.clients]
# note = "numpyro 0.22.0, blackjax 1.7.1, clu 0.0.12, flax 0.12.12"
# ///
"""Loops of Equinox, NNX, NumPyro, BlackJAX and clu side by side, of which one line changes."""

import itertools
import pickle

import clu.metrics
import equinox as eqx
import flax
import grain
import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
from flax import nnx
from jax.experimental import multihost_utils
from jax.sharding import AxisType
from numpyro import distributions
from numpyro.infer import SVI, Trace_ELBO
from numpyro.infer.autoguide import AutoNormal

import grain_shard
from grain_shard.training import place_model_state_on_shards
from tests.clients import checking

X = np.random.default_rng(0).normal(size=(90, 4)).astype(np.float32)
Y = X @ np.float32([1, -2, 3, 0.5])
RECORDS = grain.MapDataset.source(grain_shard.ArraySource({"x": X, "y": Y})).seed(0).shuffle()
# The last of the six batches of an epoch has ten rows; and batches without padding.
PADDED, UNPADDED = RECORDS.batch(16).repeat(3), RECORDS.repeat(3).batch(16)


def of_equinox():
    model, optimizer = eqx.nn.Linear(4, 1, key=jax.random.key(0)), optax.adam(0.1)

    @eqx.filter_value_and_grad
    def loss_fn(model, batch):
        losses = (jax.vmap(model)(batch["x"])[:, 0] - batch["y"]) ** 2
        return jnp.mean(losses, where=batch["valid_mask"])

    def step(state, batch):
        loss, gradients = loss_fn(state[0], batch)
        updates, opt_state = optimizer.update(gradients, state[1])
        return (eqx.apply_updates(state[0], updates), opt_state), loss

    return PADDED, (model, optimizer.init(model)), step


def of_nnx():
    model = nnx.Linear(4, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)
    graph, state = nnx.split((model, optimizer))

    def loss_fn(model, batch):
        losses = (model(batch["x"])[:, 0] - batch["y"]) ** 2
        return jnp.mean(losses, where=batch["valid_mask"])

    def step(state, batch):
        model, optimizer = nnx.merge(graph, state)
        loss, gradients = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, gradients)
        return nnx.state((model, optimizer)), loss

    return PADDED, state, step


def of_numpyro():
    def model(batch):
        w = numpyro.sample("w", distributions.Normal(0, 1).expand([4]).to_event(1))
        with numpyro.handlers.mask(mask=batch["valid_mask"]):
            numpyro.sample("y", distributions.Normal(batch["x"] @ w, 0.5), obs=batch["y"])

    svi = SVI(model, AutoNormal(model), numpyro.optim.Adam(0.1), Trace_ELBO())
    first = {"x": X[:2], "y": Y[:2], "valid_mask": np.ones(2, bool)}
    return PADDED, svi.init(jax.random.PRNGKey(0), first), svi.update


def of_blackjax():
    import blackjax  # which uses JAX, so only after jax.distributed.initialize()

    def prior(w):
        return -jnp.sum(w**2) / 2

    def likelihood(w, row):
        return -((row["x"] @ w - row["y"]) ** 2) / 2

    sgld = blackjax.sgld(blackjax.sgmcmc.gradients.grad_estimator(prior, likelihood, len(Y)))

    def step(state, batch):
        (key, later), w = jax.random.split(state[0]), state[1]
        w = sgld.step(key, w, batch, 1e-3)
        return (later, w), jnp.mean((batch["x"] @ w - batch["y"]) ** 2)

    return UNPADDED, (jax.random.PRNGKey(0), jnp.zeros(4)), step


@flax.struct.dataclass
class Metrics(clu.metrics.Collection):
    loss: clu.metrics.Average.from_output("loss")


def of_clu():
    def step(w, batch):
        losses = (batch["x"] @ w - batch["y"]) ** 2
        metrics = Metrics.single_from_model_output(loss=losses, mask=batch["valid_mask"])
        return w, metrics.compute()["loss"]

    return PADDED, jnp.zeros(4), step


def own_batches(ds, rows):
    """The same batches without us, on one host: the last batch of an epoch is short."""
    for batch in ds:
        yield jax.device_put({**batch, "valid_mask": np.ones(len(batch["y"]), bool)}, rows)


def valid_rows(batch):
    """The global rows of a batch, without padding: the loop's own input has none."""
    rows = multihost_utils.process_allgather(batch, tiled=True)
    mask = rows.pop("valid_mask")
    return {name: array[mask] for name, array in rows.items()}


def run(job):
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    rows, path = jax.NamedSharding(mesh, jax.P("data")), job.checkpoints / "states"
    with jax.set_mesh(mesh):
        datasets, states, steps = zip(
            *(of() for of in (of_equinox, of_nnx, of_numpyro, of_blackjax, of_clu)), strict=True
        )
        first, leaves = 0, jax.tree.leaves(states)
        if job.ours:
            batches = [iter(ds.shard_to(mesh)) for ds in datasets]
        else:
            batches = [own_batches(ds, rows) for ds in datasets]
        if path.exists():
            first, leaves, positions = pickle.loads(path.read_bytes())
            for iterator, position in zip(batches, positions, strict=True):
                iterator.set_state(position)
        states = jax.tree.unflatten(jax.tree.structure(states), leaves)
        states = place_model_state_on_shards(states, mesh)

        @jax.jit
        def step_all(states, given):
            done = [step(*each) for step, *each in zip(steps, states, given, strict=True)]
            return tuple(state for state, _ in done), sum(loss for _, loss in done)

        for given in itertools.islice(zip(*batches, strict=True), job.stop - first):
            states, loss = step_all(states, given)
            job.step([valid_rows(batch) for batch in given], loss)
        if job.ours and jax.process_index() == 0:
            saved = [np.asarray(leaf) for leaf in jax.tree.leaves(states)]
            positions = [iterator.get_state() for iterator in batches]
            path.write_bytes(pickle.dumps((job.stop, saved, positions)))


if __name__ == "__main__":
    checking.main(run, off_own=1e-5)
