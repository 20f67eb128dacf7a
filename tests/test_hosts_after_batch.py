"""What `test_after_batch.py` says of one host, on several: the same errors, the same shapes."""

import functools

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import rehearse

pytestmark = pytest.mark.slow

NUM_DEVICES = 8


def look():
    """On each host: what is refused, and by `read` the shapes and the rows of an epoch."""
    data = Mesh(np.array(jax.devices()), ("data",))
    model_over_hosts = Mesh(np.array(jax.devices()).reshape(2, 4), ("model", "data"))
    records = grain.MapDataset.range(44).map(lambda i: {"id": np.int32(i)})

    def make_feed(feed):
        part = slice(feed.shard_index, None, feed.shard_count)
        return records[part].to_iter_dataset(grain.ReadOptions(0, 0))

    feeds = grain_shard.feeds(make_feed, num_feeds=4).batch(16)
    pad = functools.partial(grain.experimental.batch_and_pad, batch_size=16)
    refused = {
        "a map after feeds": lambda: feeds.map(dict).shard_to(data),
        "a map after feeds, rows": lambda: feeds.map(dict).shard_to(data, rows="global"),
        "Grain's padding": lambda: records.batch(16, batch_fn=pad).shard_to(data),
        "once": lambda: records.batch(12).shard_to(model_over_hosts, P("data"), read="once"),
    }
    seen = {}
    for size in (12, 16):
        for read in ("auto", "needed", "once"):
            if (size, read) != (12, "once"):
                ds = records.batch(size).shard_to(model_over_hosts, P("data"), read=read)
                batches = [jax.block_until_ready(batch) for batch in ds]
                seen[size, read] = [(b["id"].shape, str(b["id"].sharding.spec)) for b in batches]
    return {name: refusal(build) for name, build in refused.items()}, seen


def refusal(build):
    try:
        build()
    except grain_shard.ShardingError as error:
        return error.problem
    return None


@pytest.fixture(scope="module", params=[1, 2, 4])
def results(request):
    hosts = request.param
    return rehearse.run(look, hosts=hosts, devices_per_host=NUM_DEVICES // hosts, timeout_s=120)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("a map after feeds", "follows the .batch of feeds"),
        ("a map after feeds, rows", "follows the .batch of feeds"),
        ("Grain's padding", "batch_fn pads the last batch"),
        ("once", "12 rows do not split into 8 shards"),
    ],
)
def test_what_is_refused_is_refused_on_every_host(results, name, problem):
    for refused, _ in results:
        assert problem in refused[name]


def test_read_changes_no_shape(results):
    for _, seen in results:
        assert seen == {
            **dict.fromkeys([(12, "auto"), (12, "needed")], [((12,), "P('data',)")] * 4),
            **dict.fromkeys(
                [(16, r) for r in ("auto", "needed", "once")], [((16,), "P('data',)")] * 3
            ),
        }
