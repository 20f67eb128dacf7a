"""What the tests share; and no background thread outlives its test."""

import contextlib
import gc
import math
import threading
import time

import grain
import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from grain_shard.errors import ShardingError
from grain_shard.grain_inside import nodes, read_ahead, routes
from grain_shard.reading import faults

HANG_S = 60  # what takes so long will never end


def background_threads():
    return {t for t in threading.enumerate() if t.name.startswith("grain-shard")}


def wait(event):
    assert event.wait(HANG_S), "hangs"


def eventually(condition):
    """Polls for what must come true; how soon does not matter."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.001)


def assert_ended(threads):
    """Waits for their end."""
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive(), f"{thread.name} lives on"


@contextlib.contextmanager
def refused(message):
    """What is inside is refused by a ShardingError with these words, and a remedy."""
    with pytest.raises(ShardingError) as refusal:
        yield
    assert message in str(refusal.value)
    assert "\n  remedy: " in str(refusal.value)


@pytest.fixture(autouse=True)
def a_log_has_its_own_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # pytest-xdist sets it


@pytest.fixture(autouse=True)
def no_thread_outlives_its_test(request):
    failed_before = request.session.testsfailed
    others = background_threads()
    yield
    if request.session.testsfailed > failed_before:
        return  # the traceback keeps the test's iterators alive
    if background_threads() - others:
        gc.collect()  # an iterator in a reference cycle; not after each test, as it is slow
    assert_ended(background_threads() - others)


@pytest.fixture(autouse=True)
def no_pause_before_another_try(monkeypatch):
    """A source that fails is asked again at once."""
    monkeypatch.setattr(faults, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("data",))


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def axis_type(request):
    return request.param


@pytest.fixture(params=["with Grain's hints", "public path only"])
def hints(request, monkeypatch):
    """Runs a test twice: with what `grain_inside` learns of Grain's private parts, and without."""
    if request.param == "public path only":
        monkeypatch.setattr(nodes, "batch_node", lambda ds: None)
        monkeypatch.setattr(nodes, "iter_batch_size", lambda ds: None)
        monkeypatch.setattr(routes, "_ELEMENTS", {})
        monkeypatch.setattr(routes, "_INDICES", {})
        monkeypatch.setattr(routes, "_MIXTURES", ())
        monkeypatch.setattr(routes, "batched_read_of", lambda ds: None)
        monkeypatch.setattr(routes, "single_read_of", lambda ds: ds.__getitem__)
        monkeypatch.setattr(nodes, "seeds", lambda ds: ())
        monkeypatch.setattr(read_ahead, "read_ahead", lambda ds: None)
    return request.param


def data_mesh(num_devices, name="data"):
    """A 1-D mesh of the first devices."""
    return jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), (name,))


def numbered(num_records, global_batch_size, **batch_options):
    """Records that carry their own index, in global batches."""
    return (
        grain.MapDataset.range(num_records)
        .map(lambda i: {"id": np.int32(i), "image": np.full((2, 3), i, np.float32)})
        .batch(global_batch_size, **batch_options)
    )


def ids(batches, key="id", mask_key="valid_mask"):
    """The ids of the valid rows of each batch."""
    return [np.asarray(b[key])[np.asarray(b[mask_key])].tolist() for b in batches]


def to_numpy(batch):
    return jax.tree.map(np.asarray, batch)


def read_for_batches(read, num_records):
    """What a host reads for its batches: without the two records by which contents are compared."""
    left = list(read)
    for index in sorted({0, num_records // 2}):
        # An item is an index, or begins with one.
        left.remove(next(one for one in left if index in (one, np.ravel(one)[0])))
    return left


class CountingSource:
    """Records that are their own indices; each index that is read is appended to `read`."""

    def __init__(self, num_records):
        self._num_records, self.read = num_records, []

    def __len__(self):
        return self._num_records

    def __getitem__(self, index):
        self.read.append(int(index))
        return int(index)

    def __repr__(self):  # the same on every host
        return f"CountingSource({self._num_records})"


class Restorable:
    """A user's own iterator over batches, with a state; it counts how often it is closed."""

    def __init__(self, batches):
        self.batches, self.next, self.closed = batches, 0, 0

    def __iter__(self):
        return self

    def __next__(self):
        if self.next == len(self.batches):
            raise StopIteration
        self.next += 1
        return self.batches[self.next - 1]

    def get_state(self):
        return {"next": np.int64(self.next)}

    def set_state(self, state):
        self.next = state["next"]

    def close(self):
        self.closed += 1


class Made(grain.IterDataset):
    """A user's own stream of ``make(0)``, ``make(1)``, ...; its state counts them.

    Args:
        make: Makes an element.
        count: The number of elements.
        on_close: Called with an iterator that is closed; Grain closes it again when it collects it.
    """

    def __init__(self, make, count=math.inf, on_close=lambda iterator: None):
        super().__init__()
        self.make, self.count, self.on_close = make, count, on_close

    def __iter__(self):
        return MadeIterator(self)


class MadeIterator(grain.DatasetIterator):
    def __init__(self, ds):
        super().__init__()
        self.ds, self.given = ds, 0

    def __next__(self):
        if self.given == self.ds.count:
            raise StopIteration
        self.given += 1
        return self.ds.make(self.given - 1)

    def get_state(self):
        return {"given": self.given}

    def set_state(self, state):
        self.given = state["given"]

    def close(self):
        self.ds.on_close(self)
