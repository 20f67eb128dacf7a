"""Arrays in files, in other processes: the same rows, or an error that says what differs."""

import concurrent.futures
import contextlib
import io
import multiprocessing
import os
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
    "a file that is gone": lambda path: gone(path, mapped(path)[5:]),
    "a file that was replaced": lambda path: replaced(path, mapped(path)[5:]),
    "a link that was moved": lambda path: moved(path + ".link", path, mapped),
}


def changed(array):
    array[7] = 999
    return array


def gone(path, array):
    os.remove(path)
    return array


def replace(path, content):
    with open(path + ".new", "wb") as file:
        file.write(content)
    os.replace(path + ".new", path)


def replaced(path, array):
    replace(path, changed(NUMBERS.copy()).tobytes())  # only one number is another one
    return array


def moved(link, path, opened):
    os.symlink(path, link)
    array = opened(link)
    replace(path + ".2", changed(NUMBERS.copy()).tobytes())
    os.symlink(path + ".2", link + ".new")
    os.replace(link + ".new", link)
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


CHANGES = {
    "replaced": (lambda path: replace(path, (NUMBERS + 7).tobytes()), "inode was "),
    "shorter": (lambda path: replace(path, NUMBERS[:9].tobytes()), "size was 8000, is 18"),
    "cut": (lambda path: os.truncate(path, 4000), "size was 8000, is 4000"),
    "longer": (lambda path: replace(path, bytes(9000)), "size was 8000, is 9000"),
    "written to": (lambda path: os.utime(path, ns=(0, 5)), "modified_ns was "),
    "gone": (os.remove, "No such file or directory"),
    "a folder": (lambda path: (os.remove(path), os.mkdir(path)), "inode was "),
}


@pytest.mark.parametrize(("change", "words"), CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("is_sent", [False, True], ids=["before it is sent", "on its way"])
def test_a_file_that_changed_is_refused(change, words, is_sent, path):
    source = ArraySource({"x": mapped(path)[5:]})
    pickled = pickle.dumps(source) if is_sent else None
    change(path)
    with refused(f"arrays['x']: {path} is not the file that the main process has opened") as error:
        pickle.loads(pickled or pickle.dumps(source))
    assert words in str(error.value)


def in_hdf5(path, **options):
    with h5py.File(path, "w") as file:  # a path, or a file in memory
        file["x"] = NUMBERS
    return h5py.File(path, **{"mode": "r", **options})["x"]


def external(path, name):
    NUMBERS.tofile("raw")
    with h5py.File(path, "w") as file:
        whole = [(name, 0, h5py.h5f.UNLIMITED)]
        file.create_dataset("x", NUMBERS.shape, NUMBERS.dtype, external=whole)
    return h5py.File(path)["x"]


def virtual(path):
    in_hdf5(path + ".part")
    parts = h5py.VirtualLayout(NUMBERS.shape, NUMBERS.dtype)
    parts[:] = h5py.VirtualSource(os.path.basename(path) + ".part", "x", NUMBERS.shape)
    with h5py.File(path, "w") as file:
        file.create_virtual_dataset("x", parts)
    return h5py.File(path)["x"]


def with_a_prefix(path):
    file = in_hdf5(path).file
    access = h5py.h5p.create(h5py.h5p.DATASET_ACCESS)
    access.set_efile_prefix(b"elsewhere")
    return h5py.Dataset(h5py.h5d.open(file.id, b"x", access))


NOT_SENT = {
    "in memory": (lambda path: in_hdf5(path, driver="core"), "is in no file on a disk"),
    "of bytes": (lambda path: in_hdf5(io.BytesIO()), "is in no file on a disk"),
    "open for writing": (lambda path: in_hdf5(path, mode="r+"), "is open for writing"),
    "beside the script": (lambda path: external(path, "raw"), "finds files ['raw'] by a prefix"),
    "by a prefix": (lambda path: with_a_prefix(path), "finds files of its sources by"),
}


@pytest.mark.parametrize(("make", "words"), NOT_SENT.values(), ids=NOT_SENT)
def test_a_dataset_that_no_other_process_can_open_is_refused(make, words, path, monkeypatch):
    monkeypatch.chdir(os.path.dirname(path))
    source = ArraySource({"x": make(path)})
    assert source[9]["x"] == 9
    with refused(f"arrays['x']: the {'file' if 'open' in words else 'dataset'}") as error:
        pickle.dumps(source)
    assert words in str(error.value)


def test_a_file_of_hdf5_that_was_replaced_is_refused(path):
    source = ArraySource(in_hdf5(path))
    in_hdf5(path + ".new")
    os.replace(path + ".new", path)
    with refused(f"{path} is not the file"):
        pickle.dumps(source)


@pytest.mark.parametrize("kind", ["virtual", "external"])
def test_a_file_with_the_values_of_another_file_of_hdf5(kind, path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = ArraySource(virtual(path) if kind == "virtual" else external(path, f"{tmp_path}/raw"))
    assert list(pickle.loads(pickle.dumps(source))) == NUMBERS.tolist()
    values = path + ".part" if kind == "virtual" else f"{tmp_path}/raw"
    replace(values, b"")
    with refused(f"{values} is not the file"):
        pickle.dumps(source)


def test_a_dataset_without_values_is_no_array(path):
    with h5py.File(path, "w") as file, refused("arrays: the leaf is a scalar"):
        ArraySource(file.create_dataset("x", data=h5py.Empty("f")))


# Opened by a relative path, read in another folder.


def zarr_array(path):
    return zarr.create_array(store=path, data=NUMBERS, chunks=(70,))


def zarr_group(path):
    return zarr.open_group(path, mode="w").create_group("a").create_array("b", data=NUMBERS)


def zarr_zip(path):
    with zarr.storage.ZipStore(path, mode="w") as store:
        zarr.create_array(store=store, data=NUMBERS)
    return zarr.open_array(zarr.storage.ZipStore(path, mode="r"), mode="r")


def zarr_logged(path):
    return zarr_array(zarr.storage.LoggingStore(zarr.storage.LocalStore(path), log_level="ERROR"))


@pytest.mark.parametrize("make", [mapped, in_hdf5, zarr_array, zarr_group])
def test_a_relative_path_leads_to_the_same_file_in_another_folder(make, path, tmp_path):
    (tmp_path / "other").mkdir()
    with contextlib.chdir(tmp_path):
        source = ArraySource(make("numbers.bin" if make is mapped else "new"))
    with contextlib.chdir(tmp_path / "other"):
        again = pickle.loads(pickle.dumps(source))
        assert [again[i] for i in (0, 1999, 3999)] == [source[i] for i in (0, 1999, 3999)]
        assert source[3999] == 3999


@pytest.mark.parametrize("make", [zarr_zip, zarr_logged])
def test_a_store_that_cannot_be_opened_by_another_path_is_refused(make, tmp_path):
    with contextlib.chdir(tmp_path), refused("a relative path"):
        ArraySource(make("new"))
    assert len(ArraySource(make(str(tmp_path / "newer")))) == len(NUMBERS)


def test_a_store_of_another_folder_is_refused(tmp_path):
    with contextlib.chdir(tmp_path):
        array = zarr_array("new")
    with refused("a relative path"):
        ArraySource(array)


@pytest.mark.slow
def test_in_real_processes(path):
    gathered = {"x": VIEWS["windows"](path), "y": NUMBERS[:124]}
    stored = {"x": in_hdf5(path + ".h5"), "y": zarr_array(path + ".zarr")}
    both = [grain.MapDataset.source(ArraySource(tree))[:124] for tree in (gathered, stored)]
    ds = grain.experimental.ZipMapDataset(both).shuffle(seed=0).batch(8)
    options = {"mask_key": None, "remainder": "drop"}  # a batch is a pair
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        for where in ({"num_workers": 1}, {"executor": executor}):
            elsewhere = ds.shard_to(data_mesh(2), **options, **where)
            assert_same_batches(elsewhere, ds.shard_to(data_mesh(2), **options))
        # A file system that each process has for itself, in which zarr finds no chunk.
        in_memory = ArraySource({"x": zarr.create_array(store="memory://new", data=NUMBERS + 1)})
        batches = grain.MapDataset.source(in_memory).batch(8)
        with refused("arrays['x']: another process reads other rows"):
            list(batches.shard_to(data_mesh(2), executor=executor))
