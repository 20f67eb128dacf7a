"""Each host says, by itself, that its training loop waits for its own data, and for which stage.

Two processes, of which one takes long to read. The other one waits for it in each step, and in the
votes of streams and feeds, which is no wait for data. Each has a clock that stands still, but for a
second in each step, in each wait for a vote, and in each read of the slow host.
"""

import contextlib
import math
import threading
import time
from unittest import mock

import grain
import jax
import numpy as np
import pytest
from absl import logging

import grain_shard
from grain_shard import rehearse
from grain_shard.hosts import ends
from grain_shard.spans import AGREE, span
from grain_shard.stats.meter import Meter
from tests.conftest import HOSTS_S, eventually
from tests.on_hosts import part_of
from tests.pipelines import IN_TURN, shared_out

pytestmark = [pytest.mark.slow, pytest.mark.long]

HOSTS, SLOW = 2, 1
BATCHES = 100
KINDS = ["random access", "stream", "feeds"]


class Clock:
    """The clock of a host. A read takes a second only while the loop waits for its batch."""

    def __init__(self):
        self.now, self.num_asked, self.asks, self.read = 0.0, 0, False, set()

    def __call__(self):
        """The time for a meter, which asks when the loop's wait begins."""
        now = self.now
        if self.asks and threading.current_thread() is threading.main_thread():
            self.asks, self.num_asked = False, self.num_asked + 1
        return now

    def load(self, record):
        batch = record // HOSTS
        # A few records are read again, or are of no batch, for comparisons.
        if jax.process_index() == SLOW and batch <= BATCHES and record not in self.read:
            eventually(lambda: self.num_asked > batch)
            self.read.add(record)
            self.now += 1
        return {"x": np.full(4, record, np.float32)}

    @contextlib.contextmanager
    def vote(self, stage):
        """A span that lasts a second if it is a wait for a vote."""
        with span(stage):
            yield
            self.now += stage == AGREE


def pipeline(kind, mesh, load):
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
    lines = []
    logging.get_absl_logger().addFilter(lambda line: lines.append(line.getMessage()) or True)
    mesh = jax.make_mesh((HOSTS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    step = jax.jit(lambda batch: batch["x"].sum())
    found = {}
    for kind in kinds:
        lines.clear()
        clock = Clock()
        with (
            mock.patch.dict(Meter.__init__.__kwdefaults__, clock=clock),
            mock.patch.object(time, "perf_counter", lambda clock=clock: clock.now),
            mock.patch.object(ends, "span", clock.vote),
            iter(pipeline(kind, mesh, clock.load)) as batches,
        ):
            for _ in range(BATCHES):
                clock.asks = True
                float(step(next(batches)))
                clock.now += 1
            recent = batches.stats().recent
            clock.num_asked = math.inf
        logged = [line for line in lines if "waited for this host's data" in line]
        found[kind] = (recent.wait_share, recent.busiest, logged)
    return found


@pytest.fixture(scope="module")
def of_hosts():
    return rehearse.run(what_each_says, KINDS, hosts=HOSTS, timeout_s=HOSTS_S)


@pytest.mark.parametrize("kind", KINDS)
def test_the_host_that_waits_for_its_data_says_so_with_the_stage(of_hosts, kind):
    share, stage, logged = of_hosts[SLOW][kind]
    assert (share > 0.1, stage) == (True, "read")
    # That a minute has one line at most is tested in test_stats.py.
    assert logged
    assert logged[0].startswith(f"grain_shard: the training loop of host {SLOW} waited for this")
    assert "s, mostly for 'read'.\n" in logged[0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_that_waits_for_another_one_does_not(of_hosts, kind):
    share, _, logged = of_hosts[1 - SLOW][kind]
    assert (share, logged) == (0, [])
