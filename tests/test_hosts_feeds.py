"""Feeds on 1, 2 and 4 hosts: the same global batches, from filtered, mixed and packed real text.

Also when the run goes from 4 hosts to 2, to 1, and to 4 again, in the middle of the epoch and of
packing; and what becomes of a run in which a feed fails, is slow, or has nothing to give.
"""

import hashlib

import grain
import jax
import numpy as np
import pytest
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import rehearse
from tests import text

pytestmark = pytest.mark.slow

NUM_FEEDS, GLOBAL_BATCH_SIZE, NUM_DEVICES = 8, 16, 8
# (shape, axes, whether the second axis is the one that spans hosts, spec)
MESHES = {
    "data": ((8,), ("data",), False, P("data")),
    "data, model": ((4, 2), ("data", "model"), False, P("data")),
    "model over hosts": ((4, 2), ("data", "model"), True, P("data")),
    "data, seq": ((2, 4), ("data", "seq"), False, P("data", "seq")),
    "seq over hosts": ((4, 2), ("data", "seq"), True, P("data", "seq")),
    "half a feed a shard": ((8,), ("data",), False, P("data")),  # with half the feeds
}


def num_feeds(name):
    return 4 if name == "half a feed a shard" else NUM_FEEDS


def batches_of_text(name, num_packing_bins=6):
    return grain_shard.feeds(text.packed, num_feeds=num_feeds(name)).batch(GLOBAL_BATCH_SIZE)


def sharded(name, **options):
    shape, axes, second_spans_hosts, spec = MESHES[name]
    devices = np.array(jax.devices())
    devices = devices.reshape(shape[::-1]).T if second_spans_hosts else devices.reshape(shape)
    mesh = Mesh(devices, axes)
    return batches_of_text(name).shard_to(mesh, spec, timeout_s=60, **options)


# On the hosts.


def whole(batch):
    """The global batch as numpy arrays, the same on every host."""
    return {name: multihost_utils.process_allgather(x, tiled=True) for name, x in batch.items()}


def digest(batch):
    leaves = [(name, str(batch[name].dtype), batch[name].tobytes()) for name in sorted(batch)]
    return hashlib.sha256(repr(leaves).encode()).hexdigest()[:16]


def digests(cases):
    """The digests of all global batches of every case: (mesh, read)."""
    found = {}
    for name, read in cases:
        with iter(sharded(name, read=read)) as batches:
            found[name, read] = [digest(whole(batch)) for batch in batches]
    return found


# The expectation: plain Grain, feed by feed, in one process.


def expected_batches(name):
    """The global batches with their masks, by the definition of feeds."""
    feed_batch_size = GLOBAL_BATCH_SIZE // num_feeds(name)
    of_feeds = [
        list(text.packed(grain.sharding.ShardOptions(feed, num_feeds(name))))
        for feed in range(num_feeds(name))
    ]
    zeros = {name: np.zeros_like(leaf) for name, leaf in of_feeds[0][0].items()}
    num_batches = max(-(-len(rows) // feed_batch_size) for rows in of_feeds)
    for batch in range(num_batches):
        rows, valid = [], []
        for of_feed in of_feeds:
            own = of_feed[batch * feed_batch_size : (batch + 1) * feed_batch_size]
            missing = feed_batch_size - len(own)
            rows += own + [zeros] * missing
            valid += [True] * len(own) + [False] * missing
        stacked = {name: np.stack([row[name] for row in rows]) for name in zeros}
        yield {**stacked, "valid_mask": np.array(valid)}


@pytest.fixture(scope="module")
def expected():
    return {name: [digest(batch) for batch in expected_batches(name)] for name in MESHES}


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_global_batches_are_the_same_on_any_hosts_and_mesh(hosts, expected):
    cases = [(name, read) for name in MESHES for read in ("needed", "auto")]
    of_hosts = rehearse.run(
        digests, cases, hosts=hosts, devices_per_host=NUM_DEVICES // hosts, timeout_s=240
    )
    for found in of_hosts:
        for name, read in cases:
            assert found[name, read] == expected[name], (name, read)
    assert len(expected["data"]) > 50
