"""`grain_shard.training.microbatches(batch, n)`: a batch is cut inside the training step."""

import contextlib
import re

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import grain_shard  # noqa: F401
from grain_shard import ShardingError
from grain_shard.training import microbatches

AXIS_TYPES = [AxisType.Auto, AxisType.Explicit]
COLLECTIVES = "all-gather|all-reduce|all-to-all|collective|reduce-scatter|send|recv"


def mesh_of(axis_type, **axes):
    size = int(np.prod([*axes.values()]))
    return jax.make_mesh(
        tuple(axes.values()), tuple(axes), (axis_type,) * len(axes), devices=jax.devices()[:size]
    )


def batch_on(mesh, specs, rows=16):
    """A batch of `rows` rows, the last three of them padding."""
    records = grain.MapDataset.range(rows - 3).map(lambda i: {"id": np.int32(i)})
    wide = np.arange(8, dtype=np.float32).reshape(4, 2)
    ds = records.map(lambda record: dict.fromkeys(specs, record["id"] * wide) | record)
    (batch,) = ds.batch(rows).shard_to(mesh, {"id": P("data")} | specs)
    return batch | {"step": jax.device_put(np.int32(7), NamedSharding(mesh, P()))}


def collectives(compiled):
    return set(re.findall(rf"\b(?:{COLLECTIVES})[a-z-]*", compiled.as_text()))


SPECS = {
    str(spec): spec
    for spec in (
        P("data"),
        P(("data", "fsdp")),
        P(("fsdp", "data"), "model"),
        P("data", None, "model"),
        P(None, "model"),
        P(),
    )
}


@pytest.mark.parametrize("in_use", [False, True], ids=["", "set_mesh"])
@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=lambda axis_type: axis_type.name)
@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_has_a_part_of_every_shard_so_nothing_moves(n, axis_type, in_use):
    mesh = mesh_of(axis_type, data=2, fsdp=2, model=2)
    batch = batch_on(mesh, SPECS)
    with jax.set_mesh(mesh) if in_use else contextlib.nullcontext():
        compiled = jax.jit(microbatches, static_argnums=1).lower(batch, n).compile()
        cut = compiled(batch)
    assert collectives(compiled) == set()
    assert cut.pop("step").tolist() == [7] * n, "a scalar is for each of them"
    assert set(cut) == {"id", "valid_mask", *SPECS}
    for name, leaf in cut.items():
        whole, rows = batch[name], np.asarray(batch[name])
        np.testing.assert_array_equal(leaf, np.stack([rows[i::n] for i in range(n)]), name)
        assert leaf.dtype == whole.dtype
        sharding = NamedSharding(mesh, P(None, *whole.sharding.spec))
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)


@pytest.mark.parametrize("axis_type", AXIS_TYPES, ids=lambda axis_type: axis_type.name)
def test_the_sums_over_the_microbatches_are_those_of_the_batch(axis_type):
    mesh = mesh_of(axis_type, data=4)

    def loss_sum(w, batch):
        errors = (batch["x"].reshape(-1, 8) @ w - batch["id"]) ** 2
        return jnp.sum(errors * batch["valid_mask"])

    @jax.jit
    def accumulated(w, batch):
        def add(total, microbatch):
            return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_sum)(w, microbatch)), None

        return jax.lax.scan(add, (0.0, jnp.zeros_like(w)), microbatches(batch, 4))[0]

    with jax.set_mesh(mesh):
        batch, w = batch_on(mesh, {"x": P("data")}), jnp.full(8, 0.1)
        compiled = accumulated.lower(w, batch).compile()
        whole = jax.jit(jax.value_and_grad(loss_sum))(w, batch)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), compiled(w, batch), whole
        )
    assert collectives(compiled) == {"all-reduce"}, "of the sums"


@pytest.mark.parametrize(("n", "moves"), [(2, {"all-reduce"}), (4, {"all-reduce", "all-gather"})])
def test_rows_move_with_auto_axes_if_a_shard_does_not_split(n, moves):
    batch = batch_on(mesh_of(AxisType.Auto, data=8), {})

    def sums(batch):
        def of(microbatch):
            return jnp.sum(microbatch["id"] * microbatch["valid_mask"])

        return jax.lax.map(of, microbatches(batch, n))

    compiled = jax.jit(sums).lower(batch).compile()
    assert collectives(compiled) == moves
    assert compiled(batch).tolist() == [sum(range(i, 13, n)) for i in range(n)]


@pytest.mark.parametrize(
    ("axis_type", "axes", "rows", "n", "message"),
    [
        (
            AxisType.Explicit,
            {"data": 4, "model": 2},
            40,
            4,
            "batch['id']: 40 rows in 4 shards do not split into 4 microbatches.\n"
            "  leaf:   int32[40]   spec: P('data')   mesh: data=4, model=2\n"
            "  remedy: use a batch size of 48, or",
        ),
        (AxisType.Auto, {"data": 8}, 40, 3, "use a batch size of 48, or"),
        (AxisType.Auto, {"data": 4, "model": 2}, 36, 8, "use a batch size of 64, or"),
    ],
)
def test_an_error_names_the_batch_size_that_splits(axis_type, axes, rows, n, message):
    mesh = mesh_of(axis_type, **axes)
    cut = jax.jit(microbatches, static_argnums=1)
    with pytest.raises(ShardingError) as refusal:
        cut(batch_on(mesh, {}, rows=rows), n)
    assert message in str(refusal.value)
    size = int(re.search(r"batch size of (\d+)", str(refusal.value))[1])
    batch = batch_on(mesh, {}, rows=size)
    assert collectives(cut.lower(batch, n).compile()) == set()


@pytest.mark.parametrize("n", [0, -2, 2.0, True])
def test_their_number_is_a_positive_integer(n):
    with pytest.raises(ShardingError, match=r"n=.* is not an integer of at least 1"):
        microbatches({"x": jnp.zeros(8)}, n)
