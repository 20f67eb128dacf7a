"""On real processes: a run goes on with another number of hosts and another batch size at once.

The acceptance run: 4 hosts with batches of 32, killed; 2 with 48, killed; 1 with 20, killed; 3 with
64. Below it, what else changes in the middle of a run, on 2 and on 4 hosts.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import grain
import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import BatchSchedule, rehearse
from tests.on_hosts import cases_of, data_mesh, end_job, restore, run_cases, run_jobs, save

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_RECORDS, NUM_FEEDS = 300, 4
# Hosts, devices of each, batch size, and the batches until the save.
JOBS = [(4, 2, 32, 2), (2, 2, 48, 2), (1, 8, 20, 3), (3, 2, 64, None)]
KINDS = ("random access", "epochs", "feeds")


def records(num_records=NUM_RECORDS):
    return (
        grain.MapDataset.range(num_records)
        .seed(5)
        .shuffle()
        .random_map(lambda i, rng: {"id": np.int32(i), "noise": rng.normal(size=2)})
    )


def make_feed(feed):
    """Its part of the records, without the multiples of 7."""
    part = grain.MapDataset.range(NUM_RECORDS).seed(3).shuffle()
    ds = part[feed.shard_index :: feed.shard_count].to_iter_dataset()
    ds = ds.filter(lambda i: i % 7 != 0)
    return ds.map(lambda i: {"id": np.int32(i), "feed": np.int32(feed.shard_index)})


# On the hosts.


def valid_rows(batch):
    """The valid rows of the global batch, by leaf."""
    batch = {name: multihost_utils.process_allgather(x, tiled=True) for name, x in batch.items()}
    mask = batch.pop("valid_mask")
    return {name: x[mask].tolist() for name, x in batch.items()}


def run_job(job, directory):
    """Trains from the checkpoints of the job before; writes what it did, and is killed."""
    written = []
    sys.addaudithook(lambda event, args: note_writing(written, event, args))
    report = {kind: train(kind, job, Path(directory)) for kind in KINDS}
    end_job(job, JOBS, directory, {**report, "written": written})


def note_writing(written, event, args):
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path, _, flags = args
        if "state" in os.path.basename(os.fsdecode(path)) and flags & os.O_ACCMODE != os.O_RDONLY:
            written.append(os.fsdecode(path))


def train(kind, job, directory):
    hosts, _, global_batch_size, num_batches = JOBS[job]
    if kind == "feeds":
        ds = grain_shard.feeds(make_feed, num_feeds=NUM_FEEDS).batch(global_batch_size)
    else:
        ds = records().batch(global_batch_size)
    ds = ds.shard_to(data_mesh(), timeout_s=30, num_workers=int(hosts == 1))
    api = "v1" if kind == "epochs" else "manager"
    with ds.epochs(2) if kind == "epochs" else iter(ds) as iterator:
        if job % 2:
            next(iterator)  # restore into one that is in use
        if job:
            restore(api, directory / kind, job - 1, iterator)
        restored = iterator.get_state()
        epochs = iterator if kind == "epochs" else [iterator]
        batches = itertools.chain.from_iterable(epochs)
        done = [valid_rows(batch) for batch in itertools.islice(batches, num_batches)]
        if num_batches is not None:
            save(api, directory / kind, job, iterator)
            next(batches)  # lost when the job is killed
    return {"batches": done, "restored": [restored.get(key) for key in ("step", "record")]}


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """The folder of the checkpoints of all jobs."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def reports(directory):
    """The reports of each host of each job."""
    return run_jobs(run_job, JOBS, directory)


def batches_of(reports, kind):
    """The batches of all jobs, in the order in which they were trained on."""
    for of_hosts in reports:
        for of_host in of_hosts[1:]:
            assert of_host[kind] == of_hosts[0][kind], "all hosts see the same global batches"
    return [of_hosts[0][kind]["batches"] for of_hosts in reports]


@pytest.mark.parametrize(("kind", "epochs"), [("random access", 1), ("epochs", 2)])
def test_killed_and_resumed_with_other_hosts_and_sizes_it_is_one_run(reports, kind, epochs):
    by_job = batches_of(reports, kind)
    sizes = [[len(batch["id"]) for batch in batches] for batches in by_job]
    later = [] if epochs == 1 else [64, 64, 64, 64, 44]
    assert sizes == [[32, 32], [48, 48], [20, 20, 20], [64, 16, *later]]
    rows = {
        leaf: [row for batches in by_job for batch in batches for row in batch[leaf]]
        for leaf in ("id", "noise")
    }
    expected = list(records().repeat(epochs))  # plain Grain, in one process
    assert rows["id"] == [record["id"] for record in expected]
    assert rows["noise"] == [record["noise"].astype(np.float32).tolist() for record in expected]
    assert sorted(rows["id"]) == sorted(list(range(NUM_RECORDS)) * epochs)
    restored = [of_hosts[0][kind]["restored"] for of_hosts in reports]
    assert restored == [[0, 0], [2, 64], [4, 160], [7, 220]]


@pytest.mark.parametrize("kind", ["random access", "epochs"])
def test_a_state_of_random_access_is_written_once_by_one_host(reports, directory, kind):
    for of_hosts, of_next_job, job in zip(reports, reports[1:], itertools.count()):
        checkpoint = f"{kind}/{job}"
        written = [path for of_host in of_hosts for path in of_host["written"]]
        assert len([path for path in written if f"/{checkpoint}" in path]) == 1
        (path,) = (directory / checkpoint / "data").glob("*state*")
        state = json.loads(path.read_text())
        assert [state["step"], state["record"]] == of_next_job[0][kind]["restored"]


def test_so_it_is_of_feeds_each_of_which_goes_on_at_its_own_record(reports):
    by_job = batches_of(reports, "feeds")
    assert [len(batch["id"]) for batch in by_job[2]] == [20, 20, 20]
    rows = [
        (feed, i)
        for batches in by_job
        for batch in batches
        for feed, i in zip(batch["feed"], batch["id"], strict=True)
    ]
    for feed in range(NUM_FEEDS):
        options = grain.sharding.ShardOptions(feed, NUM_FEEDS)
        alone = [int(row["id"]) for row in make_feed(options)]
        assert [i for of, i in rows if of == feed] == alone
    assert sorted(i for _, i in rows) == [i for i in range(NUM_RECORDS) if i % 7]


# The functions named case_... run on 2 and then on 4 hosts, and return what the tests look at.

HOSTS = (2, 4)
SCHEDULE = {0: 12, 3: 32, 5: 20}
FOR_ALL_DEVICES = {0: 16, 3: 32, 5: 24}  # read="once" needs batches that all devices divide


def mesh_with_models():
    """Rows over four devices; each is held by two, which may be of two hosts."""
    return Mesh(np.array(jax.devices()).reshape(2, 4).T, ("data", "model"))


def ids_of(batches):
    return [valid_rows({k: b[k] for k in ("id", "valid_mask")})["id"] for b in batches]


def scheduled(sizes=SCHEDULE):
    return records(130).pipe(BatchSchedule(sizes)).repeat(2)


def case_schedule():
    found = {}
    for name, mesh in {"data": data_mesh(), "model": mesh_with_models()}.items():
        for read, sizes in {"needed": SCHEDULE, "once": FOR_ALL_DEVICES}.items():
            ds = scheduled(sizes).shard_to(mesh, P("data"), read=read, timeout_s=20)
            with iter(ds) as iterator:
                found[f"{name} {read}"] = ids_of(iterator)
    return found


def case_seek():
    with iter(scheduled().shard_to(data_mesh(), timeout_s=20)) as iterator:
        iterator.seek(6)
        rest = ids_of(iterator)
        iterator.seek(record=133)
        return rest, ids_of(iterator)


def case_epochs_of_which_one_is_left_early():
    with records(50).batch(16).shard_to(data_mesh(), timeout_s=20).epochs(3) as epochs:
        seen = []
        for batches in epochs:
            some = itertools.islice(batches, 1 if batches.epoch == 1 else None)
            seen.append((batches.epoch, len(batches), ids_of(some)))
        return seen


@pytest.fixture(scope="module")
def runs():
    cases = cases_of(globals())
    return {
        hosts: rehearse.run(
            run_cases, cases, hosts=hosts, devices_per_host=8 // hosts, timeout_s=150
        )
        for hosts in HOSTS
    }


@pytest.fixture(params=HOSTS, ids=lambda hosts: f"{hosts} hosts")
def case(runs, request):
    """From a case's name, what every host returned; all of them the same."""

    def result(name):
        first, *others = [of_host[f"case_{name}"] for of_host in runs[request.param]]
        assert "Traceback" not in str(first), first
        assert all(other == first for other in others)
        return first

    return result


def test_a_schedule_has_the_same_batches_on_any_hosts_and_mesh(case):
    needed = [batch["id"].tolist() for batch in scheduled()]
    assert [len(batch) for batch in needed[:7]] == [12, 12, 12, 32, 32, 20, 10]
    once = [batch["id"].tolist() for batch in scheduled(FOR_ALL_DEVICES)]
    assert [len(batch) for batch in once[:6]] == [16, 16, 16, 32, 32, 18]
    assert case("schedule") == {
        "data needed": needed,
        "data once": once,
        "model needed": needed,
        "model once": once,
    }


def test_any_step_and_any_record_can_be_sought(case):
    from_step, from_record = case("seek")
    in_order = [int(record["id"]) for record in records(130).repeat(2)]
    assert from_step == [batch["id"].tolist() for batch in scheduled()][6:]
    assert [row for batch in from_record for row in batch] == in_order[133:]


def test_epochs_are_the_same_on_all_hosts(case):
    whole = [batch["id"].tolist() for batch in records(50).batch(16).repeat(3)]
    seen = [tuple(of_epoch) for of_epoch in case("epochs_of_which_one_is_left_early")]
    assert seen == [(0, 4, whole[:4]), (1, 4, whole[4:5]), (2, 4, whole[8:])]
