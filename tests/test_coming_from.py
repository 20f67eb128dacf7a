"""Every row of the tables of docs/coming_from.md, as a program that runs.

A test is registered under the beginning of the row's left cell. A row without a test fails, and so
does a test without a row. The right cell is what runs; of the left one, what another library does
is shown where that library is at hand.
"""

import re
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from grain_shard.errors import ShardingError
from grain_shard.placement import DevicePlacement, distribute_batch, prefetch_to_device
from grain_shard.training import (
    create_1d_mesh,
    create_2d_mesh,
    create_sharded_pipeline,
    data_parallel_train_step,
    fsdp_rules,
    partition_spec_for_names,
    place_batch_on_shards,
    place_model_state_on_shards,
    reduce_gradient_tree,
)

PAGE = (Path(__file__).parents[1] / "docs" / "coming_from.md").read_text()

TESTS = {}


def row(*beginnings):
    def register(test):
        TESTS.update(dict.fromkeys(beginnings, test))
        return test

    return register


def rows_of_the_page():
    """The left cells of all tables, but that of names (see test_reference_documents.py)."""
    lines = [line for line in PAGE.splitlines() if line.startswith("| ")]
    cells = [line.strip("| ").split(" | ")[0] for line in lines]
    heads = {"`datarax.distributed`", "datarax", "PyTorch", "tf.data", "Grain"}
    names = PAGE[: PAGE.index("For those that are not taken over")]
    return [cell for cell in cells if cell not in heads and f"| {cell} |" not in names]


@pytest.mark.parametrize("cell", rows_of_the_page())
def test_row(cell, mesh):
    (beginning,) = [beginning for beginning in TESTS if cell.startswith(beginning)]
    TESTS[beginning](mesh)


def test_no_test_is_without_its_row():
    for beginning in TESTS:
        assert any(cell.startswith(beginning) for cell in rows_of_the_page()), beginning


def numbers(count):
    return grain.MapDataset.range(count).map(lambda i: {"id": i})


def ids_of(batches):
    return [np.asarray(b["id"])[np.asarray(b["valid_mask"])].tolist() for b in batches]


# datarax: what JAX has a line for


@row("`DeviceMeshManager.create_device_mesh(")
def device_mesh(mesh):
    assert dict(jax.make_mesh((4, 2), ("data", "model")).shape) == {"data": 4, "model": 2}


@row("`.create_data_parallel_mesh()`")
def data_parallel_mesh(mesh):
    assert dict(create_1d_mesh().shape) == {"data": 8}
    assert dict(create_1d_mesh("model", jax.devices()[:4]).shape) == {"model": 4}


@row("`.create_hybrid_mesh(4, 2)`")
def hybrid_mesh(mesh):
    assert dict(create_2d_mesh(second_axis_size=2).shape) == {"data": 4, "model": 2}


@row("`.get_mesh_info(mesh)`")
def mesh_info(mesh):
    assert (mesh.size, dict(mesh.shape)) == (8, {"data": 8})


@row("`reduce_mean(metrics)`")
def reductions(mesh):
    (batch,) = numbers(6).batch(8).shard_to(mesh)
    with jax.set_mesh(mesh):
        reduced = jax.jit(lambda x: (jnp.mean(x), jnp.sum(x), jnp.max(x), jnp.min(x)))(batch["id"])
        mask = batch["valid_mask"]
        masked = jax.jit(lambda x, mask: jnp.sum(x * mask) / jnp.sum(mask))(batch["id"], mask)
    assert [float(value) for value in reduced] == [15 / 8, 15, 5, 0]
    assert float(masked) == 2.5


@row("`reduce_mean_collective`")
def collectives(mesh):
    def reduce(x):
        gathered = jax.lax.all_gather(x, "data", tiled=True)
        return jax.lax.pmean(x, "data"), jax.lax.psum(x, "data"), gathered[None]

    reduced = jax.shard_map(
        reduce, mesh=mesh, in_specs=P("data"), out_specs=(P(), P(), P("data")), check_vma=False
    )
    mean, total, gathered = reduced(distribute_batch(np.arange(8.0), mesh))
    assert (float(mean[0]), float(total[0])) == (3.5, 28)
    np.testing.assert_array_equal(np.asarray(gathered)[5], np.arange(8))


@row("`collect_from_devices(metrics)`")
def collected(mesh):
    (batch,) = numbers(8).batch(8).shard_to(mesh)
    assert [int(x) for x in list(batch["id"])] == list(range(8))


# datarax: what is kept and differs


@row("`placement.shard_batch_dim`")
def numpy_is_placed(mesh):
    sharding = NamedSharding(mesh, P("data"))
    for place in (
        lambda x: DevicePlacement().shard_batch_dim(x, mesh),
        lambda x: place_batch_on_shards(x, mesh),
    ):
        for x in np.arange(8), jnp.arange(8):
            assert place({"x": x})["x"].sharding.is_equivalent_to(sharding, 1)
        with pytest.raises(ShardingError):
            place({"x": np.arange(7)})
    with pytest.raises(ShardingError):
        DevicePlacement().shard_batch_dim({"x": np.arange(8)}, mesh, mesh_axis="model")
    ours, theirs = place_batch_on_shards(np.arange(8), mesh), distribute_batch(np.arange(8), mesh)
    assert ours.sharding == theirs.sharding


@row("`prefetch_to_device` starts")
def starts_with_the_first_next(mesh):
    made = []

    def batches():
        made.append("a batch")
        yield {"x": np.zeros(8)}

    with prefetch_to_device(batches()) as prefetched:
        assert made == []
        next(prefetched)
        assert made == ["a batch"]


@row("after `close`")
def next_after_close(mesh):
    prefetched = prefetch_to_device(iter([{"x": np.zeros(8)}]))
    next(prefetched)
    with pytest.raises(StopIteration):
        next(prefetched)
    prefetched.close()
    with pytest.raises(ValueError, match="closed"):
        next(prefetched)


@row("it has no state")
def prefetching_has_a_state(mesh):
    ds = numbers(40).batch(8).to_iter_dataset()
    with prefetch_to_device(iter(ds)) as prefetched:
        next(prefetched)
        state = prefetched.get_state()
    with prefetch_to_device(iter(ds), cpu_buffer_size=1) as prefetched:
        prefetched.set_state(state)
        assert next(prefetched)["id"].tolist() == list(range(8, 16))


@row("`data_parallel_train_step` is", "its `state` has", "its `loss_fn(variables")
def a_training_step(mesh):
    traces = []

    def loss_fn(params, batch):
        traces.append("one")
        return jnp.mean((batch["x"] * params["w"] - batch["y"]) ** 2)

    def noisy(params, batch, rngs):
        return loss_fn(params, batch) + 0 * jax.random.normal(rngs)

    params, optimizer = {"w": jnp.zeros(())}, optax.sgd(0.1)
    state = params, optimizer.init(params)
    batch = {"x": np.arange(8.0), "y": np.arange(8.0)}
    for _ in range(3):
        state, metrics = data_parallel_train_step(loss_fn, optimizer, batch, state)
    assert len(traces) == 1
    assert (list(metrics), metrics["loss"].shape) == (["loss"], ())
    assert state[0]["w"].shape == ()
    linen = TrainState.create(apply_fn=None, params=params, tx=optimizer)
    linen, _ = data_parallel_train_step(loss_fn, None, batch, linen)
    assert int(linen.step) == 1
    _, metrics = data_parallel_train_step(
        noisy, optimizer, batch, (params, optimizer.init(params)), jax.random.key(0)
    )
    assert float(metrics["loss"]) == np.mean(np.arange(8.0) ** 2)


@row("`reduce_gradient_tree`")
def gradients_by_device(mesh):
    reduced = reduce_gradient_tree({"w": np.arange(12.0).reshape(4, 3)})
    assert reduced["w"].tolist() == [4.5, 5.5, 6.5]


@row('`place_model_state_on_shards(state, mesh, "fsdp")`')
def fsdp_shards(mesh):
    placed = place_model_state_on_shards({"w": jnp.zeros((16, 8))}, mesh, "fsdp")
    assert placed["w"].addressable_shards[0].data.size == 16
    with pytest.raises(ShardingError, match="fsdp"):
        place_model_state_on_shards({"w": jnp.zeros((16, 8))}, mesh, "fspd")


@row("with a dict of paths")
def paths_to_specs(mesh):
    state = {"w": jnp.zeros((16, 8)), "b": jnp.zeros(8)}
    placed = place_model_state_on_shards(state, mesh, {"w": P("data")})
    assert placed["b"].sharding.is_fully_replicated
    assert not placed["w"].sharding.is_fully_replicated
    with pytest.raises(ShardingError, match="use one of b, w"):
        place_model_state_on_shards(state, mesh, {"weights": P("data")})


@row("`fsdp_rules()`")
def rules_for_weights(mesh):
    assert partition_spec_for_names(fsdp_rules(), "embed", "mlp") == P("data", None)
    model = fsdp_rules(model_axis="model")
    assert partition_spec_for_names(model, "embed", "mlp") == P("model", None)


@row("the guide's `create_sharded_pipeline`", "a short last batch wraps around")
def one_dataset(mesh):
    ds = create_sharded_pipeline([{"id": i} for i in range(20)], mesh, batch_size_per_device=2)
    assert ids_of(ds) == [list(range(16)), list(range(16, 20))]


@row("`Pipeline(source, batch_size=...)`", "`DataLoader(batch_size=per_gpu)`")
def the_global_batch(mesh):
    assert numbers(64).batch(32).shard_to(mesh).abstract_batch()["id"].shape == (32,)


# PyTorch


@row(
    "`DistributedSampler(dataset",
    "`dataset.shard(num_hosts",
    "`ShardByJaxProcess()` on the source",
    "`.batch(per_host)`",
)
def nobody_shards_the_source(mesh):
    assert ids_of(numbers(16).batch(16).shard_to(mesh)) == [list(range(16))]
    options = grain_shard.ShardByMesh(mesh, P("data"))  # for streams
    stream = numbers(16)[options.shard_index :: options.shard_count].to_iter_dataset()
    batches = stream.batch(16 // options.shard_count).shard_to(mesh, P("data"), rows="local")
    assert ids_of(batches) == [list(range(16))]


@row("`for epoch in range(n)")
def epochs(mesh):
    ds = numbers(16).seed(1).shuffle().batch(16).shard_to(mesh)
    first, second = (ids_of(batches) for batches in ds.epochs(2))
    assert first != second
    assert ids_of(ds) == first
    with pytest.warns(UserWarning, match="second pass"):
        assert ids_of(ds) == first


@row("`for batch in loader`")
def a_loader_as_it_is(mesh):
    loader = [{"id": np.arange(8)}, {"id": np.arange(8, 12)}]
    batches = grain_shard.from_iterable(loader, rows="local").shard_to(mesh)
    assert ids_of(batches) == [list(range(8)), list(range(8, 12))]


@row("`num_workers=8`", "`.mp_prefetch(MultiprocessingOptions(8))`")
def worker_processes(mesh):
    ds = grain.MapDataset.source([{"id": i} for i in range(16)]).batch(8)
    with iter(ds.shard_to(mesh, num_workers=1)) as batches:
        assert ids_of(batches) == [list(range(8)), list(range(8, 16))]


@row("the last batch repeats samples", "`batch(global_batch_size, drop_remainder=True)`")
def the_remainder_is_kept(mesh):
    assert ids_of(numbers(10).batch(8).shard_to(mesh)) == [list(range(8)), [8, 9]]


@row("`drop_last=True`")
def the_remainder_is_dropped(mesh):
    assert ids_of(numbers(10).batch(8).shard_to(mesh, remainder="drop")) == [list(range(8))]


@row("a sampler's state", "`grain.checkpoint.CheckpointSave(it)`")
def a_state_for_any(mesh):
    half = create_1d_mesh(devices=jax.devices()[:4])
    with iter(numbers(24).batch(8).shard_to(mesh)) as batches:
        next(batches)
        state = batches.get_state()
        assert CheckpointSave(batches).iterator is batches
        assert CheckpointRestore(batches).iterator is batches
    with iter(numbers(24).batch(8).shard_to(half)) as batches:
        batches.set_state(state)
        assert ids_of([next(batches)]) == [list(range(8, 16))]


# tf.data and Grain


@row("`experimental_distribute_dataset`")
def distributed(mesh):
    (batch,) = numbers(8).batch(8).shard_to(mesh)
    assert len(batch["id"].addressable_shards) == 8


@row("`prefetch(AUTOTUNE)`")
def buffers(mesh):
    ds = numbers(32).batch(8).shard_to(mesh, cpu_buffer_size=1, device_buffer_size=1)
    assert len(ids_of(ds)) == 4


@row("`.to_iter_dataset()`", "`.to_iter_dataset(ReadOptions(8, 32))`")
def read_options(mesh):
    batches = numbers(16).batch(8)
    plain = ids_of(batches.shard_to(mesh))
    assert ids_of(batches.to_iter_dataset().shard_to(mesh)) == plain

    def threads_and_buffer(read_options, **options):
        ds = batches.to_iter_dataset(grain.ReadOptions(*read_options)).shard_to(mesh, **options)
        with iter(ds) as iterator:
            next(iterator)
            return str(iterator.stats().read_threads), ds.settings.cpu_buffer_size

    assert threads_and_buffer((8, 32)) == ("8", 32)
    assert threads_and_buffer((8, 32), num_threads=2) == ("2", 32)
    assert threads_and_buffer((8, 32), cpu_buffer_size=3) == ("8", 3)
    assert threads_and_buffer((16, 500))[1] == 4  # Grain's defaults are no wish


@row("`grain.experimental.device_put(ds, sharding)`")
def by_a_sharding(mesh):
    sharding = NamedSharding(mesh, P("data"))
    for ds in numbers(8).batch(8).shard_to(mesh), numbers(8).batch(8).shard_to(sharding):
        (batch,) = ds
        assert batch["id"].sharding.is_equivalent_to(sharding, 1)


@row("`grain.DataLoader(source, sampler, operations)`")
def a_dataset_in_place_of_a_loader(mesh):
    ds = grain.MapDataset.source(range(16)).shuffle(seed=1).map(lambda i: {"id": i}).batch(8)
    first, second = ids_of(ds.shard_to(mesh))
    assert sorted(first + second) == list(range(16))


def test_the_names_of_datarax_are_those_of_the_table():
    datarax = pytest.importorskip("datarax.distributed", exc_type=ImportError)
    table = PAGE[PAGE.index("| `datarax.distributed` |") : PAGE.index("For those that are not")]
    assert set(re.findall(r"`(\w+)`", table)) == set(datarax.__all__)


@row("`assert_equal_output_after_checkpoint(ds)`")
def output_after_checkpoint(mesh):
    ds = numbers(30).batch(8).shard_to(mesh)
    with pytest.raises(ValueError, match="truth value"):
        grain.experimental.assert_equal_output_after_checkpoint(ds)
    as_numpy = ds.map(lambda batch: jax.tree.map(np.asarray, batch))
    grain.experimental.assert_equal_output_after_checkpoint(as_numpy)
