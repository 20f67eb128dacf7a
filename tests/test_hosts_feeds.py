"""Feeds on 1, 2 and 4 hosts: the same global batches, from filtered, mixed and packed real text.

And runs in which a feed fails or has nothing to give. A run that goes on with other hosts, in the
middle of packing: test_hosts_elastic.py.

The functions named ``case_...`` run on two hosts, one after the other in one set of processes.
"""

import hashlib
import json

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import rehearse
from tests import text
from tests.on_hosts import (
    assembled_batches,
    cases_of,
    data_mesh,
    own_parts,
    run_cases,
    whole,
)
from tests.pipelines import IN_TURN

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
    "model over hosts, read on each": {**MODEL, "second_axis_over_hosts": True, "read": "needed"},
    "model over hosts, read once": {**MODEL, "second_axis_over_hosts": True, "read": "once"},
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
        own_parts_on_all_meshes, hosts=hosts, devices_per_host=NUM_DEVICES // hosts, timeout_s=240
    )
    for name, mesh in MESHES.items():
        batches = assembled_batches([found[name] for found in of_hosts])
        assert [digest(batch) for batch in batches] == expected[mesh.get("num_feeds", 8)], name
    assert len(expected[8]) > 30


# Two hosts: what can go wrong.


def numbers(feed, lengths=(30,) * 8):
    """Rows that say their feed and their place in it; 100 * feed + place."""
    first = 100 * feed.shard_index
    # A source, unlike MapDataset.range, has contents, which the hosts compare.
    records = grain.MapDataset.source(range(first, first + 30)).map(lambda i: {"id": np.int32(i)})
    rows = records.to_iter_dataset(IN_TURN)
    return rows.filter(lambda row: row["id"] < first + lengths[feed.shard_index])


def on_two_hosts(make_feed, **options):
    ds = grain_shard.feeds(make_feed, num_feeds=4).batch(8)
    return ds.shard_to(data_mesh(), timeout_s=20, **options)


def of_lengths(lengths, **options):
    return on_two_hosts(lambda feed: numbers(feed, lengths), **options)


def outcome(ds, state=None):
    """The valid ids of each global batch; the error that ended it, if one did."""
    result = {"batches": [], "states": [], "error": None}
    with iter(ds) as batches:
        if state is not None:
            batches.set_state(state)
        try:
            for batch in batches:
                batch = whole(batch)
                result["batches"].append(batch["id"][batch["valid_mask"]].tolist())
                result["states"].append(json.loads(json.dumps(batches.get_state())))
        except Exception as error:
            result["error"] = type(error).__name__, str(error), getattr(error, "__notes__", [])
            failure = error
        if result["error"]:
            with pytest.raises(type(failure)) as again:
                next(batches)
            assert again.value is failure
    return result


UNEVEN = [[0, 1, 100, 101, 300], [2, 102, 103], [104]]
# By name: the rows of each feed, of which 0 and 1 are host 0's; the remainder; the batches.
ENDS = {
    "each feed goes on to its own end": ([3, 5, 0, 1], "pad", UNEVEN),
    "a host without a row": ([0, 0, 3, 2], "pad", [[200, 201, 300, 301], [202]]),
    "no row at all": ([0, 0, 0, 0], "pad", []),
    "all stop at the first feed that lacks rows": (
        [6, 6, 6, 5],
        "drop",
        [[0, 1, 100, 101, 200, 201, 300, 301], [2, 3, 102, 103, 202, 203, 302, 303]],
    ),
}


def case_ends():
    return {
        name: outcome(of_lengths(lengths, remainder=remainder))
        for name, (lengths, remainder, _) in ENDS.items()
    }


def case_uneven_states():
    """The batches after each state of this host."""
    ds = of_lengths([3, 5, 0, 1])
    states = outcome(ds)["states"]
    return [outcome(ds, state)["batches"] for state in states], states


def case_error():
    return outcome(of_lengths([6, 6, 6, 5], remainder="error"))


def case_error_of_a_whole_host():
    return outcome(of_lengths([6, 6, 4, 4], remainder="error"))


def raising(feed):
    def check(row):
        if row["id"] == 304:
            raise ValueError("a bad row")
        return row

    return numbers(feed).map(check)


def case_a_feed_raises():
    return outcome(on_two_hosts(raising))


def not_made(feed):
    if feed.shard_index == 2:
        raise FileNotFoundError("no such shard")
    return numbers(feed)


def case_a_feed_cannot_be_made():
    return outcome(on_two_hosts(not_made))


def case_a_feed_depends_on_its_host():
    """A model axis over the hosts: both run all feeds, and must get the same."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, -1), ("model", "data"))
    host = np.int32(jax.process_index())
    ds = grain_shard.feeds(
        lambda feed: numbers(feed).map(lambda row: {"id": row["id"] + host}), num_feeds=4
    )
    return outcome(ds.batch(8).shard_to(mesh, read="needed", timeout_s=20))


@pytest.fixture(scope="module")
def cases():
    functions = cases_of(globals())
    of_hosts = rehearse.run(run_cases, functions, hosts=2, devices_per_host=2, timeout_s=240)

    def results_of(case):
        results = [of_host[case.__name__] for of_host in of_hosts]
        assert not any("Traceback" in str(result) for result in results), results
        return results

    return results_of


@pytest.mark.parametrize("name", ENDS)
def test_the_hosts_stop_together(cases, name):
    for results in cases(case_ends):
        assert results[name]["batches"] == ENDS[name][2]
        assert results[name]["error"] is None


def test_a_hosts_own_state_goes_on_also_where_its_feeds_have_ended(cases):
    for host, (continuations, states) in enumerate(cases(case_uneven_states)):
        assert continuations == [UNEVEN[1:], UNEVEN[2:], []]
        assert [state["step"] for state in states] == [1, 2, 3]
        assert list(states[0]["feeds"]) == [["0", "1"], ["2", "3"]][host]


def test_with_error_a_feed_that_lacks_rows_is_named_on_every_host(cases):
    other, own = (result["error"] for result in cases(case_error))
    assert own[0] == "ShardingError"
    assert other[0] == "AgreementError"
    for kind, message, _ in (other, own):
        assert (
            "feed 3 has only 1 rows left for the last batch, which takes 2 rows of each feed"
            in message
        ), kind


def test_with_error_a_host_may_not_end_before_another(cases):
    for result in cases(case_error_of_a_whole_host):
        assert len(result["batches"]) == 2
        assert "(the first: host 1) end earlier than the streams of" in result["error"][1]


@pytest.mark.parametrize(
    ("case", "kind", "text", "feed", "batches"),
    [
        (case_a_feed_raises, "ValueError", "a bad row", 3, 2),
        (case_a_feed_cannot_be_made, "FileNotFoundError", "no such shard", 2, 0),
    ],
)
def test_a_feed_that_fails_is_named_on_every_host(cases, case, kind, text, feed, batches):
    other, own = cases(case)
    assert len(other["batches"]) == len(own["batches"]) == batches
    assert own["error"][:2] == (kind, text)
    assert f"grain_shard: in feed {feed} of 4" in own["error"][2]
    assert other["error"][0] == "AgreementError"
    assert f"host 1: {kind}: {text} (in feed {feed} of 4)" in other["error"][1]


def test_a_feed_that_is_another_one_on_another_host_is_an_error_on_every_host(cases):
    for result in cases(case_a_feed_depends_on_its_host):
        assert result["batches"] == []
        assert "hosts 0, 1 run the same feeds, but get different rows" in result["error"][1]
