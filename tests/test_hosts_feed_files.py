"""On real processes: saved on 4 hosts, restored on 2, saved there, restored on 3.

Which files each host opens, and that every row comes once. Simulated hosts, and far more of them:
test_feed_files.py.
"""

import itertools
import os
import sys

import grain
import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh

import grain_shard
from grain_shard import rehearse
from grain_shard.checkpoint import CheckpointRestore, CheckpointSave

pytestmark = [pytest.mark.slow, pytest.mark.long]

NUM_FEEDS, NUM_ROWS = 12, 10  # of each feed
# Hosts, devices of each, and the batches until the save.
JOBS = [(4, 1, 2), (2, 2, 1), (3, 2, None)]


def make_feed(feed):
    """Feed f has the rows 100 * f, 100 * f + 1, ..."""
    first = 100 * feed.shard_index
    numbers = grain.MapDataset.range(first, first + NUM_ROWS)
    return numbers.map(lambda i: {"id": np.int32(i)}).to_iter_dataset()


def run_job(job, directory):
    """The rows of each global batch, and the files that this host read and wrote."""
    _, _, num_batches = JOBS[job]
    opened = {"read": [], "written": []}
    sys.addaudithook(lambda event, args: note(opened, event, args))
    mesh = Mesh(np.array(jax.devices()), ("data",))
    ds = grain_shard.feeds(make_feed, num_feeds=NUM_FEEDS).batch(2 * NUM_FEEDS)
    with (
        iter(ds.shard_to(mesh, timeout_s=60)) as iterator,
        ocp.CheckpointManager(directory) as manager,
    ):
        if job:
            restored = ocp.args.Composite(data=CheckpointRestore(iterator))
            manager.restore(job - 1, args=restored)
        rows = [valid_ids(batch) for batch in itertools.islice(iterator, num_batches)]
        if num_batches is not None:
            manager.save(job, args=ocp.args.Composite(data=CheckpointSave(iterator)))
            manager.wait_until_finished()
    return rows, opened


def note(opened, event, args):
    if event == "open" and isinstance(args[0], str | os.PathLike):
        name = os.path.basename(os.fspath(args[0]))
        if name.startswith("feeds-"):
            is_read = args[2] & os.O_ACCMODE == os.O_RDONLY
            opened["read" if is_read else "written"].append(name)


def valid_ids(batch):
    batch = {name: multihost_utils.process_allgather(x, tiled=True) for name, x in batch.items()}
    return batch["id"][batch["valid_mask"]].tolist()


@pytest.fixture(scope="module")
def jobs(tmp_path_factory):
    """What every host of each job returned."""
    directory = str(tmp_path_factory.mktemp("checkpoints"))
    return [
        rehearse.run(
            run_job, job, directory, hosts=hosts, devices_per_host=devices_per_host, timeout_s=120
        )
        for job, (hosts, devices_per_host, _) in enumerate(JOBS)
    ]


def of_feeds(first, last):
    return f"feeds-{first:05d}-{last:05d}-of-00012.json"


def test_each_host_opens_the_files_of_its_own_feeds_and_no_others(jobs):
    opened = [[opened for _, opened in of_hosts] for of_hosts in jobs]
    quarters = [of_feeds(first, first + 2) for first in (0, 3, 6, 9)]
    halves = [of_feeds(0, 5), of_feeds(6, 11)]
    assert [of_host["written"] for of_host in opened[0]] == [[name] for name in quarters]
    assert [of_host["read"] for of_host in opened[1]] == [quarters[:2], quarters[2:]]
    assert [of_host["written"] for of_host in opened[1]] == [[name] for name in halves]
    assert [of_host["read"] for of_host in opened[2]] == [halves[:1], halves, halves[1:]]


def test_every_row_comes_once_and_in_order(jobs):
    batches = [batch for of_hosts in jobs for batch in of_hosts[0][0]]
    for of_hosts in jobs:
        assert all(rows == of_hosts[0][0] for rows, _ in of_hosts)
    assert batches == [
        [100 * feed + row for feed in range(NUM_FEEDS) for row in (first, first + 1)]
        for first in range(0, NUM_ROWS, 2)
    ]
