"""Microbatches on 1, 2 and 4 hosts: the same batch, reshaped, of which a host reads its own rows.

Every case runs twice in real processes, on 8 devices: with microbatches and without.
"""

import json

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import rehearse
from tests.on_hosts import assembled, data_mesh, model_over_hosts, or_traceback, own_parts
from tests.pipelines import IN_TURN, shared_out

pytestmark = [pytest.mark.slow, pytest.mark.long]

HOSTS = (1, 2, 4)
NUM_DEVICES = 8
MICROBATCHES = 2
NUM_RECORDS, GLOBAL_BATCH_SIZE = 44, 16


# On the hosts.


def permuted():
    return Mesh(np.array(jax.devices())[[7, 0, 5, 2, 3, 4, 1, 6]], ("data",))


def records(read, part=slice(None)):
    def record(i):
        read.append(i)
        return {"id": np.int32(i), "x": np.arange(4, dtype=np.float32) + i}

    return grain.MapDataset.range(NUM_RECORDS)[part].map(record)


def random_access(mesh, read):
    return records(read).batch(GLOBAL_BATCH_SIZE)


def stream(mesh, read, part=slice(None), hosts=1):
    return records(read, part).to_iter_dataset(IN_TURN).batch(GLOBAL_BATCH_SIZE // hosts)


def part_of_a_stream(mesh, read):
    options = grain_shard.ShardByMesh(mesh)
    part = slice(options.shard_index, None, options.shard_count)
    return stream(mesh, read, part, options.shard_count)


def feeds(mesh, read):
    return shared_out(records(read), 8, GLOBAL_BATCH_SIZE)


CASES = {
    "random access": (random_access, data_mesh, {}),
    "random access, permuted": (random_access, permuted, {}),
    "random access, model over hosts": (random_access, model_over_hosts, {"read": "needed"}),
    "random access, once": (random_access, model_over_hosts, {"read": "once"}),
    "stream": (stream, data_mesh, {"rows": "global"}),
    "stream, model over hosts": (stream, model_over_hosts, {"rows": "global"}),
    "local stream": (part_of_a_stream, data_mesh, {"rows": "local"}),
    "feeds": (feeds, data_mesh, {}),
    "feeds, model over hosts": (feeds, model_over_hosts, {"read": "needed"}),
    "feeds, once": (feeds, model_over_hosts, {"read": "once"}),
}
SPEC = {"id": P("data"), "x": P("data")}


def run_cases():
    """What this host got in each case; the traceback of one that failed."""
    return {name: or_traceback(run_case, *case) for name, case in CASES.items()}


def run_case(build, mesh, options):
    found = {}
    for microbatches in (None, MICROBATCHES):
        read = []
        ds = build(mesh(), read).shard_to(
            mesh(), SPEC, microbatches=microbatches, timeout_s=20, **options
        )
        read.clear()  # what was looked at when the pipeline was built
        with iter(ds) as batches:
            parts, states = [], []
            for batch in batches:
                parts.append(own_parts(batch))
                states.append(json.dumps(batches.get_state()))
        found[microbatches] = {"batches": parts, "read": sorted(read), "states": states}
    return found


# In the test's process.


@pytest.fixture(scope="module", params=HOSTS)
def runs(request):
    """The number of hosts, and what each of them returned."""
    hosts = request.param
    devices = NUM_DEVICES // hosts
    return hosts, rehearse.run(run_cases, hosts=hosts, devices_per_host=devices, timeout_s=120)


def batches_of(results, name, microbatches):
    of_hosts = (result[name][microbatches]["batches"] for result in results)
    return [assembled(parts) for parts in zip(*of_hosts, strict=True)]


@pytest.mark.parametrize("name", CASES)
def test_it_is_the_same_batch_reshaped(runs, name):
    hosts, results = runs
    assert [result[name] for result in results if isinstance(result[name], str)] == []
    found = batches_of(results, name, MICROBATCHES)
    expected = batches_of(results, name, None)
    assert len(found) == len(expected) == 3
    # Of a stream that yields each host's own rows, these are reshaped.
    groups = hosts if name == "local stream" else 1
    for batch, whole in zip(found, expected, strict=True):
        assert batch.keys() == whole.keys() == {"id", "x", "valid_mask"}
        for leaf, array in whole.items():
            reshaped = array.reshape(groups, MICROBATCHES, -1, *array.shape[1:]).swapaxes(0, 1)
            reshaped = reshaped.reshape(MICROBATCHES, -1, *array.shape[1:])
            np.testing.assert_array_equal(batch[leaf], reshaped)


@pytest.mark.parametrize("name", ["random access", "random access, permuted"])
def test_a_host_reads_the_rows_of_its_devices_and_no_others(runs, name):
    _, results = runs
    for result in results:
        of_host = result[name][MICROBATCHES]
        held = set()
        for batch in of_host["batches"]:
            for (_, ids), (_, mask) in zip(batch["id"][1], batch["valid_mask"][1], strict=True):
                held |= set(ids[mask].tolist())
        assert held <= set(of_host["read"]) <= held | {0}, "record 0 tells what padding looks like"


def test_read_once_each_record_is_read_on_one_host(runs):
    _, results = runs
    read = [i for result in results for i in result["random access, once"][MICROBATCHES]["read"]]
    assert set(read) == set(range(NUM_RECORDS))
    assert len(set(read) - {0}) == len([i for i in read if i])


def test_a_feed_runs_on_one_host_if_there_are_enough(runs):
    """Eight feeds: as many as microbatches times hosts."""
    _, results = runs
    read = [i for result in results for i in result["feeds"][MICROBATCHES]["read"]]
    assert sorted(read) == list(range(NUM_RECORDS))


@pytest.mark.parametrize("name", [name for name in CASES if "feeds" not in name])
def test_the_state_knows_nothing_of_microbatches(runs, name):
    _, results = runs
    for result in results:
        assert result[name][MICROBATCHES]["states"] == result[name][None]["states"]


def test_the_states_of_feeds_together_are_those_without_microbatches(runs):
    _, results = runs

    def joined(microbatches):
        states = [map(json.loads, r["feeds"][microbatches]["states"]) for r in results]
        for of_hosts in zip(*states, strict=True):
            feeds = {feed: entry for state in of_hosts for feed, entry in state["feeds"].items()}
            yield {**of_hosts[0], "feeds": feeds}

    assert list(joined(MICROBATCHES)) == list(joined(None))
