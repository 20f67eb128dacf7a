"""The files of a checkpoint of feeds: who writes which, and who reads which.

Hosts are simulated in one process here; on real ones, see test_hosts_feeds.py.
"""

import json
import os
import sys

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_shard import BatchLayout, ShardingTree, StateError
from grain_shard.hosts.feed_files import OwnFeeds
from grain_shard.hosts.state_files import read_state, write_state
from grain_shard.iteration.settings import Settings
from grain_shard.state_json import sealed
from grain_shard.streams.host_streams import HostStreams
from tests.conftest import data_mesh
from tests.pipelines import shared_out

OPENED = []  # (name, whether to read it) of each file


@pytest.fixture(scope="module", autouse=True)
def note_opening():
    def note(event, args):
        if event == "open" and isinstance(args[0], str | os.PathLike):
            OPENED.append((os.path.basename(args[0]), args[2] & os.O_ACCMODE == os.O_RDONLY))

    sys.addaudithook(note)  # for good: there is no way to take it back


def opened(call, reading):
    """The files of feeds that a call opens, and what it returns."""
    OPENED.clear()
    result = call()
    return [name for name, reads in OPENED if "feeds-" in name and reads == reading], result


def host_of(rows, layouts, host):
    settings_of_hosts = Settings(ShardingTree.of(data_mesh(1)))
    return HostStreams(rows, settings_of_hosts, saved_feeds=rows.to_save(layouts, host))


def hosts_of(ds, shards_of_hosts, divisor):
    """Every host of a mesh, from the shards that each holds."""
    layouts = {
        host: BatchLayout(divisor, tuple(shards)) for host, shards in enumerate(shards_of_hosts)
    }
    return [
        host_of(ds.host_rows.of_host(layout), layouts, host) for host, layout in layouts.items()
    ]


def even(num_hosts, num_shards):
    """Each host holds as many shards, one after the other."""
    each = num_shards // num_hosts
    return [range(each * host, each * (host + 1)) for host in range(num_hosts)]


def state_of(host, step=3, entry=lambda feed: {"state": {"next": feed}}):
    """As a host's `get_state` gives it: the feeds that it runs."""
    fields = {"kind": "feeds", "step": step, **host.fingerprint}
    return {**fields, "feeds": {str(feed): sealed(entry(feed)) for feed in host.own_feeds.run}}


def save(folder, hosts, **how):
    """The files that each host wrote."""
    return [
        opened(lambda: write_state(folder, state_of(host, **how), host.own_feeds), reading=False)[0]
        for host in hosts
    ]


def files(*ranges):
    """The names of the files that hold some feeds of eight, from the first to the last of each."""
    return [f"feeds-{first:05d}-{last:05d}-of-00008.json" for first, last in ranges]


def batches(num_feeds):
    numbers = grain.MapDataset.range(100).map(lambda i: {"x": np.int32(i)})
    return shared_out(numbers, num_feeds, 2 * num_feeds)


# Of eight feeds: the shards of each host, and the feeds of each file it writes.
FILES = {
    "shards in order": (([0, 1], [2, 3]), [files((0, 3)), files((4, 7))]),
    "a model axis over hosts: the first of those that hold the same writes": (
        ([0, 1], [0, 1], [2, 3], [2, 3]),
        [files((0, 3)), [], files((4, 7)), []],
    ),
    "shards out of order": (([0, 2], [1, 3]), [files((0, 1), (4, 5)), files((2, 3), (6, 7))]),
    "hosts that hold some shards in common": (
        ([0, 1, 2], [1, 2, 3]),
        [files((0, 5)), files((6, 7))],
    ),
}


@pytest.mark.parametrize(("shards", "expected"), FILES.values(), ids=FILES)
def test_each_feed_is_written_by_the_first_host_that_runs_it(shards, expected, tmp_path):
    assert save(tmp_path, hosts_of(batches(8), shards, divisor=4)) == expected
    written = sorted(name for of_host in expected for name in of_host)
    assert sorted(path.name for path in tmp_path.iterdir()) == written


# Hosts that save, hosts that restore, and the most files that one of these then reads.
OTHER_HOSTS = [
    *[(16, 16, 1), (256, 256, 1), (16, 256, 1), (256, 16, 16)],
    *[(4, 2, 2), (2, 8, 1), (16, 1, 16)],
]


@pytest.mark.parametrize(("before", "after", "most"), OTHER_HOSTS)
def test_each_host_reads_the_files_that_hold_its_feeds_and_no_others(before, after, most, tmp_path):
    ds = batches(512)
    written = save(tmp_path, hosts_of(ds, even(before, 256), divisor=256))
    assert {len(of_host) for of_host in written} == {1}
    hosts, found = hosts_of(ds, even(after, 256), divisor=256), []
    for host in hosts:
        read, state = opened(lambda host=host: read_state(tmp_path, host.own_feeds), reading=True)
        found.append(read)
        assert len(read) == len(set(read)) <= most
        position = host.from_state(state)
        assert host.to_state(position) == state_of(host)
        assert before != after or state == state_of(host)
    assert before != after or found == written


@st.composite
def meshes(draw):
    """Shards of each of some hosts, in any order, some of them held by several."""
    divisor = draw(st.sampled_from([1, 2, 3, 4, 6]))
    shards = st.sets(st.integers(0, divisor - 1), min_size=1)
    held = [sorted(of_host) for of_host in draw(st.lists(shards, max_size=5))]
    left = set(range(divisor)) - {shard for of_host in held for shard in of_host}
    return divisor, draw(st.permutations([*held, *([sorted(left)] if left else [])]))


@settings(max_examples=60, deadline=None)
@given(meshes(), meshes(), st.sampled_from([6, 12]))
def test_from_any_mesh_to_any_other_every_feed_comes_back_once_written(
    tmp_path_factory, before, after, num_feeds
):
    folder, ds = tmp_path_factory.mktemp("state"), batches(num_feeds)
    divisor, shards = before
    hosts = hosts_of(ds, shards, divisor)
    for host, layout_shards in zip(hosts, shards, strict=True):
        rows = ds.host_rows.of_host(BatchLayout(divisor, tuple(layout_shards)))
        by_feed = rows.by_feed
        assert list(rows.rows_of(rows.layout)) == list(by_feed) == host.own_feeds.run
    saved = [feed for host in hosts for feed in host.own_feeds.saved]
    assert sorted(saved) == list(range(num_feeds))
    written = [name for of_host in save(folder, hosts) for name in of_host]
    assert len(written) == len(set(written))
    divisor, shards = after
    for host in hosts_of(ds, shards, divisor):
        state = read_state(folder, host.own_feeds)
        assert host.to_state(host.from_state(state)) == state_of(host)


@pytest.fixture
def saved(tmp_path):
    """The folder in which four hosts have saved eight feeds."""
    save(tmp_path, hosts_of(batches(8), even(4, 4), divisor=4))
    return tmp_path


FIRST, SECOND = OwnFeeds(run=range(4)), OwnFeeds(run=range(4, 8))  # of two hosts


def refusal(folder, feeds=FIRST):
    with pytest.raises(StateError) as refused:
        read_state(folder, feeds)
    return str(refused.value)


def test_a_feed_that_nobody_wrote_is_named_on_every_host(saved):
    for name in files((2, 3), (6, 7)):
        (saved / name).unlink()
    for feeds in (FIRST, SECOND):
        error = refusal(saved, feeds)
        assert "lacks 4 of 8 feeds: 2 to 3, 6 to 7." in error
        assert "found:  feeds-00000-00001-of-00008.json, feeds-00004-00005-of-00008.json" in error


@pytest.mark.parametrize("content", [b"", b'{"step": 3', b"\xff\xfe\x00", b"5", b'{"feeds": {}}'])
def test_a_damaged_file_is_named_by_the_hosts_that_need_it(saved, content):
    (saved / "feeds-00002-00003-of-00008.json").write_bytes(content)
    assert "feeds-00002-00003-of-00008.json is damaged: " in refusal(saved)
    read_state(saved, SECOND)


@pytest.mark.parametrize(("key", "value"), [("step", 4), ("transforms", "others")])
def test_files_of_different_steps_and_pipelines_are_named(saved, key, value):
    other = saved / "feeds-00002-00003-of-00008.json"
    state = json.loads(other.read_text())
    other.write_text(json.dumps({**state, key: value}))
    error = refusal(saved)
    differs = f"{key} is {state.get(key)!r} in feeds-00000-00001-of"
    assert f"come from different checkpoints: {differs}" in error
    assert f"and {value!r} in feeds-00002-00003-of-00008.json" in error


def test_a_folder_in_which_other_hosts_had_saved_is_refused(saved):
    save(saved, hosts_of(batches(8), even(2, 4), divisor=4))
    both = "feeds-00000-00001-of-00008.json and feeds-00000-00003-of-00008.json both hold feed 0"
    assert both in refusal(saved)


def test_files_of_another_number_of_feeds_are_another_pipelines(saved):
    ds = batches(16)
    with iter(ds.shard_to(data_mesh(1))) as other, pytest.raises(StateError, match="num_feeds"):
        other.read_state(saved)
    (host,) = hosts_of(ds, [[0]], divisor=1)
    save(saved, [host])
    error = refusal(saved, host.own_feeds)
    assert "come from different checkpoints: feeds-00000-00001-of-00008.json and" in error


def test_of_feeds_that_it_does_not_run_a_pipeline_reads_one_file_to_refuse_them(saved):
    numbers = grain.MapDataset.range(8).map(lambda i: {"x": i}).batch(8)

    def restore():
        with pytest.raises(StateError, match="feeds"):
            batches.read_state(saved)

    with iter(numbers.shard_to(data_mesh(8))) as batches:
        read, _ = opened(restore, reading=True)
    assert read == ["feeds-00000-00001-of-00008.json"]
