"""Feeds on 1, 2 and 4 hosts: the same global batches, from filtered, mixed and packed real text.

Where feeds end, and what stops them: test_hosts_streams.py. A run that goes on with other hosts, in
the middle of packing: test_hosts_elastic.py.
"""

import hashlib

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import rehearse
from tests import text
from tests.conftest import HOSTS_S
from tests.on_hosts import assembled_batches, own_parts

pytestmark = [pytest.mark.slow, pytest.mark.long]

GLOBAL_BATCH_SIZE, NUM_DEVICES = 16, 8


def sharded(shape, axes, spec, num_feeds=8, second_axis_over_hosts=False, **options):
    """The batches of text on a mesh of all devices."""
    devices = np.array(jax.devices())
    devices = devices.reshape(shape[::-1]).T if second_axis_over_hosts else devices.reshape(shape)
    ds = grain_shard.feeds(text.packed, num_feeds=num_feeds).batch(GLOBAL_BATCH_SIZE)
    return ds.shard_to(Mesh(devices, axes), spec, timeout_s=60, **options)


DATA = {"shape": (8,), "axes": ("data",), "spec": P("data")}
MODEL = {"shape": (4, 2), "axes": ("data", "model"), "spec": P("data")}
SEQ = {"shape": (4, 2), "axes": ("data", "seq"), "spec": P("data", "seq")}
MESHES = {
    "data": DATA,
    "half a feed a shard": {**DATA, "num_feeds": 4},
    "data, model": MODEL,
    "model over hosts": {**MODEL, "second_axis_over_hosts": True},
    "data, seq": SEQ,
    "seq over hosts": {**SEQ, "second_axis_over_hosts": True},
}


# On the hosts.


def own_parts_on_all_meshes():
    found = {}
    for name, mesh in MESHES.items():
        with iter(sharded(**mesh)) as batches:
            found[name] = [own_parts(batch) for batch in batches]
    return found


# In the test's process.


def digest(batch):
    leaves = [(name, str(batch[name].dtype), batch[name].tobytes()) for name in sorted(batch)]
    return hashlib.sha256(repr(leaves).encode()).hexdigest()[:16]


# The expectation: plain Grain, feed by feed, in one process.


def expected_batches(num_feeds):
    """The global batches with their masks, by the definition of feeds."""
    feed_batch_size = GLOBAL_BATCH_SIZE // num_feeds
    of_feeds = [
        list(text.packed(grain.sharding.ShardOptions(feed, num_feeds))) for feed in range(num_feeds)
    ]
    zeros = {name: np.zeros_like(leaf) for name, leaf in of_feeds[0][0].items()}
    for batch in range(max(-(-len(rows) // feed_batch_size) for rows in of_feeds)):
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
    return {n: [digest(batch) for batch in expected_batches(n)] for n in (4, 8)}


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_global_batches_are_the_same_on_any_hosts_and_mesh(hosts, expected):
    of_hosts = rehearse.run(
        own_parts_on_all_meshes,
        hosts=hosts,
        devices_per_host=NUM_DEVICES // hosts,
        timeout_s=HOSTS_S,
    )
    for name, mesh in MESHES.items():
        batches = assembled_batches([found[name] for found in of_hosts])
        assert [digest(batch) for batch in batches] == expected[mesh.get("num_feeds", 8)], name
    assert len(expected[8]) > 30
