"""On real processes: a run goes on with another number of hosts and another batch size at once.

The acceptance run: 4 hosts with batches of 32, killed; 2 with 48, killed; 1 with 20, killed; 3 with
64. What else changes in the middle of a run: test_hosts_changing_runs.py.
"""

import functools
import itertools
import json
import os
import re
import sys
from pathlib import Path

import grain
import numpy as np
import pytest

import grain_shard
from tests import text
from tests.on_hosts import data_mesh, end_job, restore, run_jobs, save, whole
from tests.test_hosts_feeds import digest

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_RECORDS, NUM_FEEDS = 300, 4
# Hosts, devices of each, batch size, and the batches until the save. At no save are a feed's bins,
# of which there are 6, all used up. Three hosts run parts of the four feeds.
JOBS = [(4, 2, 32, 2), (2, 2, 48, 2), (1, 8, 20, 3), (3, 2, 64, None)]
# Each kind of pipeline, with one of Orbax's interfaces.
KINDS = {"random access": "v1", "epochs": "manager", "feeds": "manager", "feeds, v1": "v1"}
FEEDS = ("feeds", "feeds, v1")
WORKERS = {"feeds": (0, 2, 1, 1), "random access": (0, 0, 1, 0)}  # of a host, in each job


def records():
    return (
        grain.MapDataset.range(NUM_RECORDS)
        .seed(5)
        .shuffle()
        .random_map(lambda i, rng: {"id": np.int32(i), "noise": rng.normal(size=2)})
    )


# On the hosts.


def valid_rows(batch):
    """The valid rows of the global batch, by leaf."""
    batch = whole(batch)
    mask = batch.pop("valid_mask")
    return {name: x[mask].tolist() for name, x in batch.items()}


def valid_rows_of_feeds(batch, global_batch_size):
    """By feed, a digest of each valid row of the global batch."""
    batch, rows = whole(batch), [[] for _ in range(NUM_FEEDS)]
    for row in np.flatnonzero(batch.pop("valid_mask")).tolist():
        of_feed = rows[row * NUM_FEEDS // global_batch_size]
        of_feed.append(digest({name: leaf[row] for name, leaf in batch.items()}))
    return rows


def run_job(job, directory):
    """Trains from the checkpoints of the job before; writes what it did, and is killed."""
    opened = []
    sys.addaudithook(lambda event, args: note_opening(opened, event, args))
    report = {kind: train(kind, job, Path(directory)) for kind in KINDS}
    end_job(job, JOBS, directory, {**report, "opened": opened})


def note_opening(opened, event, args):
    """Notes the path of each file of a state, and whether it is opened to be read."""
    if event == "open" and isinstance(args[0], str | bytes | os.PathLike):
        path, flags = os.fsdecode(args[0]), args[2]
        if re.search(r"state[^/]*$|feeds-[^/]*$", path):
            opened.append((path, flags & os.O_ACCMODE == os.O_RDONLY))


def train(kind, job, directory):
    _, _, global_batch_size, num_batches = JOBS[job]
    num_workers = WORKERS.get(kind, [0] * len(JOBS))[job]
    if kind in FEEDS:
        ds = grain_shard.feeds(text.packed, num_feeds=NUM_FEEDS).batch(global_batch_size)
        rows_of = functools.partial(valid_rows_of_feeds, global_batch_size=global_batch_size)
    else:
        ds, rows_of = records().batch(global_batch_size), valid_rows
    ds = ds.shard_to(data_mesh(), timeout_s=30, num_workers=num_workers)
    api = KINDS[kind]
    with ds.epochs(2) if kind == "epochs" else iter(ds) as iterator:
        if job % 2:
            next(iterator)  # restore into one that is in use
        if job:
            restore(api, directory / kind, job - 1, iterator)
        restored = iterator.get_state()
        epochs = iterator if kind == "epochs" else [iterator]
        batches = itertools.chain.from_iterable(epochs)
        done = [rows_of(batch) for batch in itertools.islice(batches, num_batches)]
        if num_batches is not None:
            save(api, directory / kind, job, iterator)
            for entry in iterator.get_state().get("feeds", {}).values():
                assert entry["state"]["next_row"], "bins half used up"
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
        opened = [one for of_host in of_hosts for one in of_host["opened"]]
        written = [path for path, is_read in opened if not is_read and f"/{checkpoint}" in path]
        assert len(written) == 1
        (path,) = (directory / checkpoint / "data").glob("*state*")
        state = json.loads(path.read_text())
        assert [state["step"], state["record"]] == of_next_job[0][kind]["restored"]


@pytest.mark.parametrize("kind", FEEDS)
def test_each_feed_of_packed_text_goes_on_at_its_own_row(reports, kind):
    by_job = batches_of(reports, kind)
    assert [[len(rows) for rows in batch] for batch in by_job[2]] == [[5] * NUM_FEEDS] * 3
    for feed in range(NUM_FEEDS):
        alone = text.packed(grain.sharding.ShardOptions(feed, NUM_FEEDS))  # plain Grain
        rows = [row for batches in by_job for batch in batches for row in batch[feed]]
        assert rows == [digest(row) for row in alone]


@pytest.mark.parametrize("kind", FEEDS)
def test_each_host_opens_the_files_of_its_own_feeds_and_no_others(reports, kind):
    def files(*ranges):
        return [f"feeds-{first:05d}-{last:05d}-of-00004.json" for first, last in ranges]

    def opened(of_host, reading):
        paths = [Path(path) for path, is_read in of_host["opened"] if is_read == reading]
        return [p.name for p in paths if "feeds-" in p.name and f"/{kind}/" in str(p)]

    each, halves = files((0, 0), (1, 1), (2, 2), (3, 3)), files((0, 1), (2, 3))
    all_feeds = files((0, 3))
    written = [[opened(of_host, reading=False) for of_host in job] for job in reports]
    assert written[:2] == [[[name] for name in each], [[name] for name in halves]]
    assert written[2:] == [[all_feeds], [[]] * 3]
    read = [[opened(of_host, reading=True) for of_host in job] for job in reports]
    assert read == [[[]] * 4, [each[:2], each[2:]], [halves], [all_feeds] * 3]
