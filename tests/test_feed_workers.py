"""`num_workers` for feeds: rows that come from several processes, errors, and the workers' end.

What holds of random access, too: test_workers.py.
"""

import gc
import os
import signal
import textwrap
import threading
import uuid
from pathlib import Path

import grain
import numpy as np
import pytest

import grain_shard
from tests.conftest import (
    HOSTS_S,
    Made,
    MadeIterator,
    background_threads,
    data_mesh,
    eventually,
    ids,
)
from tests.pipelines import assert_same, feeds_of, with_states
from tests.programs import start
from tests.test_feeds import unclosable
from tests.test_workers import assert_no_child_is_left, children

slow = pytest.mark.slow
SHARED_MEMORY = Path("/dev/shm")
needs_shared_memory = pytest.mark.skipif(
    not SHARED_MEMORY.exists(), reason="shared memory has no folder here"
)


def described(feed):
    """Rows of every kind of leaf, in a number that differs from feed to feed; feed 1 has none."""
    count = [5, 0, 2, 7][feed.shard_index]
    return (
        grain.MapDataset.range(100)
        .map(
            lambda i: {
                "id": np.int32(100 * feed.shard_index + i),
                "image": (np.full((2, 3), i, np.float32), i % 2 == 0),
                "text": "x" * (i + feed.shard_index),
            }
        )
        .to_iter_dataset()
        .filter(lambda row: row["id"] % 100 < count)
    )


@slow
@pytest.mark.parametrize(("remainder", "num_workers"), [("pad", 3), ("drop", 2)])
def test_feeds_that_end_apart_end_the_same_way_with_every_kind_of_leaf(remainder, num_workers):
    def batches(**options):
        ds = grain_shard.feeds(described, num_feeds=4).batch(8)
        return ds.shard_to(data_mesh(2), remainder=remainder, pad_value={"id": -1}, **options)

    expected = with_states(batches())
    assert len(expected) == {"pad": 4, "drop": 0}[remainder]
    assert_same(with_states(batches(num_workers=num_workers)), expected)


def test_what_cannot_be_sent_to_a_worker_is_refused_before_one_starts():
    lock = threading.Lock()

    def row(feed, i):
        with lock:
            return {"id": i}

    with iter(feeds_of(row, 2, 2).shard_to(data_mesh(2), num_workers=2)) as batches:
        for _ in range(2):
            with pytest.raises(
                grain_shard.ShardingError,
                match=r"the pipeline cannot be sent to a worker process: .*pickle.*lock",
            ) as caught:
                next(batches)
            assert caught.value.remedy == (
                "do not keep an open file, connection, lock, threading.local or ContextVar in the"
                " pipeline, because"
                " it cannot be pickled. In a source, leave it out of the state that __getstate__"
                " returns, and open it again in __setstate__, which runs in the worker. In feeds,"
                " open it inside make_feed."
            )
        assert not children()


# Life.


@slow
def test_a_state_is_restored_while_the_workers_of_the_run_before_still_end(no_patience):
    ds = feeds_of(lambda feed, i: {"id": 10 * feed + i}, 2, 2).shard_to(data_mesh(2), num_workers=1)
    with iter(ds) as batches:
        next(batches)
        state, second = batches.get_state(), next(batches)["id"].tolist()
        batches.set_state(state)
        assert next(batches)["id"].tolist() == second


@slow
@needs_shared_memory
@pytest.mark.parametrize(
    "how",
    [
        *("never asked", "only begun", "close twice", "break", "collect"),
        pytest.param("an error", marks=pytest.mark.spawn),
    ],
)
def test_no_process_and_no_shared_memory_is_left_after(how):
    prefix = f"gs{uuid.uuid4().hex[:5]}"

    def make_feed(feed):
        from multiprocessing import shared_memory

        shared_memory._SHM_NAME_PREFIX = f"/{prefix}"  # so that what a worker puts there is found

        def row(i):
            if how == "an error" and i == 9:
                raise ValueError("fails")
            return {"id": np.int32(i), "x": np.zeros((100, 10))}

        return grain.MapDataset.range(10_000).map(row).to_iter_dataset()

    ds = grain_shard.feeds(make_feed, num_feeds=6).batch(12)
    batches = iter(ds.shard_to(data_mesh(2), num_workers=2))
    if how == "only begun":
        batches.start_prefetch()
        eventually(children)
    elif how != "never asked":
        next(batches)
        assert len(children()) == 2
    if how == "an error":
        with pytest.raises(ValueError, match="fails"):
            list(batches)
    elif how == "break":
        for _ in batches:
            break
    if how not in ("break", "collect"):
        batches.close()
    if how == "close twice":
        batches.close()
    del batches
    gc.collect()
    assert_no_child_is_left()
    eventually(lambda: not background_threads())
    if how != "an error":  # else an element may stay until the program ends, as docs say
        eventually(lambda: not [f for f in os.listdir(SHARED_MEMORY) if prefix in f])


class Heavy(Made):
    """Rows whose state is larger than a pipe holds."""

    def __iter__(self):
        return HeavyIterator(self)


class HeavyIterator(MadeIterator):
    def get_state(self):
        return {**super().get_state(), "text": "x" * 200_000}


@slow
def test_a_worker_whose_states_are_large_ends_when_it_is_told_and_need_not_be_killed():
    ds = grain_shard.feeds(lambda feed: Heavy(lambda i: {"id": np.int32(i)}), num_feeds=4).batch(4)
    batches = iter(ds.shard_to(data_mesh(2), num_workers=2))
    assert ids([next(batches), next(batches)]) == [[0] * 4, [1] * 4]
    workers = children()
    batches.close()
    assert_no_child_is_left()
    assert [worker.exitcode for worker in workers] == [0, 0]


@slow
def test_in_a_worker_a_feed_that_cannot_be_closed_keeps_no_other_from_being_closed(tmp_path):
    def make_feed(feed):
        number = feed.shard_index
        return unclosable(number < 2, (tmp_path / str(number)).touch)

    ds = grain_shard.feeds(make_feed, num_feeds=6).batch(6)
    with iter(ds.shard_to(data_mesh(2), num_workers=2)) as batches:
        next(batches)
    assert_no_child_is_left()
    assert {file.name for file in tmp_path.iterdir()} == set("012345")


PROGRAM = """\
    import os, sys, grain, jax, numpy as np
    import grain_shard

    jax.config.update("jax_num_cpu_devices", 2)

    def make_feed(feed):
        from multiprocessing import shared_memory
        shared_memory._SHM_NAME_PREFIX = "/PREFIX"
        ds = grain.MapDataset.range(10**6).map(lambda i: {"id": np.int32(i), "x": np.zeros(1000)})
        return ds.to_iter_dataset()

    if __name__ == "__main__":
        mesh = jax.make_mesh((2,), ("data",))
        ds = grain_shard.feeds(make_feed, num_feeds=4).batch(4).shard_to(mesh, num_workers=2)
        for step, batch in enumerate(ds):
            if step == 3:
                import multiprocessing
                pids = [child.pid for child in multiprocessing.active_children()]
                print(*pids, flush=True)
    """


def is_alive(pid):
    """Whether a process runs; one that has ended and that nobody has asked after does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@slow
@needs_shared_memory
@pytest.mark.parametrize("how", ["Ctrl-C in a terminal", "kill -9"])
def test_the_end_of_the_program_is_the_end_of_its_workers_and_of_their_memory(how, tmp_path):
    prefix = f"gs{uuid.uuid4().hex[:5]}"
    code = textwrap.dedent(PROGRAM).replace("PREFIX", prefix)
    process = start(code, tmp_path / "program.py", start_new_session=True)
    try:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        if how == "kill -9":
            process.kill()
        else:
            os.killpg(process.pid, signal.SIGINT)  # a terminal sends it to all of them
        _, err = process.communicate(timeout=HOSTS_S)
    finally:
        process.kill()
    assert err.count("Traceback") == (how != "kill -9")
    assert err.count("KeyboardInterrupt\n") == (how != "kill -9")
    eventually(lambda: not any(map(is_alive, pids)))
    eventually(lambda: not [f for f in os.listdir(SHARED_MEMORY) if prefix in f])
