"""Checkpoints by Orbax of streams, which have a state of their own on each host.

By its CheckpointManager and by its v1 API. Of random access and feeds: test_hosts_elastic.py.
"""

import os
import shutil
import sys
import threading
from pathlib import Path

import grain
import numpy as np
import pytest

import grain_shard
from grain_shard import rehearse
from tests.on_hosts import APIS, data_mesh, part_of, restore, save, whole

pytestmark = [pytest.mark.slow, pytest.mark.long]

# On the hosts.


def valid_ids(batch):
    """The ids of the valid rows of the global batch."""
    batch = whole(batch)
    return batch["id"][batch["valid_mask"]].tolist()


def stream():
    mesh = data_mesh()
    records = grain.MapDataset.range(40)[part_of(grain_shard.ShardByMesh(mesh))]
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
        uninterrupted = [valid_ids(batch) for batch in iterator]
    with stream() as iterator:
        restore(api, directory, 0, iterator)
        return uninterrupted, [valid_ids(batch) for batch in iterator]


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
