"""`ArraySource`: rows of arrays, gathered straight into a batch."""

import functools
import pickle

import grain
import h5py
import jax
import numpy as np
import pytest
import zarr
from numpy.lib.stride_tricks import sliding_window_view

import grain_shard
from grain_shard import ArraySource, BatchSchedule, ShardingError
from grain_shard.grain_inside.array_rows import ArrayRows
from tests.conftest import data_mesh, refused
from tests.pipelines import assert_same_batches, shared_out

RECORDS = 50


def arrays():
    rng = np.random.default_rng(0)
    return {
        "image": rng.integers(0, 255, (RECORDS, 4, 3), dtype=np.uint8),
        "pair": (np.arange(RECORDS), rng.normal(size=(RECORDS, 2)).astype(np.float32)),
    }


def in_memory(tmp_path):
    return arrays()


def stored(store):
    """The same tree of what `store` makes of each array and of its name."""
    return jax.tree_util.tree_map_with_path(
        lambda path, array: store(jax.tree_util.keystr(path), array), arrays()
    )


def memory_mapped(tmp_path):
    def store(name, array):
        array.tofile(tmp_path / name)
        return np.memmap(tmp_path / name, array.dtype, mode="r", shape=array.shape)

    return stored(store)


def hdf5(tmp_path):
    with h5py.File(tmp_path / "data.h5", "w") as file:
        stored(lambda name, array: file.create_dataset(name, data=array))
    file = h5py.File(tmp_path / "data.h5", "r")
    return stored(lambda name, array: file[name])


def in_zarr(tmp_path):
    def store(name, array):
        return zarr.array(array, store=tmp_path / name, chunks=(7, *array.shape[1:]))

    return stored(store)


def on_a_device(tmp_path):
    return jax.tree.map(jax.numpy.asarray, arrays())


KINDS = [in_memory, memory_mapped, hdf5, in_zarr, on_a_device]


def other(source):
    return grain.MapDataset.source(source)[3:40].shuffle(seed=7)


# Choices of indices between the source and the batch.
CHOICES = {
    "nothing": grain.MapDataset.source,
    "shuffle": lambda source: grain.MapDataset.source(source).shuffle(seed=3),
    "slice": lambda source: grain.MapDataset.source(source)[40:2:-3],
    "repeat": lambda source: grain.MapDataset.source(source).seed(1).shuffle().repeat(3),
    "mix": lambda source: grain_shard.mix(
        [grain.MapDataset.source(source), other(source)], {0: (2, 1)}
    ),
    "Grain's mix": lambda source: grain.MapDataset.mix(
        [grain.MapDataset.source(source), other(source)], [0.3, 0.7]
    ).shuffle(seed=5),
    "concatenate": lambda source: grain.MapDataset.concatenate(
        [other(source), grain.MapDataset.source(source)]
    ).repeat(2),
}


PIPELINES = {
    **{name: lambda source, c=choice: c(source).batch(16) for name, choice in CHOICES.items()},
    "a schedule of batches": lambda source: grain.MapDataset.source(source).pipe(
        BatchSchedule({0: 8, 2: 16})
    ),
    "feeds": lambda source: shared_out(grain.MapDataset.source(source), 2, 16, grain.ReadOptions()),
}


@functools.cache
def one_by_one(pipeline, mesh):
    """The batches of the plain path: these records have no batched read."""
    records = [jax.tree.map(lambda array, i=i: array[i], arrays()) for i in range(RECORDS)]
    return list(PIPELINES[pipeline](records).shard_to(mesh))


@pytest.mark.parametrize(
    ("kind", "hints"),
    [*((kind, "with Grain's hints") for kind in KINDS), (in_memory, "public path only")],
    indirect=["hints"],
)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_batches_are_those_of_records_read_one_by_one(kind, pipeline, tmp_path, mesh, hints):
    ours = PIPELINES[pipeline](ArraySource(kind(tmp_path)))
    assert_same_batches(ours.shard_to(mesh), one_by_one(pipeline, mesh))


@pytest.mark.parametrize("choice", CHOICES)
def test_no_record_is_made_in_python(choice, mesh, monkeypatch):
    getitem = ArrayRows.__getitem__

    def only_slices(rows, index):
        # One record of all is made, from which a batch's structure is learned.
        assert isinstance(index, slice) or index == 0
        return getitem(rows, index)

    monkeypatch.setattr(ArrayRows, "__getitem__", only_slices)
    ds = CHOICES[choice](ArraySource(arrays())).batch(16).shard_to(mesh)
    assert all(batch["image"].shape == (16, 4, 3) for batch in ds)


def test_a_map_gets_records_that_it_may_change(mesh):
    def brighter(record):
        record["image"] += 1
        return record

    tree = arrays()
    ds = grain.MapDataset.source(ArraySource(tree)).map(brighter).batch(10).shard_to(data_mesh(2))
    found = np.concatenate([np.asarray(batch["image"]) for batch in ds])
    np.testing.assert_array_equal(found, arrays()["image"] + 1)
    np.testing.assert_array_equal(tree["image"], arrays()["image"])


def token_file(tmp_path):
    tokens = np.arange(1000, dtype=np.uint16)
    tokens.tofile(tmp_path / "train.bin")
    return np.memmap(tmp_path / "train.bin", np.uint16, mode="r")


@pytest.mark.parametrize("stride", [16, 5])
def test_windows_of_a_token_file(stride, tmp_path, mesh):
    tokens = token_file(tmp_path)
    windows = sliding_window_view(tokens, 17, subok=True)[::stride]
    source = ArraySource({"tokens": windows[:, :-1], "targets": windows[:, 1:]})
    source = pickle.loads(pickle.dumps(source))
    ds = grain.MapDataset.source(source).shuffle(seed=0).batch(8, drop_remainder=True)
    for batch in ds.shard_to(mesh):
        starts = np.asarray(batch["tokens"])[:, 0]
        assert not (starts % stride).any()
        expected = starts[:, None] + np.arange(16)
        np.testing.assert_array_equal(batch["tokens"], expected)
        np.testing.assert_array_equal(batch["targets"], expected + 1)


class Table:
    """Stands for a column of pandas, which looks up labels."""

    shape, dtype, iloc = (3,), np.dtype(int), None


BAD_ARRAYS = {
    "unequal lengths": ({"a": np.zeros((3, 2)), "b": np.zeros(4)}, "arrays['b']", "4 records"),
    "no axis": ({"a": np.zeros(3), "b": np.float32(1)}, "arrays['b']", "no axis"),
    "objects": ({"a": np.array([None, "x"])}, "arrays['a']", "Python objects"),
    "masked": ({"a": np.ma.masked_array(np.zeros(2), [0, 1])}, "arrays['a']", "masked array"),
    "lists": ({"a": [1, 2]}, "arrays['a'][0]", "the leaf is not an array"),
    "None alone": ({"a": None}, "the tree of arrays is empty", "remedy"),
    "keys": ({"a": jax.random.split(jax.random.key(0))}, "arrays['a']", "a dtype that NumPy lacks"),
    "a table": ({"a": Table()}, "arrays['a']", "in which leaf[i] need not be record i"),
    "no leaf": ({}, "", "the tree of arrays is empty"),
}


@pytest.mark.parametrize(("tree", "path", "problem"), BAD_ARRAYS.values(), ids=BAD_ARRAYS)
def test_what_is_no_array_of_records_is_refused(tree, path, problem):
    with pytest.raises(ShardingError) as caught:
        ArraySource(tree)
    assert path in str(caught.value)
    assert problem in str(caught.value)


@pytest.mark.parametrize("index", [-1, RECORDS])
def test_a_record_that_does_not_exist(index):
    said = f"there is no record {index}: the source has {RECORDS} records"
    with pytest.raises(IndexError, match=said):
        ArraySource(arrays())[index]


def test_a_subclass_is_refused_because_its_methods_would_not_always_count():
    with pytest.raises(TypeError, match=r"TenTimes cannot be a subclass .* remedy: .* by \.map"):

        class TenTimes(ArraySource):  # pyright: ignore[reportUnusedClass]
            pass


@pytest.mark.parametrize("index", [1.0, "x", slice(3), None])
def test_an_index_that_is_none(index):
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        ArraySource(arrays())[index]


def test_sources_of_other_dtypes_cannot_be_mixed(mesh):
    a, b = ArraySource({"x": np.zeros(20, np.int32)}), ArraySource({"x": np.zeros(20, np.float32)})
    ds = grain.MapDataset.concatenate([grain.MapDataset.source(a), grain.MapDataset.source(b)])
    first = "record 0 of the source ArraySource, which is record 20 of the dataset before .batch"
    with refused(f"in {first}, the leaf is float32[], but int32[] in other rows."):
        # One thread, because several threads may come to the other records of the source first.
        list(ds.batch(8).shard_to(mesh, num_threads=1))


def test_the_text_names_every_array():
    leaves = "['image'] uint8[4, 3], ['pair'][0] int64[], ['pair'][1] float32[2]"
    assert repr(ArraySource(arrays())) == f"ArraySource(50 records: {leaves})"
