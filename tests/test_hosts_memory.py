"""On real processes: how many batches are on a host while its loop stands still (C9).

As the hosts have to agree on the end of streams and feeds, batches wait for their votes, too. Of
one host, and of random access, see `TestMemory` in test_lifecycle.py; of worker processes,
test_workers.py and test_feed_workers.py.
"""

import threading
import weakref

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import grain_shard
from grain_shard import rehearse
from grain_shard.iteration import host_batches
from tests.conftest import HANG_S, eventually

pytestmark = pytest.mark.slow

KINDS = ("stream", "feeds")
BUFFERS = [(1, 1), (4, 2)]  # on the host, on the devices
STEPS = 8


def pipeline(kind, cpu_buffer_size, device_buffer_size):
    mesh = Mesh(np.array(jax.devices()), ("data",))
    options = {
        "cpu_buffer_size": cpu_buffer_size,
        "device_buffer_size": device_buffer_size,
        "timeout_s": HANG_S,
    }

    def numbers(part):
        rows = grain.MapDataset.range(400)[part.shard_index :: part.shard_count]
        return rows.map(lambda i: {"x": np.full(100, i)}).to_iter_dataset()

    if kind == "feeds":
        return grain_shard.feeds(numbers, num_feeds=4).batch(8).shard_to(mesh, **options)
    own = grain_shard.ShardByMesh(mesh)
    batches = numbers(own).batch(8 // own.shard_count)
    return batches.shard_to(mesh, rows="local", **options)


def held(kind, buffers):
    """After each batch, how many more were made, and how many of these are here."""
    here, came = [], threading.Condition()
    unwatched = host_batches._WithPositions.__next__

    def watched(self):
        batch, position = unwatched(self)
        with came:
            here.append(weakref.ref(batch["x"]))
            came.notify_all()
        return batch, position

    def alive():
        return sum(batch() is not None for batch in here)

    host_batches._WithPositions.__next__ = watched
    found = []
    try:
        with iter(pipeline(kind, *buffers)) as batches:
            for step in range(1, STEPS + 1):
                next(batches)
                with came:
                    assert came.wait_for(lambda: len(here) >= step + sum(buffers), HANG_S), "hangs"
                eventually(lambda: alive() <= buffers[0] + 1)
                found.append((len(here) - step, alive()))
    finally:
        host_batches._WithPositions.__next__ = unwatched
    return found


def held_of_all():
    return {(kind, buffers): held(kind, buffers) for kind in KINDS for buffers in BUFFERS}


@pytest.fixture(scope="module")
def of_hosts():
    return rehearse.run(held_of_all, hosts=2, devices_per_host=2, timeout_s=150)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("buffers", BUFFERS)
def test_batches_are_made_as_far_ahead_as_the_buffers_go_and_one_more_is_on_its_way(
    of_hosts, kind, buffers
):
    on_host, on_devices = buffers
    for of_host in of_hosts:
        found = of_host[kind, buffers]
        assert {ahead for ahead, _ in found} == {on_host + on_devices}
        assert {alive for _, alive in found} <= {on_host, on_host + 1}
