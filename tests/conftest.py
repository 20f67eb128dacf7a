"""Fixtures and helpers of all tests. One fixture checks that no thread outlives its test."""

import contextlib
import gc
import math
import multiprocessing
import sys
import threading
import time

import grain
import jax
import numpy as np
import pytest
from jax.sharding import AxisType

from grain_shard.errors import ShardingError
from grain_shard.grain_inside import private_names
from grain_shard.grain_inside.private_names import PRIVATE_NAMES
from grain_shard.reading import faults, first_record
from grain_shard.threads import pace, pool

HANG_S = 60  # seconds after which a wait counts as a hang
HOSTS_S = 600  # and hosts, or a program: a busy machine takes a minute or two to start one


def background_threads():
    return {t for t in threading.enumerate() if t.name.startswith("grain-shard")}


def wait(event):
    assert event.wait(HANG_S), "hangs"


def eventually(condition):
    """Waits until a condition is true. It fails only after `HANG_S` seconds."""
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, "hangs"
        time.sleep(0.001)


def assert_ended(threads):
    """Waits until all threads have ended, and fails if one lives on."""
    for thread in threads:
        eventually(lambda: thread.ident)  # it may have been about to start
        thread.join(HANG_S)
        assert not thread.is_alive(), f"{thread.name} lives on"


@contextlib.contextmanager
def refused(message):
    """Checks that the block raises a `ShardingError` with these words and a remedy."""
    with pytest.raises(ShardingError) as refusal:
        yield refusal
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
        return  # the traceback of a failed test keeps its iterators, and their threads, alive
    if background_threads() - others:
        # An iterator may be in a reference cycle. The collection is slow, so it does not run after
        # each test.
        gc.collect()
    assert_ended(background_threads() - others)


@pytest.fixture(autouse=True)
def no_pause_before_another_try(monkeypatch):
    """Removes the pauses before a failed read is tried again, so that tests do not wait."""
    monkeypatch.setattr(faults, "_FIRST_PAUSE_S", 0.0)


@pytest.fixture
def no_patience(monkeypatch):
    """Closing hardly waits for a thread that is inside the user's code; else it waits seconds."""
    monkeypatch.setattr(pool, "_JOIN_TIMEOUT_S", 0.01)


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["grain", "jax", "hypothesis", "pytest"])


@pytest.fixture(autouse=True)
def workers_are_forks(request, monkeypatch):
    """Forks worker processes from one that has imported Grain, which takes a worker a second.

    They have the environment that this one began with. Tests of how workers start and end have the
    mark `spawn`, and start them as Grain does.
    """
    if request.node.get_closest_marker("spawn") is None:
        monkeypatch.setattr(multiprocessing, "get_context", {"spawn": FORKS}.__getitem__)


@pytest.fixture
def one_record_at_a_time(monkeypatch):
    """Records that are read one by one are not read several by one thread, fast as they are."""
    monkeypatch.setattr(pace, "_LONGEST_TASK_S", 0.0)
    monkeypatch.setattr(pace, "_TASK_S", 0.0)
    monkeypatch.setattr(first_record, "SOURCE", None)  # no record is read to compare sources


@pytest.fixture
def mesh():
    return jax.make_mesh((8,), ("data",))


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["Auto", "Explicit"])
def axis_type(request):
    return request.param


@pytest.fixture(params=["with Grain's hints", "public path only"])
def hints(request, monkeypatch):
    """Runs a test twice: with the fast paths through Grain's private parts, and without them."""
    if request.param == "public path only":
        hide_private_names(monkeypatch)
    return request.param


def hide_private_names(monkeypatch, names=PRIVATE_NAMES):
    """Hides attributes of Grain's objects from this package, as if Grain had renamed them.

    Returns:
        The set of the private names, hidden or not, that this package asks for; it grows. The log
        of missing names does not count.
    """
    asked = set()

    def get(self, name):
        if name in PRIVATE_NAMES and not type(self).__module__.startswith("grain_shard"):
            caller = sys._getframe(1).f_globals["__name__"]
            if caller.startswith("grain_shard"):
                asked.update({name} if caller != private_names.__name__ else ())
                if name in names:
                    raise AttributeError(f"{type(self).__name__} has no {name}")
        return object.__getattribute__(self, name)

    made = [example for use in PRIVATE_NAMES.values() for example in use.objects()]
    of_others = {type(x) for x in made if not isinstance(x, grain.MapDataset | grain.IterDataset)}
    for kind in (grain.MapDataset, grain.IterDataset, *of_others):
        monkeypatch.setattr(kind, "__getattribute__", get)
    return asked


def data_mesh(num_devices, name="data", axis_type=AxisType.Auto):
    """Returns a mesh of the first devices with one axis."""
    return jax.sharding.Mesh(np.array(jax.devices()[:num_devices]), (name,), (axis_type,))


def numbered(num_records, global_batch_size, **batch_options):
    """Returns global batches of records with their own index as "id", and an "image"."""
    return (
        grain.MapDataset.range(num_records)
        .map(lambda i: {"id": np.int32(i), "image": np.full((2, 3), i, np.float32)})
        .batch(global_batch_size, **batch_options)
    )


def ids(batches, key="id", mask_key="valid_mask"):
    """Returns, for each batch, the list of ids of its valid rows."""
    return [np.asarray(b[key])[np.asarray(b[mask_key])].tolist() for b in batches]


def to_numpy(batch):
    return jax.tree.map(np.asarray, batch)


class Restorable:
    """Stands for a user's own iterator over batches, with a state.

    `closed` counts how often it was closed.
    """

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
    """Stands for a user's own stream of ``make(0)``, ``make(1)``, ..., with a state.

    Args:
        make: Function that makes an element from its number.
        count: Number of elements.
        on_close: Function that is called with an iterator when it is closed. Grain closes an
            iterator once more when it is garbage-collected.
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
