"""C13: what the functions of a pipeline see, in threads and in worker processes.

The signals to a whole job belong here, too: only the loop decides what they mean.
"""

import contextlib
import contextvars
import decimal
import json
import multiprocessing
import os
import re
import signal
import threading

import grain
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grain_shard import placement
from tests.conftest import data_mesh
from tests.pipelines import KINDS
from tests.programs import run

slow = pytest.mark.slow
OF_THE_USER = contextvars.ContextVar("of_the_user", default=0)


def bits():
    return jax.random.bits(jax.random.key(3), (), "uint16").astype(int)


def raises(work):
    try:
        work()
    except Exception:
        return 1
    return 0


@contextlib.contextmanager
def of_the_user():
    token = OF_THE_USER.set(7)
    yield
    OF_THE_USER.reset(token)


def value_of_the_user():
    return OF_THE_USER.get()


def device():
    return jnp.zeros(()).devices().pop().id


def jaxpr_has(words):
    x = np.zeros((2, 2), np.float32)
    return int(words in str(jax.make_jaxpr(jnp.dot)(x, x)))


# By name: a context of the loop, and what a function of the pipeline sees of it, as an integer.
CONTEXTS = {
    "default_prng_impl": (lambda: jax.default_prng_impl("rbg"), bits),
    "threefry_partitionable": (lambda: jax.threefry_partitionable(False), bits),
    "default_device": (lambda: jax.default_device(jax.devices()[3]), device),
    "numpy_dtype_promotion": (
        lambda: jax.numpy_dtype_promotion("strict"),
        lambda: raises(lambda: jnp.float32(1) + jnp.int16(1)),
    ),
    "numpy_rank_promotion": (
        lambda: jax.numpy_rank_promotion("raise"),
        lambda: raises(lambda: jnp.zeros((2, 2)) + jnp.zeros(2)),
    ),
    "default_matmul_precision": (
        lambda: jax.default_matmul_precision("highest"),
        lambda: jaxpr_has("HIGHEST"),
    ),
    "disable_jit": (
        jax.disable_jit,
        lambda: jax.jit(lambda x: x + isinstance(x, jax.core.Tracer))(0),
    ),
    "enable_x64": (lambda: jax.enable_x64(True), lambda: jnp.zeros(3).itemsize),
    "set_mesh": (lambda: jax.set_mesh(data_mesh(4)), lambda: jax.sharding.get_mesh().size),
    "use_abstract_mesh": (
        lambda: jax.sharding.use_abstract_mesh(data_mesh(4).abstract_mesh),
        lambda: len(jax.sharding.get_abstract_mesh().axis_names),
    ),
    "np.errstate": (
        lambda: np.errstate(divide="raise"),
        lambda: raises(lambda: np.ones(1) / np.zeros(1)),
    ),
    "a ContextVar": (of_the_user, value_of_the_user),
    "decimal": (
        lambda: decimal.localcontext(prec=2),
        lambda: int(decimal.Decimal(1234) + 1),
    ),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("name", CONTEXTS)
def test_threads_are_in_the_contexts_of_the_loop(name):
    context, sees = CONTEXTS[name]

    def record(i):
        return {"seen": np.int64(sees())}

    def seen(batches):
        return {int(x) for batch in batches for x in np.asarray(batch["seen"]).ravel()}

    def sharded(kind="random access", **options):
        return KINDS[kind](record).shard_to(jax.devices()[0], remainder="drop", **options)

    with context():
        here = {int(sees())}
        for kind in KINDS:
            assert seen(sharded(kind)) == here, kind
        assert seen(placement.prefetch_to_device(record(i) for i in range(3))) == here
        iterator = iter(sharded())
        saved = iterator.get_state()
    assert {int(sees())} != here
    iterator.set_state(saved)
    assert seen(iterator) == here, "also after a restore elsewhere"


def test_a_thread_that_has_ended_is_not_taken_for_a_new_one():
    """The system gives the number of a thread that has ended to the next one."""
    iterators = []

    def opens():
        with of_the_user():
            ds = KINDS["random access"](lambda i: {"seen": np.int64(value_of_the_user())})
            iterators.append(iter(ds.shard_to(jax.devices()[0], remainder="drop")))

    thread = threading.Thread(target=opens)
    thread.start()
    thread.join()
    with iterators[0] as batches:
        seen = {int(x) for batch in batches for x in np.asarray(batch["seen"])}
    with of_the_user():
        assert seen == {value_of_the_user()}


# Its flag is defined in a worker when the functions of the pipeline arrive.
LIBRARY = """
from absl import flags
flags.DEFINE_integer("of_a_library", 1, "")
"""
PROGRAM = """
import concurrent.futures, json, multiprocessing
import grain, jax, numpy as np
from absl import app, flags
from jax._src import xla_bridge
import grain_shard

flags.DEFINE_integer("given", 1, "")
flags.DEFINE_list("in_code", ["a"], "")

def sees(i):
    # A worker gets the flags without a device.
    assert multiprocessing.parent_process() is None or not xla_bridge.backends_are_initialized()
    values = flags.FLAGS
    return {"seen": json.dumps([values.given, values.in_code, library.flags.FLAGS.of_a_library])}

def make_feed(feed):
    return grain.MapDataset.range(4).map(sees).to_iter_dataset()

def main(_):
    global library
    import library  # not in a worker's main script
    pool = concurrent.futures.ProcessPoolExecutor
    records = grain.MapDataset.range(8).map(sees).batch(4)
    feeds = grain_shard.feeds(make_feed, num_feeds=2).batch(4)
    device = jax.devices()[0]
    with pool(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        processes.submit(int).result()  # it starts before the flags change
        flags.FLAGS.in_code, flags.FLAGS.of_a_library = ["b", "c"], 5
        print(sees(0)["seen"])
        for ds in (
            records.shard_to(device, num_workers=2),
            records.shard_to(device, executor=processes),
            feeds.shard_to(device, num_workers=2),
        ):
            print(*{row for batch in ds for row in batch["seen"]})

if __name__ == "__main__":
    app.run(main)
"""


@slow
def test_every_process_has_the_flags(tmp_path):
    (tmp_path / "library.py").write_text(LIBRARY)
    code, out, err = run(PROGRAM, tmp_path / "program.py", "--given=10")
    assert code == 0, err
    assert out.splitlines() == [json.dumps([10, ["b", "c"], 5])] * 4


SIGNALLED = """
import os, signal, subprocess, sys, threading
import grain, jax, numpy as np
import grain_shard

GROUP = signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT

def decode(i):
    program = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    program.terminate()  # reaches it, although the worker ignores such a signal
    assert program.wait() < 0
    return {"id": np.int32(i)}

def make_feed(feed):
    return grain.MapDataset.range(400).map(decode)[feed.shard_index::2].to_iter_dataset()

def to_the_group():
    for number in GROUP:
        os.killpg(0, number)

if __name__ == "__main__":
    os.setpgrp()
    got = []
    for number in GROUP:
        signal.signal(number, lambda number, frame: got.append(number))
    for ds in (
        grain.MapDataset.range(400).map(decode).batch(8),
        grain_shard.feeds(make_feed, num_feeds=2).batch(8),
    ):
        batches = iter(ds.shard_to(jax.devices()[0], num_workers=2))
        started = threading.Event()
        def while_they_start():
            while not started.wait(0.02):
                to_the_group()
        signals = threading.Thread(target=while_they_start)
        signals.start()
        next(batches)
        started.set()
        signals.join()
        for _ in range(20):  # more than were made before the signals
            to_the_group()
            next(batches)
        batches.close()
    assert set(got) == set(GROUP)
    print("trained on")
"""


# `long`, so that it runs on the newest Python: so many signals while a worker imports crash Python
# 3.11.7 itself, in `_get_module_lock`.
@pytest.mark.long
def test_a_signal_to_the_whole_job_is_the_loops_to_handle(tmp_path):
    code, out, err = run(SIGNALLED, tmp_path / "program.py")
    assert (code, out, err) == (0, "trained on\n", "")


BATCHES_BEFORE = 20  # more than are under way when a worker ends


@slow
@pytest.mark.parametrize(
    ("batches", "end", "words"),
    [
        (BATCHES_BEFORE, signal.SIGBUS, "SIGBUS .*/dev/shm.*MB.*--shm-size"),
        (0, signal.SIGKILL, "SIGKILL .*memory.*oom"),
        (0, signal.SIGSEGV, "SIGSEGV .*PYTHONFAULTHANDLER"),
        (BATCHES_BEFORE, 41, "signal 41 "),
        (BATCHES_BEFORE, -3, "a function or a library"),
        (0, -1, "before any batch.*__main__"),
    ],
)
def test_the_end_of_a_worker_in_words(batches, end, words):
    def decode(i):
        if i >= 8 * batches and multiprocessing.parent_process() is not None:
            os.kill(os.getpid(), end) if end > 0 else os._exit(-end)
        return {"id": i}

    ds = grain.MapDataset.range(400).map(decode).batch(8).shard_to(data_mesh(2), num_workers=1)
    with iter(ds) as iterator, pytest.raises(RuntimeError) as caught:
        list(iterator)
    said = "".join(caught.value.__notes__)
    assert re.search(words, said, re.DOTALL)
    assert ("__main__" in said) == ("__main__" in words)
