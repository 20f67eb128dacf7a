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
from grain_shard import ShardingError, ShardingTree
from tests.conftest import data_mesh, ids, numbered, to_numpy
from tests.pipelines import assert_same_batches, shared_out

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
    return {"id": np.int32(i), "tokens": np.arange(8, dtype=np.float32) + i, "name": f"record {i}"}


def records(num_records):
    return grain.MapDataset.range(num_records).seed(1).shuffle().map(record)


# For each kind of pipeline, a function of the number of records and the global batch size.
KINDS = {
    "random access": lambda num, size: records(num).batch(size),
    "stream": lambda num, size: records(num).to_iter_dataset().batch(size),
    "feeds": lambda num, size: shared_out(records(num), 2, 2 * size),
    "loader": lambda num, size: grain_shard.from_iterable(
        list(records(num).batch(size)), rows="global"
    ),
}


def reshaped(leaf, microbatches, multiple):
    """A leaf without microbatches, padded to what these need and reshaped."""
    padding = np.zeros((-len(leaf) % multiple, *leaf.shape[1:]), leaf.dtype)
    return np.concatenate([leaf, padding]).reshape(microbatches, -1, *leaf.shape[1:])


SPECS = [P("data"), P(("data", "model")), P(("model", "data")), P("model"), P(None, "model"), P()]


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(data=st.data())
def test_it_is_the_same_batch_reshaped(data):
    kind = data.draw(st.sampled_from(list(KINDS)), label="kind")
    num_records = data.draw(st.integers(1, 40), label="records")
    global_batch_size = data.draw(st.integers(1, 20), label="B")
    microbatches = data.draw(st.integers(1, 6), label="microbatches")
    shape = data.draw(
        st.sampled_from([(1, 1), (2, 1), (8, 1), (4, 2), (2, 2), (2, 4), (1, 8)]), label="mesh"
    )
    names = data.draw(st.permutations(["data", "model"]), label="axes")
    spec = data.draw(st.sampled_from(SPECS), label="spec")
    reads = ["needed"] if kind in ("stream", "loader") else ["needed", "once"]
    read = data.draw(st.sampled_from(reads), label="read")
    axis_type = data.draw(st.sampled_from([AxisType.Auto, AxisType.Explicit]), label="axes are")
    devices = np.array(jax.devices())[: math.prod(shape)].reshape(shape)
    mesh = Mesh(devices, tuple(names), axis_types=(axis_type,) * 2)
    specs = {"id": P(*spec[:1]), "tokens": spec, "name": P(*spec[:1])}

    def batches(**options):
        return KINDS[kind](num_records, global_batch_size).shard_to(mesh, specs, **options)

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


@pytest.mark.parametrize("kind", ["random access", "stream", "feeds"])
@pytest.mark.parametrize(("before", "after"), [(None, 2), (2, None), (2, 4), (4, 1)])
def test_a_run_may_go_on_with_other_microbatches(kind, before, after):
    def batches(microbatches):
        return iter(KINDS[kind](22, 8).shard_to(data_mesh(2), microbatches=microbatches))

    with batches(before) as saved, batches(after) as restored, batches(after) as uninterrupted:
        next(saved), next(uninterrupted)
        state = json.loads(json.dumps(saved.get_state()))
        restored.set_state(state)
        assert ids(restored) == ids(saved)
        restored.set_state(state)
        assert restored.get_state() == uninterrupted.get_state() == state


# What cannot work.


@pytest.mark.parametrize("remainder", ["drop", "error"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_padding_they_have_to_divide_the_batch(kind, remainder):
    with pytest.raises(ShardingError) as refusal:
        list(KINDS[kind](48, 8).shard_to(data_mesh(2), microbatches=3, remainder=remainder))
    size, works = (16, 18) if kind == "feeds" else (8, 12)
    assert str(refusal.value) == (
        f"a batch of {size} rows does not split into 3 microbatches of 2 shards each.\n"
        "  mesh:   data=2\n"
        f'  remedy: use a batch size of {works}, or pass remainder="pad".'
    )
    list(KINDS[kind](4 * works, works).shard_to(data_mesh(2), microbatches=3, remainder=remainder))
