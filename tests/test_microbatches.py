"""`.shard_to(mesh, microbatches=A)`: the same batch, reshaped, to accumulate gradients over."""

import json
import math

import grain
import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import BatchLayout, ShardingError, ShardingTree
from grain_shard.tools.planning.topology import hosts_mesh
from tests.conftest import data_mesh, ids, numbered, to_numpy
from tests.pipelines import assert_same_batches, shared_out

# Who holds which rows.


def test_rows_that_the_shards_of_the_microbatches_do_not_divide():
    layout = BatchLayout(divisor=4, shards=(0,), microbatches=3)
    assert layout.padded(13) == 24
    with pytest.raises(ShardingError) as refusal:
        layout.rows(16)
    assert str(refusal.value) == (
        "a batch of 16 rows does not split into 3 microbatches of 4 shards each.\n"
        "  remedy: use a batch size of 24, or put PadToDivisible(12) before ShardBatch."
    )


SPECS = [P("data"), P(("data", "model")), P(("model", "data")), P("model"), P(None, "model"), P()]


@hypothesis.settings(deadline=None, max_examples=100)
@hypothesis.given(data=st.data())
def test_the_rows_of_every_host_are_those_that_jax_says_its_devices_hold(data):
    devices_per_host = data.draw(st.sampled_from([1, 2, 4, 8]), label="devices per host")
    order = data.draw(st.permutations(range(8)), label="device order")
    shape = data.draw(st.sampled_from([(8, 1), (4, 2), (2, 4), (1, 8)]), label="mesh")
    spec = data.draw(st.sampled_from(SPECS), label="spec")
    microbatches = data.draw(st.integers(1, 5), label="microbatches")
    hosts = 8 // devices_per_host
    devices = hosts_mesh({"x": 8}, hosts=hosts, devices_per_host=devices_per_host).devices
    mesh = Mesh(devices[list(order)].reshape(shape), ("data", "model"))
    layouts = ShardingTree.of(mesh, spec, microbatches=microbatches).layouts()
    of_one = layouts[0].divisor * data.draw(st.integers(1, 3), label="rows of a shard")
    size = microbatches * of_one
    expected = {host: set() for host in range(hosts)}
    whole = (microbatches, of_one, 8)
    for device, index in NamedSharding(mesh, P(None, *spec)).devices_indices_map(whole).items():
        rows = np.arange(size).reshape(microbatches, of_one)[index[:2]]
        expected[device.process_index] |= set(rows.reshape(-1).tolist())
    for host, layout in layouts.items():
        rows = layout.rows(size).tolist()
        assert rows == sorted(expected[host])
        assert layout.multiple == microbatches * layout.divisor
        assert layout.global_batch_size(len(rows)) == size
        assert [row for start, stop in layout.ranges(size) for row in range(start, stop)] == rows
        assert layout.amplification == pytest.approx(sum(map(len, expected.values())) / size)


# The batches.


@pytest.mark.parametrize(
    ("num_records", "microbatches", "expected"),
    [
        # A short last batch is padded at its end, so that its last microbatches may be padding.
        (6, 2, [[[0, 1], [2, 3]], [[4, 5], [-1, -1]]]),
        # Two shards of three microbatches take a multiple of 6.
        (5, 3, [[[0, 1], [2, 3], [-1, -1]], [[4, -1], [-1, -1], [-1, -1]]]),
    ],
)
def test_padding_is_at_the_end(num_records, microbatches, expected):
    with jax.set_mesh(data_mesh(2)):
        batches = list(numbered(num_records, 4).shard_to(microbatches=microbatches, pad_value=-1))
    for batch, rows in zip(batches, expected, strict=True):
        assert batch["id"].tolist() == rows
        np.testing.assert_array_equal(batch["valid_mask"], np.array(rows) >= 0)


def record(i):
    return {
        "id": np.int32(i),
        "tokens": np.arange(8, dtype=np.float32) + i,
        "name": f"record {i}",
    }


def records(num_records):
    return grain.MapDataset.range(num_records).seed(1).shuffle().map(record)


def random_access(num_records, global_batch_size):
    return records(num_records).batch(global_batch_size)


def stream(num_records, global_batch_size):
    return records(num_records).to_iter_dataset().batch(global_batch_size)


def feeds(num_records, global_batch_size):
    return shared_out(records(num_records), 2, 2 * global_batch_size)


def loader(num_records, global_batch_size):
    batches = list(random_access(num_records, global_batch_size))
    return grain_shard.from_iterable(batches, rows="global")


KINDS = [random_access, stream, feeds, loader]


def reshaped(leaf, microbatches, multiple):
    """A leaf without microbatches, padded to what these need and reshaped."""
    padding = np.zeros((-len(leaf) % multiple, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, padding]).reshape(microbatches, -1, *leaf.shape[1:])


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(data=st.data())
def test_it_is_the_same_batch_reshaped(data):
    kind = data.draw(st.sampled_from(KINDS), label="kind")
    num_records = data.draw(st.integers(1, 40), label="records")
    global_batch_size = data.draw(st.integers(1, 20), label="B")
    microbatches = data.draw(st.integers(1, 6), label="microbatches")
    shape = data.draw(
        st.sampled_from([(1, 1), (2, 1), (8, 1), (4, 2), (2, 2), (2, 4), (1, 8)]), label="mesh"
    )
    names = data.draw(st.permutations(["data", "model"]), label="axes")
    spec = data.draw(st.sampled_from(SPECS), label="spec")
    read = "needed" if kind in (stream, loader) else data.draw(st.sampled_from(["needed", "once"]))
    axis_type = data.draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]), label="axes are")
    devices = np.array(jax.devices())[: math.prod(shape)].reshape(shape)
    mesh = Mesh(devices, tuple(names), axis_types=(axis_type,) * 2)
    specs = {"id": P(*spec[:1]), "tokens": spec, "name": P(*spec[:1])}

    def batches(**options):
        return kind(num_records, global_batch_size).shard_to(mesh, specs, **options)

    expected = [to_numpy(batch) for batch in batches()]
    layout = ShardingTree.of(mesh, spec, microbatches=microbatches).layout()
    multiple, size = layout.multiple, layout.padded(len(expected[0]["id"]))
    if read == "once" and size % (microbatches * mesh.size):
        with pytest.raises(ShardingError, match='read="once" splits each batch over all'):
            batches(microbatches=microbatches, read=read)
        return
    ds = batches(microbatches=microbatches, read=read)
    found = list(ds)
    assert len(found) == len(expected)
    for batch, whole in zip(found, expected, strict=True):
        assert set(batch) == set(whole)
        for name, leaf in batch.items():
            want = reshaped(whole[name], microbatches, multiple)
            np.testing.assert_array_equal(np.asarray(leaf), want, name)
            if name != "name":
                assert leaf.dtype == want.dtype
                sharding = NamedSharding(mesh, P(None, *specs.get(name, spec[:1])))
                assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    structs = ds.abstract_batch()
    assert set(structs) == set(found[0])
    for name, struct in structs.items():
        leaf = found[0][name]
        assert leaf.shape == struct.shape
        if name != "name":
            assert (leaf.dtype, leaf.sharding) == (struct.dtype, struct.sharding)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_what_has_no_rows_is_as_it_was(microbatches):
    def collate(records):
        return {"x": np.array(records), "step": np.float32(7)}

    ds = grain.MapDataset.range(8).batch(4, batch_fn=collate)
    batch = next(iter(ds.shard_to(data_mesh(2), microbatches=microbatches)))
    assert batch["x"].shape == (microbatches, 4 // microbatches)
    assert batch["step"].shape == ()
    assert batch["step"].is_fully_replicated


def test_without_a_mask_any_tree_will_do():
    ds = grain.MapDataset.range(8).map(lambda i: (i, np.ones(3))).batch(8)
    (first, second), *_ = ds.shard_to(data_mesh(2), mask_key=None, microbatches=4)
    assert np.asarray(first).tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert second.shape == (4, 2, 3)


def test_on_one_device():
    (batch,) = numbered(4, 4).shard_to(jax.devices()[1], microbatches=2)
    assert np.asarray(batch["id"]).tolist() == [[0, 1], [2, 3]]


def test_the_stages_may_be_chained_by_hand(mesh):
    shardings = ShardingTree.of(mesh, P("data"), microbatches=2)
    layout = shardings.layout()
    ds = (
        numbered(20, 8)
        .pipe(grain_shard.ValidateBatchSize(layout.multiple))
        .pipe(grain_shard.PadToDivisible(layout.multiple))
        .pipe(grain_shard.ShardBatch(layout))
        .pipe(grain_shard.DevicePut(shardings))
    )
    assert_same_batches(list(ds), list(numbered(20, 8).shard_to(mesh, microbatches=2)))


@pytest.mark.slow
def test_workers_make_them_too(mesh):
    ds = numbered(20, 8)
    by_workers = list(ds.shard_to(mesh, microbatches=2, num_workers=1))
    assert_same_batches(by_workers, list(ds.shard_to(mesh, microbatches=2)))


# The state.


@pytest.mark.parametrize("kind", [random_access, stream, feeds])
@pytest.mark.parametrize(("before", "after"), [(None, 2), (2, None), (2, 4), (4, 1)])
def test_a_run_may_go_on_with_other_microbatches(kind, before, after):
    def batches(microbatches):
        return iter(kind(22, 8).shard_to(data_mesh(2), microbatches=microbatches))

    with batches(before) as saved, batches(after) as restored, batches(after) as uninterrupted:
        next(saved), next(uninterrupted)
        state = json.loads(json.dumps(saved.get_state()))
        restored.set_state(state)
        assert ids(restored) == ids(saved)
        restored.set_state(state)
        assert restored.get_state() == uninterrupted.get_state() == state


# What cannot work.


@pytest.mark.parametrize("microbatches", [0, -2, 2.0, True, "4", (2,)])
def test_what_is_no_number_of_microbatches_is_refused(microbatches, mesh):
    with pytest.raises(ShardingError, match="is not an integer of at least 1") as refusal:
        numbered(8, 8).shard_to(mesh, microbatches=microbatches)
    assert str(refusal.value).startswith(f"microbatches={microbatches!r}")


@pytest.mark.parametrize("remainder", ["drop", "error"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_padding_they_have_to_divide_the_batch(kind, remainder):
    with pytest.raises(ShardingError) as refusal:
        list(kind(48, 8).shard_to(data_mesh(2), microbatches=3, remainder=remainder))
    size, works = (16, 18) if kind is feeds else (8, 12)
    assert str(refusal.value) == (
        f"a batch of {size} rows does not split into 3 microbatches of 2 shards each.\n"
        "  mesh:   data=2\n"
        f'  remedy: use a batch size of {works}, or pass remainder="pad".'
    )
    list(kind(4 * works, works).shard_to(data_mesh(2), microbatches=3, remainder=remainder))


def test_a_spec_is_counted_from_the_rows_on(mesh):
    with pytest.raises(ShardingError) as refusal:
        list(numbered(8, 8).shard_to(mesh, {"id": P(None, "data"), "image": P()}, microbatches=2))
    problem = "entries for 2 dims, but the leaf has rank 1 without the dim of the microbatches"
    assert f"the spec has {problem}" in str(refusal.value)
    assert "int32[2, 4]   spec: P(None, 'data')" in str(refusal.value)
    assert "shorten the spec to length 1" in str(refusal.value)


def test_a_dim_that_its_axis_does_not_divide(mesh):
    specs = {"id": P(), "image": P(None, None, "data")}
    problem = "dim 3 has size 3, which is not divisible by mesh axis 'data'"
    with pytest.raises(ShardingError, match=problem) as refusal:
        list(numbered(8, 8).shard_to(mesh, specs, microbatches=2))
    assert "spec: P(None, None, None, 'data')" in str(refusal.value)
