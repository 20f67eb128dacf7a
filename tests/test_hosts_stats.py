"""Each host says, by itself, that its training loop waits for its own data, and for which stage.

Two processes, of which one takes long to read. The other one waits for it in each step, and in the
votes of streams and feeds, which is no wait for data.
"""

import itertools
import time

import grain
import jax
import numpy as np
import pytest
from absl import logging

import grain_shard
from grain_shard import rehearse
from grain_shard.stats import meter
from tests.on_hosts import part_of
from tests.pipelines import IN_TURN, shared_out

pytestmark = [pytest.mark.slow, pytest.mark.long]

HOSTS, SLOW = 2, 1
READ_S = 50e-3  # of a record of the slow host
KINDS = ["random access", "stream", "feeds"]


def load(record):
    time.sleep(READ_S * (jax.process_index() == SLOW))
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
    """Of each kind of pipeline, the statistics of the loop, and what the log says of its waits."""
    meter.RECENT_S, meter._KEEP_S = 1.0, 0.1
    lines = []
    logging.get_absl_logger().addFilter(lambda line: lines.append(line.getMessage()) or True)
    mesh = jax.make_mesh((HOSTS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.jit(lambda batch: batch["x"].sum())
    found = {}
    for kind in kinds:
        lines.clear()
        with iter(pipeline(kind, mesh)) as batches:
            for batch in itertools.islice(batches, 40):
                float(step(batch))
            recent = batches.stats().recent
        logged = [line for line in lines if "waited for this host's data" in line]
        found[kind] = (recent.wait_share, recent.busiest, logged)
    return found


@pytest.fixture(scope="module")
def of_hosts():
    return rehearse.run(what_each_says, KINDS, hosts=HOSTS, timeout_s=300)


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_that_waits_for_its_data_says_so_with_the_stage(of_hosts, kind):
    share, stage, logged = of_hosts[SLOW][kind]
    assert (share > 0.1, stage) == (True, "read")
    # A busy machine takes longer for the batches, and may come to a second line; that a minute has
    # one line at most is tested with a clock of the test's own, in test_stats.py.
    assert logged
    assert logged[0].startswith(f"grain_shard: the training loop of host {SLOW} waited for this")
    assert "s, mostly for 'read'.\n" in logged[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_that_waits_for_another_one_does_not(of_hosts, kind):
    share, _, logged = of_hosts[1 - SLOW][kind]
    assert (share < 0.1, logged) == (True, [])
