"""Streams and feeds on several hosts: whose rows they yield, where they end, and what stops them.

The functions named ``case_...`` run on the hosts, one after the other in one set of processes, and
return what the tests look at.
"""

import functools
import json
import os
import pickle
import sys
import threading
import time
import weakref
from pathlib import Path
from unittest import mock

import grain
import jax
import numpy as np
import pytest

import grain_shard
from grain_shard import rehearse
from grain_shard.streams.stream_batches import StreamBatches
from tests.conftest import HANG_S, HOSTS_S, eventually, ids
from tests.on_hosts import (
    APIS,
    assembled_batches,
    data_mesh,
    model_over_hosts,
    or_traceback,
    own_parts,
    own_rows,
    part_of,
    restore,
    save,
)
from tests.pipelines import IN_TURN

pytestmark = [pytest.mark.slow, pytest.mark.long]


# On the hosts.


def run_cases(cases, directory):
    """What this host returned in each case; the traceback of one that failed."""
    return {
        case.__name__: or_traceback(case, jax.process_index(), Path(directory, case.__name__))
        for case in cases
    }


def run_alone(case, directory):
    """Writes what this host returned, and waits for the other one, since neither ends in order."""
    directory = Path(directory)
    result = run_cases([case], directory)[case.__name__]
    part = directory / f"{jax.process_index()}.part"
    part.write_bytes(pickle.dumps(result))
    part.rename(directory / str(jax.process_index()))
    eventually((directory / str(1 - jax.process_index())).exists)


def records(num_records, part=slice(None)):
    return grain.MapDataset.range(num_records)[part].map(lambda i: {"id": np.int32(i)})


def numbered(num_records, part=slice(None)):
    """A stream of records that carry their number."""
    return records(num_records, part).to_iter_dataset(grain.ReadOptions(1, 1))


def own(num_records, mesh=None):
    """The part of these that belongs to this host."""
    return numbered(num_records, part_of(grain_shard.ShardByMesh(mesh or data_mesh())))


def local(ds, mesh=None, **options):
    """An iterator over batches of 4 of a stream with the rows of this host."""
    ds = ds.batch(4).shard_to(mesh or data_mesh(), rows="local", **{"timeout_s": 60, **options})
    return iter(ds)


def batches_of(iterator):
    """This host's parts of every batch; with the error that ended it, if one did."""
    result = {"batches": [], "shapes": set(), "error": None}
    with iterator:
        try:
            for batch in iterator:
                result["batches"].append(own_parts(batch))
                result["shapes"].add((batch["id"].shape, batch["valid_mask"].shape))
        except Exception as error:
            result |= {"error": type(error).__name__, "text": str(error)}
            result["notes"] = getattr(error, "__notes__", [])
            try:
                next(iterator)
            except Exception as again:
                result["same error again"] = again is error
    return result


def case_unsaid(host, _):
    with pytest.raises(grain_shard.ShardingError) as refusal:
        numbered(40).batch(4).shard_to(data_mesh())
    return str(refusal.value)


def uneven(host, **options):
    """Host 1 filters out 90 %."""
    ds = own(100).filter(lambda record: host != 1 or record["id"] % 20 == 1)
    return local(ds, **options)


def no_record(host, **options):
    """Host 1 filters out all."""
    return local(own(22).filter(lambda record: host == 0), timeout_s=60, **options)


def of_different_lengths(host):
    ds = numbered([40, 24][host]).batch(8)
    return iter(ds.shard_to(data_mesh(), rows="global", timeout_s=60))


def raising(host, at):
    def check(record):
        if host == 1 and record["id"] == at:
            raise ValueError(f"bad record {at}")
        return record

    return local(own(40).map(check))


def continued(make, steps):
    """By the number of batches taken, this host's state, and the continuation."""
    found = {}
    for taken in steps:
        with make() as iterator:
            for _ in range(taken):
                next(iterator)
            state = json.loads(json.dumps(iterator.get_state()))
        rest = make()
        rest.set_state(state)
        found[taken] = state, batches_of(rest)
    return found


def case_states_of_uneven(host, _):
    """Host 1 has rows for two of the batches."""
    return continued(lambda: uneven(host), (0, 1, 2, 5, 13))


def stalling(host, stalls_on, release, num_records=40, timeout_s=2):
    def stall(record):
        if host == stalls_on and record["id"] >= 16:  # from the third batch on
            eventually(release.exists)
        return record

    return local(own(num_records).map(stall), timeout_s=timeout_s)


def case_host_1_stalls(host, release, stalls_on=1):
    result = batches_of(stalling(host, stalls_on, release))
    if host != stalls_on:
        release.touch()
    return result


def case_host_0_stalls(host, release):
    return case_host_1_stalls(host, release, stalls_on=0)


def case_long_pause_in_the_loop(host, release):
    """Host 1 has no third batch until its loop, and that of host 0, have paused for long.

    Their clocks go on by twice `timeout_s`, and then for so long that each thread looks at them.
    """
    batches, clock, paused_s = [], time.monotonic, [0.0]
    with (
        mock.patch.object(time, "monotonic", side_effect=lambda: clock() + paused_s[0]),
        stalling(host, 1, release, timeout_s=20) as iterator,
    ):
        for batch in iterator:
            batches.append(own_parts(batch))
            if len(batches) == 2:
                paused_s[0] = 40.0
            if len(batches) == 2 and host == 1:
                threading.Event().wait(2)
                release.touch()
            elif len(batches) == 2:
                eventually(release.exists)
    return batches


def case_model_axis_over_hosts(host, _):
    mesh = model_over_hosts()
    shards = grain_shard.ShardByMesh(mesh)
    result = batches_of(local(own(22, mesh), mesh))
    return {**result, "slice": (shards.shard_index, shards.shard_count)}


def case_model_axis_and_slices_by_process(host, _):
    ds = numbered(64, part_of(grain.sharding.ShardByJaxProcess()))
    return batches_of(local(ds, model_over_hosts()))


def case_one_host_has_rows_left(host, _):
    """The continuation from where the streams of the other three have ended."""
    few = own(80).filter(lambda record: host == 0 or record["id"] < 8)
    _, rest = continued(lambda: local(few), [3])[3]
    return rest


def slow_disk_of_host_1(event, args):
    """Host 1 begins to write when a host that did not wait for it would be done."""
    if event == "open" and os.path.basename(os.fsdecode(args[0])) == "state-1-of-2.json":
        threading.Event().wait(1)


def case_saved_by_orbax(host, directory):
    """By API, the names of the files, what follows the save, and what follows the restore."""
    sys.addaudithook(slow_disk_of_host_1)
    found = {}
    for api in APIS:
        directory.joinpath(api).mkdir(parents=True, exist_ok=True)
        with local(own(40)) as iterator:
            next(iterator)
            save(api, directory / api, 0, iterator)
            uninterrupted = [own_rows(batch) for batch in iterator]
        with local(own(40)) as iterator:
            restore(api, directory / api, 0, iterator)
            resumed = [own_rows(batch) for batch in iterator]
        names = sorted(path.name for path in directory.joinpath(api).rglob("state*"))
        found[api] = names, uninterrupted, resumed
    return found


# Four feeds, in batches of 8.


def numbers(feed, lengths=(30,) * 4):
    """Rows that say their feed and their place in it; 100 * feed + place."""
    first = 100 * feed.shard_index
    # A source, unlike MapDataset.range, has a first record that the hosts compare.
    numbers = grain.MapDataset.source(range(first, first + 30)).map(lambda i: {"id": np.int32(i)})
    rows = numbers.to_iter_dataset(IN_TURN)
    return rows.filter(lambda row: row["id"] < first + lengths[feed.shard_index])


def feeds(make_feed, mesh=None, **options):
    ds = grain_shard.feeds(make_feed, num_feeds=4).batch(8)
    return iter(ds.shard_to(mesh or data_mesh(), timeout_s=60, **options))


def of_lengths(lengths, **options):
    return feeds(lambda feed: numbers(feed, lengths), **options)


def case_states_of_uneven_feeds(host, _):
    return continued(lambda: of_lengths([3, 5, 0, 1]), (1, 2, 3))


def a_feed_raises(host):
    def check(row):
        if row["id"] == 304:
            raise ValueError("a bad row")
        return row

    return feeds(lambda feed: numbers(feed).map(check))


def a_feed_cannot_be_made(host):
    def make_feed(feed):
        if feed.shard_index == 2:
            raise FileNotFoundError("no such shard")
        return numbers(feed)

    return feeds(make_feed)


def a_feed_depends_on_its_host(host):
    """A model axis over the hosts: both run all feeds, and must get the same."""

    def make_feed(feed):
        return numbers(feed).map(lambda row: {"id": row["id"] + np.int32(host)})

    return feeds(make_feed, model_over_hosts())


EACH_HOSTS_OWN = [
    [0, 2, 4, 6, 1, 3, 5, 7],
    [8, 10, 12, 14, 9, 11, 13, 15],
    [16, 18, 20, 17, 19, 21],
]
HOST_0 = list(range(0, 100, 2))
HOST_1 = [1, 21, 41, 61, 81]  # what its filter leaves
UNEVEN = [HOST_0[4 * k : 4 * k + 4] + HOST_1[4 * k : 4 * k + 4] for k in range(13)]
UNEVEN_FEEDS = [[0, 1, 100, 101, 300], [2, 102, 103], [104]]
FULL_FEEDS = [[0, 1, 100, 101, 200, 201, 300, 301], [2, 3, 102, 103, 202, 203, 302, 303]]
# By what there is to see: a host's iterator, and the batches. Feeds 0 and 1 are host 0's.
ENDS = {
    "each host's own slice": (lambda host: local(own(22)), EACH_HOSTS_OWN),
    "each host's own slice, random access": (
        lambda host: local(records(22, part_of(grain_shard.ShardByMesh(data_mesh())))),
        EACH_HOSTS_OWN,
    ),
    "each host goes on to its own end": (uneven, UNEVEN),
    "all stop at the first end": (lambda host: uneven(host, remainder="drop"), UNEVEN[:1]),
    "all stop where a host has no record": (lambda host: no_record(host, remainder="drop"), []),
    "each feed goes on to its own end": (lambda host: of_lengths([3, 5, 0, 1]), UNEVEN_FEEDS),
    "a host without a row": (lambda host: of_lengths([0, 0, 3, 2]), [[200, 201, 300, 301], [202]]),
    "no row at all": (lambda host: of_lengths([0, 0, 0, 0]), []),
    "all stop at the first feed that lacks rows": (
        lambda host: of_lengths([6, 6, 6, 5], remainder="drop"),
        FULL_FEEDS,
    ),
}
# By what raises on host 1: the iterator, the batches before, the error, its text, and its place.
RAISED = {
    "first batch": (lambda host: raising(host, 3), 0, "ValueError", "bad record 3", None),
    # In the middle of it.
    "third batch": (lambda host: raising(host, 21), 2, "ValueError", "bad record 21", None),
    "feed": (a_feed_raises, 2, "ValueError", "a bad row", "in feed 3 of 4"),
    "make_feed": (a_feed_cannot_be_made, 0, "FileNotFoundError", "no such shard", "in feed 2 of 4"),
}
# By what host 1 lacks: the iterator, the batches before, and what every host says.
LACKING = {
    "a host has no record": (no_record, 0, "the stream of this host has no batch"),
    "a feed lacks rows": (
        lambda host: of_lengths([6, 6, 6, 5], remainder="error"),
        2,
        "feed 3 has only 1 rows left for the last batch, which takes 2 rows of each",
    ),
}
END_EARLIER = "(the first: host 1) end earlier than the streams of the other hosts"
# By what differs: the iterator, the batches that both hosts have, and what both say.
DIFFERING = {
    "different lengths": (of_different_lengths, 3, END_EARLIER),
    "a host's feeds end first": (
        lambda host: of_lengths([6, 6, 4, 4], remainder="error"),
        2,
        END_EARLIER,
    ),
    "a feed depends on its host": (
        a_feed_depends_on_its_host,
        0,
        "hosts 0, 1 run the same feeds, but get different rows",
    ),
}


def case_iterators(host, _):
    iterators = ENDS | RAISED | LACKING | DIFFERING
    return {name: batches_of(make(host)) for name, (make, *_) in iterators.items()}


BUFFERS = [(1, 1), (4, 2)]  # on the host, on the devices
AHEAD = {
    "stream": lambda **options: local(own(400), **options),
    "feeds": functools.partial(feeds, numbers),
}


def case_batches_made_ahead(host, _):
    return {(kind, buffers): made_ahead(kind, buffers) for kind in AHEAD for buffers in BUFFERS}


def made_ahead(kind, buffers):
    """After each batch, how many more were made, and how many of these are on the host.

    As the hosts have to agree on the end, batches wait for their votes, too.
    """
    here, came = [], threading.Condition()
    unwatched = StreamBatches.join

    def watched(self, turns):
        ((batch, position),) = unwatched(self, turns)
        with came:
            here.append(weakref.ref(batch["id"]))
            came.notify_all()
        return [(batch, position)]

    def alive():
        return sum(batch() is not None for batch in here)

    options, found = dict(zip(("cpu_buffer_size", "device_buffer_size"), buffers, strict=True)), []
    with (
        mock.patch.object(StreamBatches, "join", watched),
        AHEAD[kind](**options) as batches,
    ):
        for step in range(1, 9):
            next(batches)
            with came:
                assert came.wait_for(lambda: len(here) >= step + sum(buffers), HANG_S), "hangs"
            eventually(lambda: alive() <= buffers[0] + 1)
            found.append((len(here) - step, alive()))
    return found


def cases(*prefixes):
    return [f for name, f in globals().items() if name.startswith(prefixes)]


FOUR_HOSTS = cases("case_model_axis", "case_one_host_has")
# After these the hosts do not go on together.
ALONE = cases("case_host_1_stalls", "case_host_0_stalls")
TWO_HOSTS = [case for case in cases("case_") if case not in FOUR_HOSTS + ALONE]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What each host returned, by case."""
    results, each = {}, {"devices_per_host": 2, "timeout_s": HOSTS_S}
    for of_hosts, hosts in ((TWO_HOSTS, 2), (FOUR_HOSTS, 4)):
        directory = str(tmp_path_factory.mktemp("hosts"))
        run = rehearse.run(run_cases, of_hosts, directory, hosts=hosts, **each)
        for case in of_hosts:
            results[case] = [of_host[case.__name__] for of_host in run]
    for case in ALONE:
        directory = tmp_path_factory.mktemp("hosts")
        rehearse.run(run_alone, case, str(directory), hosts=2, end_others=False, **each)
        results[case] = [pickle.loads((directory / str(host)).read_bytes()) for host in (0, 1)]
    return results


@pytest.fixture
def result_of(runs):
    """A function from a case to what each host returned in it."""

    def result_of(case):
        results = runs[case]
        for host, result in enumerate(results):
            assert not isinstance(result, str) or "Traceback" not in result, f"{host}: {result}"
        return results

    return result_of


@pytest.fixture
def ended(result_of):
    """A function from the name of an iterator to what each host got of it."""
    return lambda name: [of_host[name] for of_host in result_of(case_iterators)]


def texts(results, error):
    """What each host says, all of which ended by this error, also when they are asked again."""
    assert [(r["error"], r["same error again"]) for r in results] == [(error, True)] * len(results)
    return [result["text"] for result in results]


def batches_in(results):
    assert [result["error"] for result in results] == [None] * len(results)
    return ids(assembled_batches([result["batches"] for result in results]))


def test_a_stream_that_does_not_say_its_rows_is_refused_at_build_time(result_of):
    for text in result_of(case_unsaid):
        assert "rows= does not say what the stream yields on each of 2 hosts" in text
        assert "cut the stream into grain_shard.feeds" in text
        assert 'rows="local"' in text
        assert 'rows="global"' in text


@pytest.mark.parametrize("name", ENDS)
def test_hosts_with_streams_stop_together_and_lose_or_repeat_nothing(ended, name):
    results = ended(name)
    assert batches_in(results) == ENDS[name][1]
    assert all(result["shapes"] <= {((8,), (8,))} for result in results)


def test_hosts_that_go_on_with_padding_alone_do_not_count_as_feeding_the_same_rows(result_of):
    results = result_of(case_one_host_has_rows_left)
    assert batches_in(results) == [[48, 52, 56, 60], [64, 68, 72, 76]]
    assert all(result["shapes"] == {((16,), (16,))} for result in results)


@pytest.mark.parametrize(
    ("case", "batches", "feeds"),
    [
        (case_states_of_uneven, UNEVEN, [["0"], ["0"]]),
        (case_states_of_uneven_feeds, UNEVEN_FEEDS, [["0", "1"], ["2", "3"]]),
    ],
)
def test_a_state_continues_on_the_same_hosts_also_past_the_end_of_one(
    result_of, case, batches, feeds
):
    of_hosts = result_of(case)
    for taken in of_hosts[0]:
        states, continuations = zip(*(of_host[taken] for of_host in of_hosts), strict=True)
        assert batches_in(continuations) == batches[taken:], f"after {taken} batches"
        assert [state["step"] for state in states] == [taken, taken]
        assert [list(state["feeds"]) for state in states] == feeds


@pytest.mark.parametrize("api", APIS)
def test_a_state_saved_by_orbax_is_one_file_a_host_and_continues_on_as_many_hosts(result_of, api):
    """Of random access and feeds: test_hosts_elastic.py."""
    for of_host in result_of(case_saved_by_orbax):
        names, uninterrupted, resumed = of_host[api]
        assert names == ["state-0-of-2.json", "state-1-of-2.json"]
        assert resumed == uninterrupted
        assert [len(rows) for rows in resumed] == [4, 4, 4, 4]


@pytest.mark.parametrize("name", RAISED)
def test_an_error_of_the_users_is_raised_where_it_occurs_and_named_elsewhere(ended, name):
    _, batches, error, said, place = RAISED[name]
    other, own = ended(name)
    assert len(other["batches"]) == len(own["batches"]) == batches
    assert texts([own], error) == [said]
    assert place is None or f"grain_shard: {place}" in own["notes"]
    (text,) = texts([other], "AgreementError")
    quoted = f"{error}: {said}" + (f" ({place})" if place else "")
    assert text == f"host 1 failed, so this host stops as well.\n  {quoted}"


@pytest.mark.parametrize("name", LACKING)
def test_a_host_that_lacks_data_is_an_error_on_every_host(ended, name):
    _, batches, said = LACKING[name]
    other, own = ended(name)
    for text in texts([own], "ShardingError") + texts([other], "AgreementError"):
        assert said in text
    assert len(other["batches"]) == len(own["batches"]) == batches


@pytest.mark.parametrize("name", DIFFERING)
def test_hosts_that_may_not_differ_and_do_learn_it_all(ended, name):
    _, batches, said = DIFFERING[name]
    results = ended(name)
    assert [len(result["batches"]) for result in results] == [batches] * len(results)
    for text in texts(results, "AgreementError"):
        assert said in text


def test_hosts_that_hold_the_same_rows_and_yield_different_ones_all_learn_it(result_of):
    results = result_of(case_model_axis_and_slices_by_process)
    assert [result["batches"] for result in results] == [[]] * 4
    different = "hold the same shards, but their pipelines yield different rows"
    for text in texts(results, "AgreementError"):
        assert f"hosts 0, 2 {different}" in text
        assert f"hosts 1, 3 {different}" in text


@pytest.mark.parametrize(("case", "stalled"), [(case_host_1_stalls, 1), (case_host_0_stalls, 0)])
def test_a_host_whose_stream_stalls_is_named_on_every_host(result_of, case, stalled):
    results = result_of(case)
    own = results.pop(stalled)
    for text in texts([own], "HostTimeoutError") + texts(results, "AgreementError"):
        assert f"host {stalled} has waited" in text
        assert "s for the data of its next batch (timeout_s=2), and the other hosts wait" in text
    for result in [own, *results]:
        assert len(result["batches"]) == 2


def test_a_long_pause_in_the_loop_is_no_timeout(result_of):
    batches = assembled_batches(result_of(case_long_pause_in_the_loop))
    assert ids(batches) == [
        [*range(8 * k, 8 * k + 8, 2), *range(8 * k + 1, 8 * k + 8, 2)] for k in range(5)
    ]


def test_hosts_that_hold_the_same_rows_get_the_same_slice(result_of):
    results = result_of(case_model_axis_over_hosts)
    assert [result["slice"] for result in results] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert batches_in(results) == EACH_HOSTS_OWN


@pytest.mark.parametrize("kind", AHEAD)
@pytest.mark.parametrize("buffers", BUFFERS)
def test_batches_are_made_as_far_ahead_as_the_buffers_go_and_one_more_is_on_its_way(
    result_of, kind, buffers
):
    """C9. For random access: `TestMemory` in test_lifecycle.py. For workers: test_workers.py."""
    on_host, on_devices = buffers
    for of_host in result_of(case_batches_made_ahead):
        found = of_host[kind, buffers]
        assert {ahead for ahead, _ in found} == {on_host + on_devices}
        assert {alive for _, alive in found} <= {on_host, on_host + 1}
