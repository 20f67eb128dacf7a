"""The package starts the threads in the table of grain_shard/README.md, and no others."""

import re
import threading
from pathlib import Path
from unittest import mock

import grain
import jax
import numpy as np
import pytest

import grain_shard
from grain_shard import rehearse
from tests.conftest import HOSTS_S, data_mesh, numbered
from tests.pipelines import shared_out

PAGE = Path(grain_shard.__file__).with_name("README.md").read_text()
IN_THE_TABLE = set(re.findall(r"^\| `([\w-]+)` \|", PAGE, re.MULTILINE))
READER, OF_FEEDS, PLACER = "grain-shard-host", "grain-shard-feeds", "grain-shard-device"
LISTENER, VOTER = "grain-shard-alarm", "grain-shard-agreement"


def record(i):
    return {"id": np.int32(i)}


def records():
    return grain.MapDataset.range(64).map(record)


KINDS = {
    "random access": lambda: numbered(64, 8),
    "stream": lambda: records().to_iter_dataset().batch(8),
    "feeds": lambda: shared_out(records(), 4, 8, grain.ReadOptions()),
}
ON_ONE_HOST = {
    "random access": {READER, PLACER},
    "stream": {READER, PLACER},
    "feeds": {READER, PLACER},
}
ON_TWO_HOSTS = {
    "random access": {READER, PLACER, LISTENER},
    "stream": {READER, PLACER, LISTENER, VOTER},
    "feeds": {READER, PLACER, LISTENER, VOTER},
}


def started(mesh):
    """Returns the names of the threads that a loop over each kind starts, without their numbers."""
    found = {}
    for kind, make in KINDS.items():
        names, start = set(), threading.Thread.start

        def noted(thread, names=names, start=start):
            names.add(re.sub(r"[-_]\d+$", "", thread.name))
            start(thread)

        rows = "global" if kind == "stream" else None
        ds = make().shard_to(mesh, rows=rows)
        with mock.patch.object(threading.Thread, "start", noted), iter(ds) as batches:
            states = [batches.get_state() for _ in batches]
            batches.set_state(states[0])
            next(batches)
        found[kind] = {name for name in names if name.startswith(("grain-shard", "array-record"))}
    return found


def test_a_run_on_one_host_starts_readers_and_a_placer():
    assert started(data_mesh(8)) == ON_ONE_HOST


@pytest.mark.parametrize("kind", KINDS)
def test_one_thread_places(kind):
    others = set(threading.enumerate())
    with iter(KINDS[kind]().shard_to(data_mesh(8))) as batches:
        next(batches)
        names = [t.name for t in set(threading.enumerate()) - others]
    assert names.count(f"{PLACER}-0") == len([n for n in names if n.startswith(PLACER)]) == 1
    assert kind != "stream" or len([n for n in names if n.startswith(READER)]) == 1


def on_hosts():
    """On a host: what `started` returns, where the listener starts with the first iterator."""
    found = started(jax.make_mesh((4,), ("data",)))
    of_process = set().union(*found.values()) & {LISTENER}
    listeners = [t for t in threading.enumerate() if t.name == LISTENER]
    return {kind: names | of_process for kind, names in found.items()}, len(listeners)


@pytest.mark.slow
def test_several_hosts_also_start_a_listener_each_and_streams_a_voter():
    for found, listeners in rehearse.run(on_hosts, hosts=2, devices_per_host=2, timeout_s=HOSTS_S):
        assert found == ON_TWO_HOSTS
        assert listeners == 1


def test_the_table_has_all_of_them():
    named = {READER, OF_FEEDS, PLACER, LISTENER, VOTER, "grain-shard-parent", "array-record-files"}
    assert named == IN_THE_TABLE
    sources = [path.read_text() for path in Path(grain_shard.__file__).parent.rglob("*.py")]
    in_code = {name for text in sources for name in re.findall(r'"(grain-shard-[\w-]+)"', text)}
    assert in_code - {"grain-shard-check"} == IN_THE_TABLE - {"array-record-files"}
