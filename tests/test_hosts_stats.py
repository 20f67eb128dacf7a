"""On several hosts, each one's `stats()` names the host that holds the others up, and the stage.

Four processes, of which one is three times slower in its reads: so slow that no step could hide it
on any machine, while that of the others is hidden by the steps, for which all wait.
"""

import itertools
import re
import time

import grain
import jax
import numpy as np
import pytest
from absl import logging

import grain_shard
from grain_shard import rehearse
from grain_shard.hosts import alarm
from tests.conftest import eventually
from tests.on_hosts import part_of
from tests.pipelines import IN_TURN, shared_out

pytestmark = [pytest.mark.slow, pytest.mark.long]

HOSTS, SLOW = 4, 2
READ_S = 20e-3  # of a record; of the slow host, three times that
TURN_S = 0.3  # in place of ten seconds
# So many that the hosts have compared themselves three times more; and when to give up.
STEPS_FOUND, MOST_STEPS = 50, 600


def load(record):
    time.sleep((3 if jax.process_index() == SLOW else 1) * READ_S)
    return {"x": np.full(4, record, np.float32)}


def pipeline(kind, mesh):
    """A batch has a row for each host, so that a host reads one record for each."""
    records = grain.MapDataset.range(10**6).map(load)
    if kind == "random access":
        return records.batch(HOSTS).shard_to(mesh, num_threads=1)
    if kind == "stream":
        stream = records[part_of(grain_shard.ShardByMesh(mesh))].to_iter_dataset(IN_TURN)
        return stream.batch(1).shard_to(mesh, rows="local")
    return shared_out(records, HOSTS, HOSTS).shard_to(mesh)


def what_each_says(kinds):
    """Of each kind of pipeline, what the stats say, in figures and words, and what the log says."""
    alarm.TURN_S = TURN_S
    lines = []
    logging.get_absl_logger().addFilter(lambda line: lines.append(line.getMessage()) or True)
    mesh = jax.make_mesh((HOSTS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    # The loop ends once all hosts have learned it, and have had time to say it twice.
    least = jax.jit(lambda batch, learned: batch["x"].sum() * 0 + learned.min())
    found = {}
    for kind in kinds:
        lines.clear()
        times_found = 0
        with iter(pipeline(kind, mesh)) as batches:
            for batch in itertools.islice(batches, MOST_STEPS):
                host = batches.stats().slowest_host
                times_found += host is not None and host.holds_others_up
                enough = np.full(1, times_found > STEPS_FOUND, np.float32)
                learned = jax.make_array_from_process_local_data(sharding, enough, (HOSTS,))
                if float(least(batch, learned)):
                    break
            stats = batches.stats()
        logged = [line for line in lines if "holds the other hosts up" in line]
        found[kind] = (stats.slowest_host, str(stats), logged)
    return found


KINDS = ["random access", "stream", "feeds"]


@pytest.fixture(scope="module")
def of_hosts():
    return rehearse.run(what_each_says, KINDS, hosts=HOSTS, timeout_s=300)


@pytest.mark.parametrize("kind", KINDS)
def test_every_host_names_the_slow_one_and_its_stage(of_hosts, kind):
    for of_host in of_hosts:
        host, text, _ = of_host[kind]
        assert (host.host, host.stage, host.holds_others_up) == (SLOW, "read", True), text
        assert host.others_wait_s < host.behind_s
        assert f"\nhost {SLOW} holds the other hosts up by " in text
        assert ", mostly in read\n" in text


@pytest.mark.parametrize("kind", KINDS)
def test_the_log_says_it_once_on_the_first_host_and_on_the_slow_one(of_hosts, kind):
    for host, (_, _, lines) in enumerate(of_host[kind] for of_host in of_hosts):
        # A busy machine may hold up another host for a moment, which the log says, too.
        named = [int(re.search(r"host (\d+) holds", line)[1]) for line in lines]
        assert (SLOW in named) == (host in (0, SLOW))
        assert host == 0 or set(named) <= {host}
        assert not any(one == other for one, other in itertools.pairwise(named))


def leave_with_the_thread_in_the_store():
    alarm.TURN_S = 1e-3
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    records = grain.MapDataset.range(10**6).map(lambda i: {"x": np.full(4, i, np.float32)})
    batches = iter(records.batch(8).shard_to(mesh))
    leave_with_the_thread_in_the_store.batches = batches  # so that it lives as long as the process
    for _ in itertools.islice(batches, 50):
        pass
    eventually(lambda: batches.stats().slowest_host is not None)
    return "left"


def test_a_process_ends_in_good_order_whatever_the_hosts_are_telling_each_other():
    assert rehearse.run(leave_with_the_thread_in_the_store, hosts=2) == ["left"] * 2
