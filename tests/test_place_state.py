"""Model and optimizer states on a mesh."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from grain_shard.errors import ShardingError
from grain_shard.training import place_model_state_on_shards, place_nnx_state_on_shards
from tests.conftest import data_mesh

PARAMS = {
    "up": {"kernel": np.ones((8, 16), np.float32), "bias": np.zeros(16, np.float32)},
    "down": {"kernel": np.ones((16, 3), np.float32), "bias": np.zeros(3, np.float32)},
}
LINEAR = nnx.state(nnx.Linear(8, 16, rngs=nnx.Rngs(0)))
ROWS, BOTH = P("model", None), P("data", "model")


def specs(tree):
    """The spec of each leaf by its path."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf.sharding.spec
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


@pytest.fixture
def mesh_2d(axis_type):
    return jax.make_mesh((4, 2), ("data", "model"), (axis_type,) * 2)


@pytest.mark.parametrize("num_devices", [1, 2, 4, 8])
@pytest.mark.parametrize("word", [None, "replicate"])
def test_replicates(num_devices, word):
    placed = place_model_state_on_shards(PARAMS, data_mesh(num_devices), word)
    for leaf, original in zip(jax.tree.leaves(placed), jax.tree.leaves(PARAMS), strict=True):
        assert leaf.sharding.is_fully_replicated
        assert leaf.sharding.num_devices == num_devices
        np.testing.assert_array_equal(leaf, original)


def test_defect_in_peer_fsdp_replicates(mesh):
    placed = place_model_state_on_shards(PARAMS, mesh, "fsdp")
    assert specs(placed) == {
        "up/kernel": P(None, "data"),  # 16, its largest dim
        "up/bias": P("data"),
        "down/kernel": P("data"),
        "down/bias": P(),  # 8 does not divide 3
    }
    assert placed["up"]["kernel"].addressable_shards[0].data.shape == (8, 2)


def test_fsdp_takes_the_axis_of_that_name():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    placed = place_model_state_on_shards({"kernel": np.ones((4, 4))}, mesh, "fsdp")
    assert specs(placed) == {"kernel": P("fsdp")}


def test_fsdp_on_a_mesh_that_has_no_axis_for_it():
    mesh = jax.make_mesh((4, 2), ("x", "y"))
    with pytest.raises(ShardingError, match="none of the mesh axes 'x', 'y' is called 'data'"):
        place_model_state_on_shards(PARAMS, mesh, "fsdp")


@pytest.mark.parametrize(
    ("by_path", "up", "down"),
    [
        ({"up/kernel": P(None, "model"), "down/kernel": ROWS}, P(None, "model"), ROWS),
        # The end of a path is enough, and the longest counts.
        ({"kernel": ROWS, "up/kernel": BOTH, "bias": P()}, BOTH, ROWS),
    ],
)
def test_by_path(mesh_2d, by_path, up, down):
    placed = specs(place_model_state_on_shards(PARAMS, mesh_2d, by_path))
    assert placed == {"up/kernel": up, "up/bias": P(), "down/kernel": down, "down/bias": P()}


def test_a_longer_spec_is_cut_to_the_rank(mesh_2d):
    state = {"scale": np.ones(4), "step": 7}
    by_path = {"scale": P("data", "model"), "step": P("data")}
    placed = place_model_state_on_shards(state, mesh_2d, by_path)
    assert specs(placed) == {"scale": P("data"), "step": P()}


def test_a_path_of_nnx_may_do_without_the_value_at_its_end(mesh_2d):
    placed = place_model_state_on_shards(LINEAR, mesh_2d, {"kernel": P(None, "model")})
    assert specs(placed) == {"kernel/value": P(None, "model"), "bias/value": P()}


def test_optimizer_moments_follow_their_parameter(mesh):
    model = nn.Sequential([nn.Dense(16)])
    params = model.init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(0.1))
    placed = place_model_state_on_shards(state, mesh, {"layers_0/kernel": P(None, "data")})
    assert specs(placed) == {
        "step": P(),
        "params/layers_0/bias": P(),
        "params/layers_0/kernel": P(None, "data"),
        "opt_state/0/count": P(),
        "opt_state/0/mu/layers_0/bias": P(),
        "opt_state/0/mu/layers_0/kernel": P(None, "data"),
        "opt_state/0/nu/layers_0/bias": P(),
        "opt_state/0/nu/layers_0/kernel": P(None, "data"),
    }
    assert placed.step.dtype == jnp.int32


@pytest.mark.parametrize("path", ["up/kernle", "p/kernel", "kernel/up", ""])
def test_defect_in_peer_mistyped_path_is_ignored(mesh, path):
    with pytest.raises(ShardingError, match=f"the path '{path}' matches no leaf") as error:
        place_model_state_on_shards(PARAMS, mesh, {path: P("data")})
    assert error.value.remedy == "match one of down/bias, down/kernel, up/bias, up/kernel."


def test_a_long_list_of_paths_is_cut(mesh):
    state = {f"layer_{i:02}": np.ones(8) for i in range(25)}
    with pytest.raises(ShardingError, match="layer_19 and 5 more"):
        place_model_state_on_shards(state, mesh, {"layer": P("data")})


@pytest.mark.parametrize(
    ("param_sharding", "message"),
    [
        (
            "fspd",
            "param_sharding='fspd' is not a known choice.\n"
            "  mesh:   data=8\n"
            "  remedy: pass None, 'replicate', 'fsdp', or a dict from paths to PartitionSpecs.",
        ),
        (
            {"kernel": P("modle")},
            "the spec names the mesh axis 'modle', which does not exist.\n"
            "  spec:   P('modle')   mesh: data=8\n"
            "  remedy: name an axis of the mesh ('data'), or leave 'modle' out.",
        ),
        (
            {"down/kernel": P(None, "data")},
            "down/kernel: dim 1 has size 3, which is not divisible by mesh axis 'data' (size 8).\n"
            "  leaf:   float32[16, 3]   spec: P(None, 'data')   mesh: data=8\n"
            "  remedy: shard another dim of this leaf, or replicate it with PartitionSpec().",
        ),
    ],
    ids=["defect in peer: unknown word replicates", "no such axis", "an axis that does not divide"],
)
def test_refusals(mesh, param_sharding, message):
    with pytest.raises(ShardingError) as error:
        place_model_state_on_shards(PARAMS, mesh, param_sharding)
    assert str(error.value) == message


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)


@pytest.mark.parametrize("as_state_sharding", [False, True])
def test_nnx_state_by_filter(mesh_2d, as_state_sharding):
    model = NnxModel(nnx.Rngs(0))
    kernel = np.asarray(model.up.kernel.get_value())
    kernels, others = nnx.PathContains("kernel"), NamedSharding(mesh_2d, P())
    filters = {kernels: P(None, "model"), nnx.Param: P("data"), ...: others}
    if as_state_sharding:
        filters = nnx.StateSharding(filters)
    placed = place_nnx_state_on_shards(nnx.state(model), mesh_2d, filters)
    assert specs(placed) == {
        "up/kernel/value": P(None, "model"),
        "up/bias/value": P("data"),
        "norm/scale/value": P("data"),
        "norm/bias/value": P("data"),
        "norm/mean/value": P(),
        "norm/var/value": P(),
        "dropout/rngs/count/value": P(),
        "dropout/rngs/key/value": P(),
    }
    nnx.update(model, placed)
    np.testing.assert_array_equal(model.up.kernel.get_value(), kernel)


def test_nnx_sharding_may_be_of_any_kind(mesh):
    device = jax.devices()[3]
    placed = place_nnx_state_on_shards(LINEAR, mesh, {...: SingleDeviceSharding(device)})
    assert {leaf.device for leaf in jax.tree.leaves(placed)} == {device}


def test_nnx_variable_without_a_filter(mesh):
    with pytest.raises(ShardingError) as error:
        place_nnx_state_on_shards(nnx.state(NnxModel(nnx.Rngs(0))), mesh, {nnx.Param: P()})
    assert str(error.value) == (
        "dropout/rngs/count: no filter matches this RngCount.\n"
        "  leaf:   uint32[]   mesh: data=8\n"
        "  remedy: add a filter for this variable, or `...: PartitionSpec()` for all others."
    )


def test_nnx_filter_that_matches_nothing(mesh):
    with pytest.raises(ShardingError, match=r"'kernle'.* matches no leaf") as error:
        place_nnx_state_on_shards(LINEAR, mesh, {nnx.PathContains("kernle"): P("data"), ...: P()})
    assert error.value.remedy == "match one of bias, kernel."


def test_nnx_variable_type_that_the_model_lacks(mesh):
    place_nnx_state_on_shards(LINEAR, mesh, {nnx.BatchStat: P(), nnx.Param: P("data"), ...: P()})
