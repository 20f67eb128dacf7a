"""`executor=`: batches made by any `concurrent.futures.Executor`, bit for bit those of threads."""

import concurrent.futures
import contextlib
import gc
import json
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings

import grain
import jax
import numpy as np
import pytest

import grain_shard
from grain_shard import GrainShardError, Retries, ShardingError, rehearse
from grain_shard.errors import BadRecordsError
from grain_shard.iteration import executor_batches
from tests.conftest import HANG_S, HOSTS_S, background_threads, data_mesh, eventually, wait
from tests.on_hosts import own_parts
from tests.pipelines import KINDS, assert_same_batches

NUM_RECORDS = 100


def record(i):
    return {"id": np.int32(i), "text": f"#{i}"}


def augmented(row, rng):
    return row | {"noise": rng.normal(size=3)}


def unreadable(i):
    if i in (17, 30):
        raise ValueError(f"record {i} is corrupt")
    return record(i)


NUMBERS = grain.MapDataset.range(NUM_RECORDS)
RECORDS = NUMBERS.seed(3).shuffle().map(record).random_map(augmented)
BATCHES, TWO_ARE_BAD = RECORDS.batch(16), NUMBERS.map(unreadable).batch(16)
PIPELINES = {
    "padded": BATCHES,
    "epochs": BATCHES.repeat(2),
    "mapped after .batch": BATCHES.map(lambda batch: batch | {"n": 1.0}),
    "a schedule": RECORDS.pipe(grain_shard.BatchSchedule({0: 8, 2: 16})),
}


def spawned(num_processes):
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(num_processes, mp_context=context)


@pytest.fixture(scope="module")
def threads():
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def processes():
    with spawned(2) as executor:
        yield executor


@pytest.fixture(scope="module")
def dask():
    distributed = pytest.importorskip("distributed")
    dask = pytest.importorskip("dask")
    # Dask gives a worker up that takes more than 15 s to start again: a busy machine has failed so.
    with (
        dask.config.set({"distributed.deploy.lost-worker-timeout": "10 minutes"}),
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


class OfRay(concurrent.futures.Executor):
    """The adapter of docs/other_machines.md."""

    def submit(self, fn, /, *args, **kwargs):
        import ray

        return ray.remote(fn).remote(*args, **kwargs).future()


@pytest.fixture(scope="module")
def of_ray():
    ray = pytest.importorskip("ray")

    def end():
        # The collector finds the objects of Ray's processes, and warns that they have not ended.
        with warnings.catch_warnings(action="ignore", category=ResourceWarning):
            ray.shutdown()
            gc.collect()

    # Ray ends its node if one of its processes needs more than 15 s to start: a machine that stood
    # still for a moment has failed so.
    for may_fail in (Exception, Exception, ()):
        with contextlib.suppress(may_fail):
            ray.init(
                num_cpus=2, include_dashboard=False, runtime_env={"env_vars": dict(os.environ)}
            )
            break
        end()
    yield OfRay()
    end()


EXECUTORS = [
    "threads",
    pytest.param("processes", marks=pytest.mark.slow),
    pytest.param("dask", marks=pytest.mark.long),
    pytest.param(
        "of_ray",  # starts its processes by fork, of which JAX warns
        marks=[
            pytest.mark.long,
            pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
        ],
    ),
]


@pytest.fixture(params=EXECUTORS)
def executor(request):
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("ds", PIPELINES.values(), ids=PIPELINES)
def test_batches_are_those_of_threads(ds, executor, mesh):
    assert_same_batches(ds.shard_to(mesh, executor=executor), ds.shard_to(mesh))


def test_buffers_of_any_size(executor, mesh):
    buffers = {"cpu_buffer_size": 7, "device_buffer_size": 1}
    found = BATCHES.shard_to(mesh, executor=executor, **buffers)
    assert_same_batches(found, BATCHES.shard_to(mesh))


def test_a_run_goes_on_with_it_and_without_it(executor, mesh):
    ds = BATCHES.repeat(2)
    expected, found, state = list(ds.shard_to(mesh)), [], None
    for options in ({}, {"executor": executor}, {}):
        with iter(ds.shard_to(mesh, **options)) as iterator:
            if state is not None:
                iterator.set_state(json.loads(state))
            found += [next(iterator) for _ in range(3)]
            state = json.dumps(iterator.get_state())
    assert_same_batches(found, expected[:9])


def test_an_error_names_the_record_and_the_worker(executor, mesh):
    found = []
    with pytest.raises(ValueError, match="record 17 is corrupt") as caught:
        found.extend(TWO_ARE_BAD.shard_to(mesh, executor=executor))
    assert len(found) == 1
    notes = "\n".join(caught.value.__notes__)
    assert "record 17 of the dataset before .batch" in notes
    assert "grain_shard: in process" in notes


def test_bad_records_are_masked_and_counted(executor, mesh):
    options = {"on_bad_record": "mask", "executor": executor}
    with iter(TWO_ARE_BAD.shard_to(mesh, **options)) as iterator:
        batches = list(iterator)
        faults = iterator.stats().faults
    assert sum(int(batch["valid_mask"].sum()) for batch in batches) == NUM_RECORDS - 2
    assert sorted(one.record for one in faults.listed) == [17, 30]
    assert faults.records == NUM_RECORDS
    with pytest.raises(BadRecordsError):
        list(TWO_ARE_BAD.shard_to(mesh, max_bad_records=1, **options))


@contextlib.contextmanager
def opened_by_a_host(kind, address):
    """An executor for one host. The workers of Dask and Ray serve both hosts."""
    if kind == "processes":
        with spawned(2) as executor:
            yield executor
    elif kind == "dask":
        import distributed

        with distributed.Client(address) as client:
            yield client.get_executor()
    else:
        import ray

        ray.init(address=address)
        yield OfRay()
        ray.shutdown()


def on_two_hosts(kind, address):
    mesh = jax.make_mesh((4,), ("data",))
    with opened_by_a_host(kind, address) as executor:
        # Ray starts workers for each host, and on a busy machine a host may get its first one late.
        found = BATCHES.shard_to(mesh, executor=executor, timeout_s=5 * HANG_S)
        for batch, like in zip(found, BATCHES.shard_to(mesh), strict=True):
            del batch["text"], like["text"]  # which is on no device
            assert batch.keys() == {"id", "noise", "valid_mask"}
            jax.tree.map(np.testing.assert_array_equal, own_parts(batch), own_parts(like))
    return True


@pytest.mark.slow
@pytest.mark.parametrize("kind", EXECUTORS[1:])
def test_two_hosts_have_the_batches_of_threads(kind, request):
    request.getfixturevalue(kind)
    address = None  # a host starts its own workers
    if kind == "dask":
        address = sys.modules["distributed"].default_client().scheduler.address
    elif kind == "of_ray":
        address = sys.modules["ray"].get_runtime_context().gcs_address
    hosts = rehearse.run(
        on_two_hosts, kind, address, hosts=2, devices_per_host=2, timeout_s=HOSTS_S
    )
    assert hosts == [True, True]


class TestALostWorker:
    @pytest.fixture(autouse=True)
    def without_a_pause(self, monkeypatch):
        monkeypatch.setattr(executor_batches, "_PAUSE_S", 0.0)

    class Losing(concurrent.futures.ThreadPoolExecutor):
        """Loses every task the first `times` times that it gets it."""

        def __init__(self, times):
            super().__init__(2)
            self._times, self._seen = times, {}

        def submit(self, fn, pipeline, index):
            self._seen[index] = number = self._seen.get(index, 0) + 1
            if number > self._times:
                return super().submit(fn, pipeline, index)
            future = concurrent.futures.Future()
            if number % 2:
                future.cancel()
            else:
                future.set_exception(ConnectionResetError("the worker is gone"))
            return future

    def test_its_task_is_submitted_again(self, mesh):
        with self.Losing(4) as executor:
            assert_same_batches(BATCHES.shard_to(mesh, executor=executor), BATCHES.shard_to(mesh))

    def test_as_often_as_retries_says(self, mesh):
        with self.Losing(2) as executor, pytest.raises(GrainShardError) as caught:
            list(BATCHES.shard_to(mesh, executor=executor, retries=Retries(1)))
        assert "Losing did not make batch 0 (tries: 2): ConnectionResetError" in str(caught.value)

    def test_close_ends_the_pause_before_it_is_submitted_again(self, mesh, monkeypatch):
        monkeypatch.setattr(executor_batches, "_PAUSE_S", 10 * HANG_S)
        pauses = threading.Event()
        monkeypatch.setattr(executor_batches.logging, "warning", lambda *args: pauses.set())
        with self.Losing(1) as executor:
            iterator = iter(BATCHES.shard_to(mesh, executor=executor))
            iterator.start_prefetch()
            wait(pauses)
            iterator.close()
        assert not background_threads()

    @pytest.mark.long
    def test_dask_five_workers_are_killed_in_the_middle(self, dask, mesh):
        ds = RECORDS.batch(4).repeat(8)
        client = sys.modules["distributed"].default_client()
        expected, found = list(ds.shard_to(mesh)), []

        def pids():
            return set(client.run(os.getpid, on_error="ignore").values())

        with iter(ds.shard_to(mesh, executor=dask)) as iterator:
            for number, batch in enumerate(iterator):
                found.append(batch)
                if number % 40 == 20:
                    os.kill(killed := min(pids()), signal.SIGKILL)
                    # Without any worker, Dask's tasks would wait for ever.
                    eventually(lambda killed=killed: len(pids() - {killed}) == 2)
        assert_same_batches(found, expected)


GO_ON = threading.Event()


def waits(i):
    GO_ON.wait(60)
    return record(i)


def test_closing_leaves_the_executor_and_cancels_what_has_not_begun(mesh):
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        iterator = iter(NUMBERS.map(waits).batch(8).shard_to(mesh, executor=executor))
        iterator.start_prefetch()
        threading.Timer(0.2, iterator.close).start()
        with pytest.raises((StopIteration, ValueError, GrainShardError)):
            next(iterator)
        GO_ON.set()
        assert executor.submit(lambda: 7).result(60) == 7


@pytest.mark.slow
def test_a_pool_that_broke_is_an_error_and_no_hang(mesh):
    ds = NUMBERS.map(lambda i: os._exit(1)).batch(8)
    with spawned(1) as executor, pytest.raises(GrainShardError, match="BrokenProcessPool"):
        list(ds.shard_to(mesh, executor=executor))


def test_an_executor_that_was_shut_down_is_an_error(mesh):
    executor = concurrent.futures.ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(GrainShardError, match="accepts no task"):
        list(BATCHES.shard_to(mesh, executor=executor))


NO_EXECUTOR = "is not a concurrent.futures"
REFUSED = {
    "workers, too": (BATCHES, {"num_workers": 1}, "num_workers are both given"),
    "no executor": (BATCHES, {"executor": "dask"}, NO_EXECUTOR),
    "a class": (BATCHES, {"executor": concurrent.futures.ThreadPoolExecutor}, NO_EXECUTOR),
    "a stream": (KINDS["stream"](record), {}, "needs random access"),
    "feeds": (KINDS["feeds"](record), {}, "needs random access"),
}


@pytest.mark.parametrize(("ds", "options", "problem"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_refused_when_the_pipeline_is_built(
    ds, options, problem, threads, mesh
):
    with pytest.raises(ShardingError, match=problem):
        ds.shard_to(mesh, **{"executor": threads, **options})


def test_a_task_is_small_and_knows_no_device(threads, mesh, caplog):
    sizes = []

    class Measuring(concurrent.futures.ThreadPoolExecutor):
        def submit(self, fn, *args):
            sizes.append(len(pickle.dumps(args)))
            return super().submit(fn, *args)

    with Measuring(1) as executor:
        list(BATCHES.shard_to(mesh, executor=executor))
        assert max(sizes) < 8000
        source = [{"x": row} for row in np.zeros((20, 10_000))]
        list(grain.MapDataset.source(source).batch(4).shard_to(data_mesh(2), executor=executor))
    assert "each task for the executor carries the whole pipeline, 1.6 MB" in caplog.text
