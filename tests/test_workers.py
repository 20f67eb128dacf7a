"""`num_workers`: Grain's worker processes, with the same batches as without, and C10.

More about feeds: test_feed_workers.py.
"""

import gc
import json
import multiprocessing
import multiprocessing.synchronize
import os
import threading
from pathlib import Path

import cloudpickle
import grain
import jax
import numpy as np
import pytest
from jax._src import xla_bridge
from jax.sharding import NamedSharding, PartitionSpec

import grain_shard
from grain_shard import ShardingError
from tests import text
from tests.conftest import HOSTS_S, assert_ended, data_mesh, eventually, ids, numbered
from tests.pipelines import Odd, assert_same_batches, shared_out, with_states
from tests.programs import python, run, script

slow = pytest.mark.slow
MEMORY_MAP = Path("/proc/self/maps")


def children():
    return [p for p in multiprocessing.active_children() if p.is_alive()]


def assert_no_child_is_left():
    eventually(lambda: not children())


def augmented(i, rng):
    return {"id": np.int32(i), "noise": rng.normal(size=(40, 3)), "text": f"#{i}"}


KINDS = {
    "random access": grain.MapDataset.range(110).seed(5).shuffle().random_map(augmented).batch(8),
    "feeds": grain_shard.feeds(text.packed, num_feeds=2).batch(16),
}


@slow
class TestTheSameAsWithout:
    @pytest.mark.parametrize("ds", KINDS.values(), ids=KINDS)
    def test_batches_order_and_state_also_when_the_number_of_workers_changes_in_the_middle(
        self, ds
    ):
        found, state = [], None
        # Three are more than there are feeds. The last two go on to the end.
        for num_workers, count in [(0, 2), (1, 5), (3, 3), (0, 1), (2, None)]:
            found += with_states(ds.shard_to(data_mesh(4), num_workers=num_workers), state, count)
            state = found[-1][1]
        batches, states = zip(*found, strict=True)
        expected, expected_states = zip(*with_states(ds.shard_to(data_mesh(4))), strict=True)
        assert_same_batches(batches, expected)
        assert json.dumps(states) == json.dumps(expected_states), "feeds have the same order, too"
        assert with_states(ds.shard_to(data_mesh(4), num_workers=1), state) == []
        assert_no_child_is_left()


def shared_memory():
    """The ranges of addresses that are shared with other processes, on Linux."""
    lines = MEMORY_MAP.read_text().splitlines() if MEMORY_MAP.exists() else []
    ranges = [line.split()[0].split("-") for line in lines if "/dev/shm" in line]
    return [range(int(start, 16), int(stop, 16)) for start, stop in ranges]


@slow
@pytest.mark.parametrize("num_devices", [1, 2])
def test_batches_stay_intact_when_all_are_kept(num_devices):
    # Pages of shared memory are aligned, so JAX's CPU backend would take them as they are,
    # and the worker that gets them back would write into the user's batch (jax#38086).
    def record(i):
        return {"x": np.full((64, 1024), i, np.float32), "text": f"{i:05d}" * 1000}

    ds = grain.MapDataset.range(24).map(record).batch(2)
    options = {"num_workers": 1, "cpu_buffer_size": 1}
    batches = list(ds.shard_to(data_mesh(num_devices), **options))
    for batch, expected in zip(batches, ds, strict=True):
        np.testing.assert_array_equal(batch["x"], expected["x"])
        assert batch["text"].tolist() == expected["text"].tolist()
        for shard in batch["x"].addressable_shards:
            address = shard.data.unsafe_buffer_pointer()
            assert not any(address in mapped for mapped in shared_memory())


class Locked(Exception):
    """An error that does not survive the way to another process."""

    def __init__(self, text):
        super().__init__(text)
        self.lock = threading.Lock()


def raising(error):
    raise error


@slow
class TestErrors:
    @pytest.mark.parametrize(
        ("fail", "error", "match"),
        [
            (lambda: 1 // 0, ZeroDivisionError, "division"),
            # Of these two, Grain alone would say nothing, and hang.
            (lambda: raising(Locked("five")), RuntimeError, "^Locked: five\n"),
            (lambda: raising(Odd("five")), RuntimeError, "^Odd: five\n"),
            # Of this one it would say that the data end.
            (lambda: next(iter([])), RuntimeError, "raised StopIteration"),
            # Grain's worker dies of what is no Exception. That is an error, and no hang.
            (lambda: os._exit(3), RuntimeError, "terminated unexpectedly with exit code 3"),
        ],
        ids=["an exception", "not to be sent", "no Exception", "an end", "a worker's death"],
    )
    def test_in_a_worker_comes_in_its_place_and_stays(self, fail, error, match):
        def decode(i):
            if i == 21:
                fail()
            return {"id": np.int32(i)}

        ds = grain.MapDataset.range(40).map(decode).batch(8)
        num_workers = 2 if error is ZeroDivisionError else 1
        with iter(ds.shard_to(data_mesh(2), num_workers=num_workers)) as iterator:
            if "terminated" not in match:  # a worker that dies may take its last batch with it
                assert ids([next(iterator), next(iterator)]) == [list(range(8)), list(range(8, 16))]
            for _ in range(2):
                with pytest.raises(error, match=match) as caught:
                    list(iterator)
                if error is ZeroDivisionError:
                    assert "decode" in [entry.name for entry in caught.traceback]
        assert_no_child_is_left()

    def test_one_of_ours_arrives_whole(self):
        ds = grain.MapDataset.range(8).map(lambda i: {"x": np.zeros(3 + i % 2)}).batch(4)
        with pytest.raises(ShardingError) as caught:
            list(ds.shard_to(data_mesh(2), num_workers=1))
        assert str(caught.value).splitlines()[:2] == [
            "batch['x']: in record 1 of the dataset before .batch, the leaf is float64[4], but"
            " float64[3] in other rows.",
            "  leaf:   float64[4]   mesh: data=2",
        ]


@slow
@pytest.mark.spawn
class TestLife:
    def test_the_same_processes_make_the_batches_of_all_epochs(self):
        ds = grain.MapDataset.range(8).map(lambda i: {"id": i}).batch(4)
        epochs = ds.shard_to(data_mesh(2), num_workers=1).epochs(3)
        assert [len(at_work) for at_work in {(*children(),) for e in epochs for _ in e}] == [1]

    def test_breaking_early_leaves_no_process_and_no_thread(self):
        ds = numbered(400, 8).shard_to(data_mesh(2), num_workers=2)
        for batch in ds:
            assert ids([batch]) == [list(range(8))]
            assert len(children()) == 2
            break
        assert_no_child_is_left()

    def test_so_does_close_while_a_worker_is_busy(self, tmp_path):
        flag = str(tmp_path / "busy")

        def decode(i):
            if i == 8:
                open(flag, "w").close()
                while os.path.exists(flag):
                    threading.Event().wait(0.01)
            return {"id": np.int32(i)}

        ds = grain.MapDataset.range(80).map(decode).batch(8)
        iterator = iter(ds.shard_to(data_mesh(2), num_workers=2))
        next(iterator)
        eventually(lambda: os.path.exists(flag))
        closing = threading.Thread(target=iterator.close)
        closing.start()
        os.remove(flag)
        assert_ended([closing])
        assert_no_child_is_left()

    def test_a_closed_iterator_leaves_nothing_of_its_workers_to_the_garbage_collector(self):
        # Grain's iterators are in reference cycles. When the collector meets their semaphores
        # while multiprocessing's resource tracker is at work (it starts the next workers), the
        # tracker warns of a reentrant call, and the semaphores leak.
        def semaphores():
            return sum(isinstance(o, multiprocessing.synchronize.SemLock) for o in gc.get_objects())

        def run_to_the_end():
            with iter(numbered(16, 8).shard_to(data_mesh(2), num_workers=1)) as iterator:
                assert len(list(iterator)) == 2

        run_to_the_end()  # what Grain and multiprocessing make once and keep
        gc.collect()
        before = semaphores()
        gc.disable()
        try:
            run_to_the_end()
            assert semaphores() == before
        finally:
            gc.enable()


@slow
def test_without_the_guard_of_the_main_module_it_fails_and_says_why(tmp_path):
    # Each worker imports the script, which would start workers.
    code = script("""
        for batch in pipeline(num_workers=2):
            print(batch["id"].tolist())
    """)
    code, out, err = run(code, tmp_path / "program.py")
    assert (code, out) == (1, "")
    assert err.count("ShardingError: a worker process imported the main script") == 2
    remedy = 'no reason is above, put the loop of the main script under `if __name__ == "__main'
    assert remedy in err


@slow
def test_a_program_from_standard_input_is_told_that_workers_need_its_file(tmp_path):
    (tmp_path / "program.py").write_text(
        script("""
            if __name__ == "__main__":
                list(pipeline(num_workers=1))
        """)
    )
    with (tmp_path / "program.py").open() as program:
        process = python("-", stdin=program)
        _, err = process.communicate(timeout=HOSTS_S)
    assert process.returncode == 1
    assert "this program comes from standard input.\n  remedy: save the program to a file" in err
    assert "put the loop of the main script under" not in err


class TestC10:
    """C10: on a TPU machine a second process cannot open the chip."""

    @slow
    @pytest.mark.spawn
    @pytest.mark.parametrize(
        ("batched", "num_workers"),
        [
            # The whole chain is in the workers, with padding and a collate of the user's too.
            (lambda records: records.batch(4), 1),
            (lambda records: records.batch(4, batch_fn=_stack), 1),
            (lambda records: shared_out(records, 4, 8, grain.ReadOptions()), 2),
        ],
        ids=["rows", "whole batches", "feeds"],
    )
    def test_no_backend_is_started_in_a_worker(self, batched, num_workers, tmp_path):
        initialized = xla_bridge.backends_are_initialized

        def look(i):
            (tmp_path / f"{os.getpid()} {initialized()}").touch()
            return {"id": np.int32(i)}

        ds = batched(grain.MapDataset.range(15).map(look))
        assert ids(ds.shard_to(data_mesh(2), num_workers=num_workers)) == ids(
            ds.shard_to(data_mesh(2))
        )
        looks = {path.name.split()[0]: path.name.split()[1] for path in tmp_path.iterdir()}
        assert looks.pop(str(os.getpid())) == "True", "here there is one"
        assert list(looks.values()) == ["False"] * num_workers

    @pytest.mark.parametrize("batch_fn", [None, lambda items: _stack(items)])
    def test_what_runs_in_a_worker_pickles_and_holds_nothing_of_a_device(self, batch_fn):
        mesh = jax.make_mesh((4, 2), ("data", "model"))
        put = numbered(10, 4, batch_fn=batch_fn).shard_to(mesh)
        (in_worker,) = put.parents
        pickled = cloudpickle.dumps(in_worker)
        for name in (b"Mesh", b"Device", b"NamedSharding", b"PartitionSpec", b"jaxlib", b"Array"):
            assert name not in pickled
        with pytest.raises(Exception, match=r"workers?|pickle"):
            cloudpickle.dumps(put)
        for _ in range(2):  # also after it was read here
            copied = cloudpickle.loads(pickled)
            for ours, theirs in zip(copied, in_worker, strict=True):
                jax.tree.map(np.testing.assert_array_equal, ours, theirs)
            pickled = cloudpickle.dumps(in_worker)

    @pytest.mark.parametrize(
        ("on_devices", "name"),
        [
            (lambda: jax.numpy.zeros(3), "jax.Array"),
            (lambda: jax.random.key(0), "jax.Array"),
            (lambda: jax.devices()[0], "jax.Device"),
            (lambda: NamedSharding(data_mesh(2), PartitionSpec("data")), "jax.sharding.Mesh"),
        ],
        ids=["array", "key", "device", "sharding"],
    )
    def test_a_function_that_refers_to_a_device_is_refused(self, on_devices, name):
        # In a worker, a jax.Array would be unpickled by a backend, which opens the chip.
        found = on_devices()
        ds = grain.MapDataset.range(8).map(lambda i: {"x": i, "y": found is None}).batch(4)
        with (
            iter(ds.shard_to(data_mesh(2), num_workers=1)) as iterator,
            pytest.raises(ShardingError, match=rf"{name}.*\n(.*\n)*.*numpy\.asarray"),
        ):
            next(iterator)


def _stack(items):
    return {key: np.stack([item[key] for item in items]) for key in items[0]}


@slow
@pytest.mark.parametrize(
    ("kind", "num_workers", "cpu_buffer_size", "in_buffers"),
    [
        # Four for each worker, or what the option says, if that is more.
        ("random access", 1, 1, 4),
        ("random access", 2, 4, 8),
        ("random access", 1, 8, 8),
        # Four for all workers, as each has a part of every batch, and the one that they make.
        ("feeds", 2, 1, 5),
        ("feeds", 3, 8, 9),
    ],
)
def test_no_more_batches_are_made_ahead_than_the_documentation_says(
    kind, num_workers, cpu_buffer_size, in_buffers, tmp_path
):
    def note(i):
        (tmp_path / str(i)).touch()  # so that another process can count the records
        return {"id": np.int32(i)}

    records = grain.MapDataset.range(400).map(note)
    ds = records.batch(8) if kind == "random access" else shared_out(records, 4, 8)
    buffers = {"cpu_buffer_size": cpu_buffer_size, "device_buffer_size": 1}
    on_host = in_buffers + 1  # + 1: in flight between host and devices
    with iter(ds.shard_to(data_mesh(2), num_workers=num_workers, **buffers)) as batches:
        for k in range(1, 9):
            next(batches)
            eventually(lambda: len(list(tmp_path.iterdir())) >= 8 * (k + on_host))
            assert len(list(tmp_path.iterdir())) <= 8 * (k + on_host + 1)  # + 1: on the devices
