"""Checkpoints by Orbax across numbers of hosts: 4, then 2, then 1, then 3, in one epoch.

Every job but the last is killed after a save, and had gone on for a batch by then. Each does
everything twice: with Orbax's CheckpointManager, and with its v1 API.
"""

import itertools
import json
import os
import shutil
import sys
import threading
from pathlib import Path

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import orbax.checkpoint.experimental.v1 as ocp_v1
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import grain_shard
from grain_shard import rehearse
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
from tests.on_hosts import end_job, run_jobs

pytestmark = [pytest.mark.slow, pytest.mark.long]

APIS = ("manager", "v1")
NUM_RECORDS, GLOBAL_BATCH_SIZE = 58, 8
# Hosts, devices of each, worker processes of each, and the batches until the save.
JOBS = [(4, 2, 0, 2), (2, 2, 0, 3), (1, 8, 1, 1), (3, 2, 0, None)]
BATCHES_BY_JOB = [2, 3, 1, 2]


def pipeline():
    return (
        grain.MapDataset.range(NUM_RECORDS)
        .seed(5)
        .shuffle()
        .random_map(
            lambda i, rng: {"id": np.int32(i), "noise": rng.normal(size=3).astype(np.float32)}
        )
        .batch(GLOBAL_BATCH_SIZE)
    )


# On the hosts.


def run_job(job, directory):
    """Trains from the checkpoint of the job before; writes what it did, and is killed."""
    directory = Path(directory)
    written, report = [], {}
    sys.addaudithook(lambda event, args: note_writing(written, event, args))
    for api in APIS:
        report[api] = train(api, job, directory)
    report["written"] = written
    end_job(job, JOBS, directory, report)


def note_writing(written, event, args):
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path, _, flags = args
        if "state" in os.path.basename(os.fsdecode(path)) and flags & os.O_ACCMODE != os.O_RDONLY:
            written.append(os.fsdecode(path))


def train(api, job, directory):
    _, _, num_workers, num_batches = JOBS[job]
    mesh = Mesh(np.array(jax.devices()), ("data",))
    iterator = iter(pipeline().shard_to(mesh, num_workers=num_workers, timeout_s=30))
    with iterator:
        if job % 2:
            next(iterator)  # restore into one that is in use
        if job:
            restore(api, directory, job - 1, iterator)
        restored = iterator.get_state()
        batches = [to_lists(batch) for batch in itertools.islice(iterator, num_batches)]
        if num_batches is not None:
            save(api, directory, job, iterator)
            next(iterator)  # lost when the job is killed
    return {"batches": batches, "restored": restored}


def to_lists(batch):
    """The valid rows of the global batch."""
    batch = {name: multihost_utils.process_allgather(x, tiled=True) for name, x in batch.items()}
    mask = batch.pop("valid_mask")
    assert not any(x[~mask].any() for x in batch.values()), "a padding row is zeros"
    return {name: x[mask].tolist() for name, x in batch.items()}


def save(api, directory, job, iterator):
    if api == "v1":
        ocp_v1.save_checkpointables(directory / f"v1-{job}", {"data": iterator})
        return
    with ocp.CheckpointManager(directory / "manager") as manager:
        manager.save(job, args=ocp.args.Composite(data=CheckpointSave(iterator)))
        manager.wait_until_finished()


def restore(api, directory, job, iterator):
    if api == "v1":
        ocp_v1.load_checkpointables(directory / f"v1-{job}", {"data": iterator})
        return
    with ocp.CheckpointManager(directory / "manager") as manager:
        assert manager.latest_step() == job
        manager.restore(job, args=ocp.args.Composite(data=CheckpointRestore(iterator)))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Of the checkpoints of all jobs."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def reports(directory):
    """What each host of each job did."""
    return run_jobs(run_job, JOBS, directory)


@pytest.mark.parametrize("api", APIS)
def test_killed_and_resumed_on_other_hosts_the_epoch_is_every_record_once_in_order(reports, api):
    trained = [report[0][api]["batches"] for report in reports]
    assert [len(batches) for batches in trained] == BATCHES_BY_JOB
    expected = [
        {name: leaf.tolist() for name, leaf in batch.items()}
        for batch in pipeline()  # plain Grain, in one process
    ]
    assert list(itertools.chain(*trained)) == expected
    ids = [i for batch in itertools.chain(*trained) for i in batch["id"]]
    assert sorted(ids) == list(range(NUM_RECORDS))


@pytest.mark.parametrize("api", APIS)
def test_every_host_of_a_job_trains_on_the_same_global_batches_from_the_same_state(reports, api):
    for job, of_hosts in enumerate(reports):
        for of_host in of_hosts:
            assert of_host[api] == of_hosts[0][api]
        assert of_hosts[0][api]["restored"]["step"] == sum(BATCHES_BY_JOB[:job])


@pytest.mark.parametrize("api", APIS)
def test_the_state_is_written_once_by_one_host(reports, directory, api):
    for job, of_hosts in enumerate(reports[:-1]):
        saved = "manager" if api == "manager" else f"v1-{job}"
        writers = [
            host
            for host, of_host in enumerate(of_hosts)
            for path in of_host["written"]
            if f"/{saved}" in path
        ]
        assert len(writers) == 1
        checkpoint = directory / "manager" / str(job) if api == "manager" else directory / saved
        (path,) = (checkpoint / "data").glob("*state*")
        assert json.loads(path.read_text())["step"] == sum(BATCHES_BY_JOB[: job + 1])


# A stream has a state of its own on each host.


def stream():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    options = grain_shard.ShardByMesh(mesh)
    records = grain.MapDataset.range(40)[options.shard_index :: options.shard_count]
    ds = records.map(lambda i: {"id": np.int32(i)}).to_iter_dataset().batch(4)
    return iter(ds.shard_to(mesh, rows="local", timeout_s=30))


def save_and_resume_streams(directory):
    """By API, what follows the save, and what follows the restore."""
    sys.addaudithook(slow_disk_of_host_1)
    return {api: save_and_resume_stream(api, Path(directory, api)) for api in APIS}


def save_and_resume_stream(api, directory):
    directory.mkdir(exist_ok=True)
    with stream() as iterator:
        next(iterator)
        save(api, directory, 0, iterator)
        uninterrupted = [to_lists(batch)["id"] for batch in iterator]
    with stream() as iterator:
        restore(api, directory, 0, iterator)
        return uninterrupted, [to_lists(batch)["id"] for batch in iterator]


def slow_disk_of_host_1(event, args):
    """Host 1 begins to write when a host that did not wait for it would be done."""
    if event == "open" and os.path.basename(os.fsdecode(args[0])) == "state-1-of-2.json":
        threading.Event().wait(1)


@pytest.fixture(scope="module")
def streams(tmp_path_factory):
    """The folder of the checkpoints, and what each host did."""
    directory = tmp_path_factory.mktemp("streams")
    return directory, rehearse.run(
        save_and_resume_streams, str(directory), hosts=2, devices_per_host=2, timeout_s=60
    )


@pytest.mark.parametrize("api", APIS)
def test_a_streams_state_is_one_file_a_host_and_continues_on_as_many_hosts(streams, api):
    directory, of_hosts = streams
    for of_host in of_hosts:
        uninterrupted, resumed = of_host[api]
        assert resumed == uninterrupted
        assert [len(ids) for ids in resumed] == [8, 8, 8, 8]
    names = sorted(path.name for path in (directory / api).rglob("state*"))
    assert names == ["state-0-of-2.json", "state-1-of-2.json"]


@pytest.mark.parametrize("api", APIS)
def test_a_streams_state_is_refused_on_another_number_of_hosts(tmp_path, api):
    with stream() as iterator:
        save(api, tmp_path, 0, iterator)
        (saved,) = tmp_path.rglob("state-0-of-1.json")
        for host in range(2):  # as two hosts would have saved it
            shutil.copy(saved, saved.with_name(f"state-{host}-of-2.json"))
        saved.unlink()
        with pytest.raises(grain_shard.StateError, match="no state for host 0 of 1") as refusal:
            restore(api, tmp_path, 0, iterator)
    assert "state-0-of-2.json, state-1-of-2.json" in str(refusal.value)
