"""Data-parallel training gives the losses of one device on any number of them."""

import contextlib
import functools
import gc
import weakref

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from grain_shard import rehearse
from grain_shard.errors import ShardingError
from grain_shard.placement import distribute_batch
from grain_shard.training import (
    create_data_parallel_sharding,
    data_parallel_train_step,
    place_batch_on_shards,
    place_model_state_on_shards,
    place_nnx_state_on_shards,
    reduce_gradient_tree,
    reduce_gradients_across_devices,
    spmd_train_step,
)
from tests.conftest import data_mesh
from tests.on_hosts import refuse_collective_device_put

pytestmark = pytest.mark.slow

NUM_CLASSES = 8
DEVICE_COUNTS = [1, 2, 8]


def numpy_batches():
    rng = np.random.default_rng(0)
    return [
        {
            "image": rng.normal(size=(16, 8)).astype(np.float32),
            "label": rng.integers(0, NUM_CLASSES, 16),
        }
        for _ in range(3)
    ]


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        x = nn.relu(nn.Dense(16)(x))
        x = nn.Dropout(0.5, deterministic=deterministic)(x)
        return nn.Dense(NUM_CLASSES)(x)


LINEN = LinenModel()
ADAM = optax.adam(0.01)


def linen_loss(params, batch, rngs=None):
    """The mean over the valid rows. The model drops out if there are `rngs`."""
    logits = LINEN.apply({"params": params}, batch["image"], rngs is None, rngs=rngs)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return losses.mean(where=batch.get("valid_mask"))


def new_state(kind):
    params = LINEN.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    if kind == "TrainState":
        return TrainState.create(apply_fn=LINEN.apply, params=params, tx=ADAM)
    return params, ADAM.init(params)


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(8, 16, rngs=rngs)
        self.out = nnx.Linear(16, NUM_CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def nnx_loss(model, batch):
    targets = jax.nn.one_hot(batch["label"], NUM_CLASSES)
    return optax.softmax_cross_entropy(model(batch["image"]), targets).mean()


@functools.cache
def one_device_losses(kind):
    if kind == "linen":
        params, loss_fn = new_state("tuple")[0], linen_loss
    else:
        graph, params = nnx.split(NnxModel(nnx.Rngs(0)))

        def loss_fn(params, batch):
            return nnx_loss(nnx.merge(graph, params), batch)

    opt_state, losses = ADAM.init(params), []
    for batch in numpy_batches():
        loss, gradients = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = ADAM.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return losses


def trained(state, optimizer=ADAM):
    """The state after a step for each batch, and the losses."""
    losses = []
    for batch in numpy_batches():
        state, metrics = data_parallel_train_step(linen_loss, optimizer, batch, state)
        losses.append(float(metrics["loss"]))
    return state, losses


def rows_of_each_host_joined():
    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    shardings = {"x": create_data_parallel_sharding(mesh), "step": NamedSharding(mesh, P())}
    x = np.arange(4.0).reshape(4, 1) + 4 * jax.process_index()
    batch = place_batch_on_shards({"x": x, "step": 7}, shardings)
    whole = multihost_utils.process_allgather(batch["x"], tiled=True)
    return whole.ravel().tolist(), batch["x"].sharding.spec, int(batch["step"])


def knows_shardings_of_gradients(mesh):
    """Whether JAX finds how the gradient of a weight is sharded that is on no mesh."""
    x, w = place_batch_on_shards(np.ones((8, 2)), create_data_parallel_sharding(mesh)), jnp.ones(2)
    with jax.set_mesh(mesh), contextlib.suppress(Exception):
        return jax.grad(lambda w: (x @ w).sum())(w).shape == (2,)
    return False


@pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
@pytest.mark.parametrize("seed_004_under_set_mesh", [False, True])
def test_spmd_losses_are_those_of_one_device(num_devices, axis_type, seed_004_under_set_mesh):
    model = NnxModel(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    mesh, batches, traces = data_mesh(num_devices, axis_type=axis_type), numpy_batches(), []
    in_context, knows_shardings = contextlib.nullcontext, knows_shardings_of_gradients(mesh)
    if seed_004_under_set_mesh:  # a step of a model that is placed nowhere
        in_context, batches = functools.partial(jax.set_mesh, mesh), batches[:1]
    else:
        state = place_nnx_state_on_shards(nnx.state((model, optimizer)), mesh, {...: P()})
        nnx.update((model, optimizer), state)

    @nnx.jit
    def train_step(model, optimizer, batch):
        traces.append(1)
        return spmd_train_step(model, optimizer, nnx_loss, batch)

    sharding = create_data_parallel_sharding(mesh)
    with in_context():
        placed = [place_batch_on_shards(batch, sharding) for batch in batches]
        if seed_004_under_set_mesh and not knows_shardings:
            with pytest.raises(Exception, match="specify the output sharding"):
                train_step(model, optimizer, *placed)
            return
        losses = [float(train_step(model, optimizer, batch)) for batch in placed]
    np.testing.assert_allclose(losses, one_device_losses("nnx")[: len(losses)], rtol=1e-6)
    assert len(traces) == 1


class TestDataParallelTrainStep:
    @pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
    @pytest.mark.parametrize(("kind", "how"), [("TrainState", "replicate"), ("tuple", "fsdp")])
    def test_losses_are_those_of_one_device(self, num_devices, kind, how, axis_type):
        mesh = data_mesh(num_devices, axis_type=axis_type)
        state = place_model_state_on_shards(new_state(kind), mesh, how)
        end, losses = trained(state)
        np.testing.assert_allclose(losses, one_device_losses("linen"), rtol=1e-6)
        for leaf, before in zip(jax.tree.leaves(end), jax.tree.leaves(state), strict=True):
            assert leaf.sharding.is_equivalent_to(before.sharding, leaf.ndim)

    def test_defect_in_peer_flax_train_state_and_optax_fail(self):
        state = new_state("TrainState")
        new, metrics = data_parallel_train_step(linen_loss, None, numpy_batches()[0], state)
        assert isinstance(new, TrainState)
        assert (state.step, int(new.step)) == (0, 1)
        assert {name: figure.shape for name, figure in metrics.items()} == {"loss": ()}

    @pytest.mark.parametrize("kind", ["TrainState", "tuple"])
    def test_defect_in_peer_each_call_traces_again(self, kind):
        state, traces = new_state(kind), []

        def loss_fn(params, batch):
            traces.append(1)
            return linen_loss(params, batch)

        for batch in numpy_batches():
            state, _ = data_parallel_train_step(loss_fn, ADAM, batch, state)
        assert len(traces) == 1

    def test_unplaced_numpy_goes_to_all_devices_or_to_the_mesh_in_use(self, axis_type):
        unplaced = jax.tree.map(np.asarray, new_state("tuple"))
        in_use = functools.partial(jax.set_mesh, data_mesh(2, axis_type=axis_type))
        for in_context, num_devices in ((contextlib.nullcontext, 8), (in_use, 2)):
            with in_context():
                state, _ = data_parallel_train_step(linen_loss, ADAM, numpy_batches()[0], unplaced)
            assert {leaf.sharding.num_devices for leaf in jax.tree.leaves(state)} == {num_devices}

    def test_rows_really_are_split(self):
        # Each device multiplies its own 2 of the 16 rows.
        rows = []

        def loss_fn(params, batch):
            image = batch["image"]
            jax.debug.inspect_array_sharding(
                image, callback=lambda sharding: rows.append(sharding.shard_shape(image.shape)[0])
            )
            return linen_loss(params, batch)

        data_parallel_train_step(loss_fn, ADAM, numpy_batches()[0], new_state("tuple"))
        assert set(rows) == {2}

    def test_tensor_parallel_state_on_a_2d_mesh(self, axis_type):
        mesh = jax.make_mesh((4, 2), ("data", "model"), (axis_type,) * 2)
        specs = {"Dense_0/kernel": P(None, "model"), "Dense_1/kernel": P("model", None)}
        state = place_model_state_on_shards(new_state("TrainState"), mesh, specs)
        _, losses = trained(state, optimizer=None)
        np.testing.assert_allclose(losses, one_device_losses("linen"), rtol=1e-6)

    def test_rngs_reach_the_loss(self, axis_type):
        mesh = data_mesh(8, axis_type=axis_type)

        def loss_with(seed):
            state = place_model_state_on_shards(new_state("tuple"), mesh)
            batch, rngs = numpy_batches()[0], {"dropout": jax.random.key(seed)}
            return float(data_parallel_train_step(linen_loss, ADAM, batch, state, rngs)[1]["loss"])

        assert loss_with(0) == loss_with(0)
        assert loss_with(0) != loss_with(1)

    def test_padding_rows_do_not_count(self):
        batch = {name: rows[:13] for name, rows in numpy_batches()[0].items()}
        padded = {
            name: np.concatenate([rows, np.zeros_like(rows[:3])]) for name, rows in batch.items()
        }
        padded["valid_mask"] = np.arange(16) < 13
        _, metrics = data_parallel_train_step(linen_loss, ADAM, padded, new_state("tuple"))
        expected = linen_loss(new_state("tuple")[0], batch)
        np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-6)

    def test_under_a_jit_that_donates_the_state(self, axis_type):
        @jax.jit(donate_argnums=0)
        def train_step(state, batch):
            return data_parallel_train_step(linen_loss, ADAM, batch, state)

        mesh = data_mesh(8, axis_type=axis_type)
        state = place_model_state_on_shards(new_state("tuple"), mesh)
        batch = place_batch_on_shards(numpy_batches()[0], create_data_parallel_sharding(mesh))
        new, metrics = train_step(state, batch)
        np.testing.assert_allclose(metrics["loss"], one_device_losses("linen")[0], rtol=1e-6)
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state[0]))
        assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(new))

    def test_losses_that_are_no_longer_used_are_let_go(self):
        def loss_number(i):
            return lambda params, batch: jnp.mean(params * batch) + i

        state, batch, alive = (np.ones(8), ADAM.init(np.ones(8))), np.ones(8), weakref.WeakSet()
        for i in range(40):
            loss = loss_number(i)
            alive.add(loss)
            data_parallel_train_step(loss, ADAM, batch, state)
        gc.collect()
        assert len(alive) <= 32

    def test_indivisible_batch(self):
        batch = {name: rows[:9] for name, rows in numpy_batches()[0].items()}
        with pytest.raises(ShardingError, match=r"batch\['image'\]: dim 0 has size 9"):
            data_parallel_train_step(linen_loss, ADAM, batch, new_state("tuple"))

    def test_text_cannot_enter_the_step(self):
        batch = {**numpy_batches()[0], "name": np.array(["cat", "dog"] * 8)}
        with pytest.raises(ShardingError) as error:
            data_parallel_train_step(linen_loss, ADAM, batch, new_state("tuple"))
        assert str(error.value) == (
            "batch['name']: the leaf is text, which a compiled step cannot take.\n"
            "  leaf:   <U3[16]   mesh: data=8\n"
            "  remedy: drop this leaf from the batch before the step, or turn it into numbers."
        )

    def test_a_mesh_without_a_data_axis(self):
        mesh = jax.make_mesh((4, 2), ("x", "y"))
        state = place_model_state_on_shards(new_state("tuple"), mesh)
        batch, rngs = numpy_batches()[0], {"dropout": jax.random.key(0)}
        with pytest.raises(ShardingError, match="none of the mesh axes 'x', 'y' is called") as no:
            data_parallel_train_step(linen_loss, ADAM, batch, state)
        assert no.value.remedy.startswith("place the batch first")
        # Only the rows of a batch need such an axis.
        placed = distribute_batch(batch, NamedSharding(mesh, P("x")))
        _, metrics = data_parallel_train_step(linen_loss, ADAM, placed, state, rngs)
        assert metrics["loss"].sharding.mesh.axis_names == ("x", "y")

    def test_state_and_optimizer_that_do_not_go_together(self):
        batch, model = numpy_batches()[0], NnxModel(nnx.Rngs(0))
        of_nnx, params = nnx.Optimizer(model, ADAM, wrt=nnx.Param), new_state("tuple")[0]
        for optimizer, state, problem in [
            (of_nnx, model, "use spmd_train_step"),
            (optax.sgd(1.0), new_state("TrainState"), "has its own optimizer"),
            (None, new_state("tuple"), "got a tuple as state and no optimizer"),
            (ADAM, params, "got a dict as state and an optimizer"),
        ]:
            with pytest.raises(TypeError, match=problem):
                data_parallel_train_step(linen_loss, optimizer, batch, state)


def losses_of_each_placement():
    """Of a linear model on all devices of all hosts."""

    def loss_fn(params, batch):
        return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)

    mesh = jax.make_mesh((jax.device_count(),), ("data",))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)
    batch = {"x": x, "y": np.ones((8, 4), np.float32)}
    params = {"w": np.eye(4, dtype=np.float32)}
    losses = {}
    for placement in ("replicate", "fsdp", "not placed"):
        state = (params, ADAM.init(params))
        if placement != "not placed":
            state = place_model_state_on_shards(state, mesh, placement)
        losses[placement] = []
        for _ in range(3):
            state, metrics = data_parallel_train_step(loss_fn, ADAM, batch, state)
            losses[placement].append(float(metrics["loss"]))
    return losses


def on_each_host():
    rows = rows_of_each_host_joined()
    refuse_collective_device_put()
    return rows, losses_of_each_placement()


@pytest.mark.slow
def test_two_hosts_place_the_rows_that_each_has_loaded_and_have_the_losses_of_one():
    rows, two = zip(*rehearse.run(on_each_host, hosts=2, devices_per_host=2), strict=True)
    assert rows == ((list(range(8)), P("data"), 7),) * 2
    one = losses_of_each_placement()
    for losses in two:
        assert list(losses) == ["replicate", "fsdp", "not placed"]
        for of_placement in losses.values():
            np.testing.assert_allclose(of_placement, one["replicate"], rtol=1e-6)


class TestReduceGradients:
    @pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
    @pytest.mark.parametrize("reduce_type", ["mean", "sum"])
    def test_across_devices(self, num_devices, reduce_type):
        mesh = data_mesh(num_devices, "batch")
        gradients = {"w": jnp.ones((num_devices, 3)), "b": jnp.ones(num_devices)}
        reduce = functools.partial(reduce_gradients_across_devices, reduce_type=reduce_type)
        reduced = jax.shard_map(reduce, mesh=mesh, in_specs=P("batch"), out_specs=P())(gradients)
        value = {"mean": 1.0, "sum": num_devices}[reduce_type]
        np.testing.assert_array_equal(reduced["w"], np.full((1, 3), value))
        np.testing.assert_array_equal(reduced["b"], [value])

    @pytest.mark.parametrize("num_devices", DEVICE_COUNTS)
    @pytest.mark.parametrize("reduce_type", ["mean", "sum"])
    def test_defect_in_peer_gradients_become_scalars(self, num_devices, reduce_type, axis_type):
        gradients = {
            "w": np.arange(num_devices * 6, dtype=np.float32).reshape(num_devices, 2, 3),
            "b": np.arange(num_devices, dtype=np.float32),
        }
        sharding = create_data_parallel_sharding(data_mesh(num_devices, axis_type=axis_type))
        reduced = reduce_gradient_tree(place_batch_on_shards(gradients, sharding), reduce_type)
        for name, stacked in gradients.items():
            np.testing.assert_allclose(reduced[name], getattr(stacked, reduce_type)(axis=0))
            assert reduced[name].shape == stacked.shape[1:]

    @pytest.mark.parametrize("reduce", [reduce_gradient_tree, reduce_gradients_across_devices])
    def test_unknown_reduction_lists_the_valid_ones(self, reduce):
        with pytest.raises(ValueError, match=r"'max' is not one of \['mean', 'sum'\]"):
            reduce({"w": jnp.ones((2, 3))}, "max")

    def test_a_scalar_has_nothing_to_reduce(self):
        with pytest.raises(ShardingError, match=r"gradients\['b'\]: the gradient is a scalar"):
            reduce_gradient_tree({"b": jnp.ones(())})
