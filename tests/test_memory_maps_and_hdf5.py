"""Arrays in files, in other processes: the same rows."""

import concurrent.futures
import io
import multiprocessing
import pickle

import grain
import h5py
import numpy as np
import pytest
import zarr
from numpy.lib.stride_tricks import as_strided, sliding_window_view

from grain_shard import ArraySource
from tests.conftest import data_mesh, refused
from tests.pipelines import assert_same_batches

NUMBERS = np.arange(4000, dtype=np.uint16)


@pytest.fixture
def path(tmp_path):
    NUMBERS.tofile(tmp_path / "numbers.bin")
    return str(tmp_path / "numbers.bin")


def mapped(path, dtype=np.uint16, mode="r", **options):
    return np.memmap(path, dtype, mode=mode, **options)


PAIRS = np.dtype([("a", np.uint16), ("b", np.uint16)])
# The views of a map that numpy makes, each by a function of the file's path.
VIEWS = {
    "all": mapped,
    "a slice": lambda path: mapped(path)[3:],
    "backwards": lambda path: mapped(path)[::-3],
    "an offset of less than a page": lambda path: mapped(path, offset=30)[3:],
    "an offset of more than a page": lambda path: mapped(path, offset=5000)[3:],
    "some columns": lambda path: mapped(path, shape=(50, 8))[:, 1:],
    "columns backwards": lambda path: mapped(path, shape=(50, 8))[::-1, ::-2],
    "columns first": lambda path: mapped(path, shape=(50, 8), order="F"),
    "transposed": lambda path: mapped(path)[:70].reshape(7, 10).T,
    "another axis": lambda path: mapped(path)[5:, None],
    "windows": lambda path: sliding_window_view(mapped(path)[3000:], 9)[::8],
    "windows of its own type": lambda path: sliding_window_view(mapped(path)[3000:], 9, subok=True),
    "windows of windows": lambda path: sliding_window_view(
        sliding_window_view(mapped(path)[99:300], 9)[::2, 1:], 3, axis=1
    ),
    "other strides": lambda path: as_strided(mapped(path)[100:], (5, 5), (4, 2)),
    "one row many times": lambda path: np.broadcast_to(mapped(path)[7:9], (30, 2)),
    "a plain array": lambda path: np.asarray(mapped(path)[3:])[2:],
    "a buffer": lambda path: np.frombuffer(memoryview(mapped(path))[5:], np.uint8)[3:],
    "other dtype": lambda path: mapped(path)[4:].view(np.float16).view(np.uint32)[1:],
    "a field": lambda path: mapped(path, PAIRS)["b"][1:],
    "a field of a record array": lambda path: mapped(path, PAIRS).view(np.recarray).b[1:],
    "open for writing": lambda path: mapped(path, mode="r+")[3:],
}
COPIES = {
    "no row": lambda path: mapped(path)[:0],
    "copy on write": lambda path: changed(mapped(path, mode="c")),
    "chosen rows": lambda path: mapped(path)[[5, 3]],
    "converted": lambda path: mapped(path).astype(np.int32)[3:],
    "a map without a name": lambda path: np.frombuffer(mapped(path)._mmap, np.uint8),
}


def changed(array):
    array[7] = 999
    return array


def assert_sent(array, *, by_file):
    source = ArraySource(array)
    pickled = pickle.dumps(source)
    assert (len(pickled) < 1000) == (by_file or len(array) < 9), "by its file"
    again = pickle.loads(pickle.dumps(pickle.loads(pickled)))  # a worker's own workers
    np.testing.assert_array_equal(list(again), list(array))


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_of_a_map_is_sent_as_its_place_in_the_file(view, path):
    assert_sent(view(path), by_file=True)


@pytest.mark.parametrize("array", COPIES.values(), ids=COPIES)
def test_rows_that_are_in_no_file_are_sent(array, path):
    assert_sent(array(path), by_file=False)


@pytest.mark.parametrize("seed", range(40))
def test_views_of_views(seed, path):
    rng = np.random.default_rng(seed)
    view = mapped(path, offset=int(rng.integers(3)) * 2, shape=(40, 6, 8))
    for _ in range(4):
        match rng.integers(5):
            case 0:
                view = view[rng.integers(3) :, :: rng.choice([1, 2, -1])]
            case 1:
                view = np.swapaxes(view, 0, rng.integers(view.ndim))
            case 2:
                view = sliding_window_view(view, 2, axis=0, subok=bool(rng.integers(2)))
            case 3:
                view = view[::-1, ..., -1:]
            case 4:
                view = np.asarray(view)[None, 1:].squeeze(0)
    again = pickle.loads(pickle.dumps(ArraySource(view)))
    np.testing.assert_array_equal(list(again), view)


def test_what_was_written_to_a_map_is_read_by_others(path):
    numbers = mapped(path, mode="r+")
    numbers[:] = 7
    again = pickle.loads(pickle.dumps(ArraySource(numbers)))
    assert set(again) == {7}


def in_hdf5(path, **options):
    with h5py.File(path, "w") as file:  # a path, or a file in memory
        file["x"] = NUMBERS
    return h5py.File(path, **{"mode": "r", **options})["x"]


NOT_SENT = {
    "in memory": lambda path: in_hdf5(path, driver="core"),
    "of bytes": lambda path: in_hdf5(io.BytesIO()),
    "open for writing": lambda path: in_hdf5(path, mode="r+"),
}


@pytest.mark.parametrize("make", NOT_SENT.values(), ids=NOT_SENT)
def test_a_dataset_that_no_other_process_can_open_is_refused(make, path):
    source = ArraySource({"x": make(path)})
    assert source[9]["x"] == 9
    with refused("arrays['x']: a worker process or executor cannot open the dataset"):
        pickle.dumps(source)


def test_a_dataset_without_values_is_no_array(path):
    with h5py.File(path, "w") as file, refused("arrays: the leaf is a scalar"):
        ArraySource(file.create_dataset("x", data=h5py.Empty("f")))


@pytest.mark.slow
def test_in_real_processes(path):
    gathered = {"x": VIEWS["windows"](path), "y": NUMBERS[:124]}
    stored = {"x": in_hdf5(path + ".h5"), "y": zarr.create_array(path + ".zarr", data=NUMBERS)}
    both = [grain.MapDataset.source(ArraySource(tree))[:124] for tree in (gathered, stored)]
    ds = grain.experimental.ZipMapDataset(both).shuffle(seed=0).batch(8)
    options = {"mask_key": None, "remainder": "drop"}  # a batch is a pair
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        for where in ({"num_workers": 1}, {"executor": executor}):
            elsewhere = ds.shard_to(data_mesh(2), **options, **where)
            assert_same_batches(elsewhere, ds.shard_to(data_mesh(2), **options))
