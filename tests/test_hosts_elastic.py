"""On real processes: a run goes on with another number of hosts and another batch size at once.

The acceptance run: 4 hosts with batches of 32, killed; 2 with 48, killed; 1 with 20, killed; 3 with
64. What else changes in the middle of a run: test_hosts_changing_runs.py.
"""

import itertools
import json
import os
import sys
from pathlib import Path

import grain
import numpy as np
import pytest

import grain_shard
from tests.on_hosts import data_mesh, end_job, restore, run_jobs, save, whole

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_RECORDS, NUM_FEEDS = 300, 4
# Hosts, devices of each, batch size, and the batches until the save.
JOBS = [(4, 2, 32, 2), (2, 2, 48, 2), (1, 8, 20, 3), (3, 2, 64, None)]
KINDS = ("random access", "epochs", "feeds")


def records():
    return (
        grain.MapDataset.range(NUM_RECORDS)
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
    batch = whole(batch)
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
