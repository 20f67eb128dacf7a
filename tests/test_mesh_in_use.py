"""The mesh of `jax.set_mesh`: it is taken if none is given, and moves no batch of another mesh."""

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import ShardingError, ShardingTree
from grain_shard.training import place_model_state_on_shards
from tests.conftest import ids, numbered, to_numpy
from tests.pipelines import KINDS, assert_same_batches

PER_LEAF = {"id": P("data"), "image": P("data", None, None)}


@pytest.fixture
def mesh(axis_type):
    return jax.make_mesh((4, 2), ("data", "model"), (axis_type,) * 2)


@pytest.mark.parametrize(
    ("arguments", "spec"),
    [
        ((), P("data")),
        ((None,), P("data")),
        ((P("model"),), P("model")),
        ((P(("data", "model")),), P(("data", "model"))),
        ((None, P("model")), P("model")),
        (({**PER_LEAF, "id": P("model")},), P("model")),
    ],
    ids=str,
)
def test_it_is_the_mesh_of_set_mesh(mesh, arguments, spec):
    with jax.set_mesh(mesh):
        ds = numbered(20, 8).shard_to(*arguments)
    assert ids(ds) == [list(range(8)), list(range(8, 16)), list(range(16, 20))]
    assert next(iter(ds))["id"].sharding == NamedSharding(mesh, spec)


def test_a_mesh_that_is_passed_comes_before_the_one_in_use(mesh):
    other = jax.make_mesh((8,), ("data",))
    with jax.set_mesh(other):
        ds = numbered(8, 8).shard_to(mesh)
    assert ds.shardings.mesh_axes == (("data", 4), ("model", 2))


def test_none_in_a_tree_of_specs_is_replicated_as_with_a_mesh(mesh):
    with jax.set_mesh(mesh):
        in_use = ShardingTree.of({"id": P("data"), "image": None})
    assert in_use == ShardingTree.of(mesh, {"id": P("data"), "image": None})


def test_streams_slices_and_placement_take_it_too(mesh):
    with jax.set_mesh(mesh):
        ds = numbered(16, 8).to_iter_dataset().filter(lambda batch: True).shard_to(P("model"))
        assert ids(ds) == [list(range(8)), list(range(8, 16))]
        assert grain_shard.ShardByMesh().shard_count == 1
        rows = grain_shard.placement.distribute_batch({"x": np.arange(8)}, P("data"))
    assert rows["x"].sharding == NamedSharding(mesh, P("data"))


@pytest.mark.parametrize("arguments", [(), (P("data"),), (PER_LEAF,), (None, P("data"))], ids=str)
def test_no_mesh_anywhere_is_an_error_that_says_where_to_put_it(arguments):
    with pytest.raises(ShardingError) as refusal:
        numbered(8, 8).shard_to(*arguments)
    assert str(refusal.value) == (
        "no mesh is given, and no mesh is set by jax.set_mesh.\n"
        "  remedy: pass a jax.sharding.Mesh, or make the call inside of `with"
        " jax.set_mesh(mesh):`."
    )


def test_a_spec_must_fit_the_mesh_in_use(mesh):
    with jax.set_mesh(mesh), pytest.raises(ShardingError, match="'seq'") as refusal:
        numbered(8, 8).shard_to(P("seq"))
    assert "mesh: data=4, model=2" in str(refusal.value)


def test_two_specs_are_an_error(mesh):
    with jax.set_mesh(mesh), pytest.raises(ShardingError, match="a spec is given"):
        numbered(8, 8).shard_to(P("data"), P("model"))


def test_logical_axes_of_flax_become_specs_or_shardings(mesh):
    rules = [("batch", "data"), ("height", None), ("width", None)]
    logical = {"id": P("batch"), "image": P("batch", "height", "width")}
    with jax.set_mesh(mesh):
        by_specs = numbered(8, 8).shard_to(nn.logical_to_mesh(logical, rules))
    by_shardings = numbered(8, 8).shard_to(nn.logical_to_mesh_sharding(logical, mesh, rules))
    for ds in by_specs, by_shardings:
        assert next(iter(ds))["image"].sharding.is_equivalent_to(NamedSharding(mesh, P("data")), 3)


def small_mesh():
    return jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[4:])


def placed(name):
    return lambda tree, *args: [getattr(grain_shard.DevicePlacement(), name)(tree, *args)]


# Functions that place batches, or a tree.
PLACING = {
    **{
        name: lambda tree, make=make: make(lambda i: {"x": i}).shard_to(small_mesh(), P("data"))
        for name, make in KINDS.items()
    },
    "prefetch": lambda tree: grain_shard.prefetch_to_device([tree, tree]),
    "one device": lambda tree: placed("place_on_device")(tree, jax.devices()[7]),
    "a sharding": lambda tree: placed("distribute_batch")(tree, NamedSharding(small_mesh(), P())),
    "replicas": lambda tree: placed("replicate_across_devices")(tree, jax.devices()[:3]),
    "a dim": lambda tree: placed("shard_batch_dim")(tree, small_mesh()),
    "a state": lambda tree: [place_model_state_on_shards(tree, small_mesh())],
}


@pytest.mark.parametrize("guard", ["allow", "disallow", "disallow_explicit"])
@pytest.mark.parametrize("place", PLACING.values(), ids=PLACING)
def test_placement_knows_neither_the_mesh_in_use_nor_a_transfer_guard(place, guard):
    keys = jax.random.split(jax.random.key(0), 8)
    tree = {"numpy": np.arange(8), "jax": jax.numpy.arange(8), "keys": keys, "scalar": 3}
    expected = list(place(tree))
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        jax.config.update("jax_transfer_guard", guard)  # of all threads
        try:
            found = list(place(tree))
        finally:
            jax.config.update("jax_transfer_guard", "allow")
    assert_same_batches(map(as_numbers, found), map(as_numbers, expected))
    for batch, like in zip(found, expected, strict=True):
        assert [x.sharding for x in batch.values()] == [x.sharding for x in like.values()]


def as_numbers(batch):
    keys = {"keys": jax.random.key_data(batch["keys"])} if "keys" in batch else {}
    return to_numpy({**batch, **keys})
