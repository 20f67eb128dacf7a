"""Feeds on one host: which rows, where they end, their state, and what is refused."""

import contextlib
import glob
import itertools
import json
import re
import resource
import threading
from functools import partial

import grain
import jax
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import hosts_mesh
from tests import text
from tests.conftest import HANG_S, Made, background_threads, data_mesh, eventually, ids
from tests.pipelines import (
    IN_TURN,
    Odd,
    after,
    assert_same,
    assert_same_batches,
    feeds_of,
    going_on,
    with_states,
)
from tests.test_workers import assert_no_child_is_left, raising


def numbers(lengths):
    """Feed f has ``lengths[f]`` rows: 100 * f, 100 * f + 1, ..."""

    def make_feed(feed):
        first = 100 * feed.shard_index
        records = grain.MapDataset.range(first, first + 99).map(lambda i: {"id": np.int32(i)})
        rows = records.to_iter_dataset(IN_TURN)
        return rows.filter(lambda row: row["id"] < first + lengths[feed.shard_index])

    return grain_shard.feeds(make_feed, num_feeds=len(lengths))


def valid(batches):
    """The ids of every batch, None for padding."""
    return [np.where(b["valid_mask"], b["id"], None).tolist() for b in batches]


@pytest.mark.parametrize(
    ("lengths", "global_batch_size", "num_devices", "batches"),
    [
        # The rows of each feed; None is padding.
        ([2, 2], 2, 2, [[0, 100], [1, 101]]),
        ([2, 2], 4, 2, [[0, 1, 100, 101]]),
        ([3, 1], 4, 2, [[0, 1, 100, None], [2, None, None, None]]),
        ([0, 2], 4, 2, [[None, None, 100, 101]]),
        (
            [1, 3, 0, 2],
            4,
            2,
            [[0, 100, None, 300], [None, 101, None, 301], [None, 102, None, None]],
        ),
        ([0, 0], 2, 2, []),
        # Shards that do not divide the batch get rows of padding.
        ([2, 2, 2], 6, 4, [[0, 1, 100, 101, 200, 201, None, None]]),
    ],
)
def test_rows_belong_to_feeds_in_order_and_each_feed_pads_its_own(
    lengths, global_batch_size, num_devices, batches
):
    ds = numbers(lengths).batch(global_batch_size)
    assert valid(ds.shard_to(data_mesh(num_devices))) == batches
    # Iterated alone, they are the same batches without the padding.
    rows = [[i for i in batch if i is not None] for batch in batches]
    assert [batch["id"].tolist() for batch in ds] == rows


@settings(max_examples=20, deadline=None)
@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=4),
    st.integers(1, 3),
    st.sampled_from([1, 2, 3]),
    st.sampled_from(["pad", "drop"]),
)
def test_padded_or_dropped_no_row_comes_twice_and_with_pad_each_comes_once(
    lengths, feed_batch_size, num_threads, remainder
):
    ds = numbers(lengths).batch(feed_batch_size * len(lengths))
    batches = list(ds.shard_to(data_mesh(1), remainder=remainder, num_threads=num_threads))
    seen = [i for batch in ids(batches) for i in batch]
    shortest = min(lengths) // feed_batch_size * feed_batch_size
    expected = [
        [100 * feed + i for i in range(length if remainder == "pad" else shortest)]
        for feed, length in enumerate(lengths)
    ]
    assert sorted(seen) == [i for of_feed in expected for i in of_feed]
    assert {batch["id"].shape for batch in batches} <= {(feed_batch_size * len(lengths),)}


@pytest.mark.parametrize("num_workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_with_error_feeds_have_to_end_together(num_workers):
    options = {"remainder": "error", "num_workers": num_workers}
    together = numbers([4, 4]).batch(4).shard_to(data_mesh(2), **options)
    assert ids(together) == [[0, 1, 100, 101], [2, 3, 102, 103]]
    with iter(numbers([4, 3, 4]).batch(6).shard_to(data_mesh(2), **options)) as apart:
        assert ids([next(apart)]) == [[0, 1, 100, 101, 200, 201]]
        with pytest.raises(
            grain_shard.ShardingError,
            match="feed 1 has only 1 rows left for the last batch, which takes 2",
        ):
            next(apart)


def test_every_leaf_has_its_place_whatever_its_rank_and_text_stays_on_the_host():
    def row(feed, i):
        image = np.full((2, 3), 10 * feed + i, np.float32)
        return {"image": image, "label": i, "name": "x" * (feed + 1)}

    ds = feeds_of(row, 2, 4, length=2)
    (batch,) = ds.shard_to(data_mesh(4), {"image": P("data"), "label": P("data"), "name": P()})
    assert batch["image"].shape == (4, 2, 3)
    assert np.asarray(batch["image"])[:, 1, 1].tolist() == [0, 1, 10, 11]
    assert np.asarray(batch["label"]).tolist() == [0, 1, 0, 1]
    assert batch["name"].tolist() == ["x", "x", "xx", "xx"]


@pytest.mark.filterwarnings("ignore:a batch has rows of padding")
def test_without_a_mask_any_tree_will_do():
    ds = feeds_of(lambda feed, i: (i, feed), 2, 4, length=3).shard_to(data_mesh(2), mask_key=None)
    batches = [jax.tree.map(lambda leaf: leaf.tolist(), batch) for batch in ds]
    assert batches == [([0, 1, 0, 1], [0, 0, 1, 1]), ([2, 0, 2, 0], [0, 0, 1, 0])]


def packing(ds, by, length=128, **options):
    """Packs a stream into rows of so many tokens, by a node of Grain's."""
    return by(ds, length_struct={"tokens": length, "document": length}, **options)


first_fit = partial(packing, by=grain.experimental.FirstFitPackIterDataset, num_packing_bins=6)
best_fit = partial(packing, by=grain.experimental.BestFitPackIterDataset, num_packing_bins=6)
concat_then_split = partial(packing, by=grain.experimental.ConcatThenSplitIterDataset)
PACKERS = {
    "first fit": first_fit,
    "best fit": best_fit,
    "concat then split": concat_then_split,
    "window shuffle": lambda ds: grain.experimental.WindowShuffleIterDataset(
        first_fit(ds), window_size=5, seed=3
    ),
}


def mixed_and(packer, **options):
    return grain_shard.feeds(lambda feed: packer(text.mixed(feed), **options), num_feeds=4)


@pytest.mark.parametrize("packer", PACKERS.values(), ids=PACKERS)
def test_from_each_midpoint_the_same_packed_batches_follow(packer):
    ds = mixed_and(packer).batch(8).shard_to(data_mesh(4))
    whole = with_states(ds, count=12)
    with iter(ds) as batches:
        states = [batches.get_state(), *(state for _, state in whole)]
    for step in (0, 1, 2, 3, 5, 8, 11):
        assert_same(with_states(ds, states[step], 12 - step), whole[step:])


@pytest.mark.slow
def test_a_feed_may_run_in_a_worker_process_of_its_own():
    def in_a_worker(feed):
        return text.packed(feed).mp_prefetch(grain.MultiprocessingOptions(num_workers=1))

    def batches(make_feed):
        return grain_shard.feeds(make_feed, num_feeds=2).batch(4).shard_to(data_mesh(2))

    found = with_states(batches(in_a_worker), count=3)
    found += with_states(batches(in_a_worker), found[-1][1], 1)
    expected = itertools.islice(batches(text.packed), 4)
    assert_same_batches([batch for batch, _ in found], list(expected))


def test_a_state_goes_from_the_mesh_to_plain_iteration_and_back():
    ds = numbers([6, 5, 7, 4]).batch(8)
    _, state = after(ds.shard_to(data_mesh(8)), 1)
    rest = ids(ds.shard_to(data_mesh(8)))[1:]
    alone = iter(ds)
    alone.set_state(state)
    assert [batch["id"].tolist() for batch in alone] == rest
    alone.set_state(state)
    next(alone)
    assert (
        going_on(ds.shard_to(data_mesh(2)), json.loads(json.dumps(alone.get_state()))) == rest[1:]
    )


def test_a_hosts_state_may_be_joined_by_hand_and_hold_more_than_its_feeds():
    ds = numbers([6, 5, 7, 4]).batch(8)
    _, state = after(ds.shard_to(data_mesh(1)), 1)
    of_hosts = [
        {**state, "feeds": {f: entry for f, entry in state["feeds"].items() if f in feeds}}
        for feeds in (("0", "1"), ("2", "3"))
    ]
    with iter(ds.shard_to(data_mesh(1))) as batches:
        with pytest.raises(grain_shard.StateError, match="no entry for feeds 2, 3"):
            batches.set_state(of_hosts[0])
        assert batches.get_state()["step"] == 0, "a refused state changes nothing"
        joined = {**of_hosts[0], "feeds": of_hosts[0]["feeds"] | of_hosts[1]["feeds"] | {"9": {}}}
        batches.set_state(joined)
        assert batches.get_state() == state


@pytest.mark.parametrize(
    ("saved", "other", "changed"),
    [
        (numbers([9] * 8), numbers([9] * 4), "num_feeds"),
        (mixed_and(first_fit), numbers([9] * 4), "source, seeds, transforms"),
        (mixed_and(first_fit), mixed_and(first_fit, num_packing_bins=4), "transforms"),
        (mixed_and(best_fit), mixed_and(best_fit, length=64), "transforms"),
        (mixed_and(concat_then_split), mixed_and(concat_then_split, length=64), "transforms"),
    ],
)
def test_a_state_of_other_feeds_or_of_other_packing_is_refused(saved, other, changed):
    _, state = after(saved.batch(8).shard_to(data_mesh(4)), 0)
    with pytest.raises(grain_shard.StateError, match=f"another pipeline: {changed} changed"):
        going_on(other.batch(8).shard_to(data_mesh(4)), state)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_feeds_that_ignore_their_number_are_named_once(num_workers, caplog):
    ds = feeds_of(lambda feed, i: {"id": i}, 4, 8, length=8, options=grain.ReadOptions())
    ds = ds.shard_to(data_mesh(2), num_workers=num_workers)
    for _ in range(2):
        with iter(ds) as batches:
            next(batches)
    (line,) = [line for line in caplog.messages if "same rows" in line]
    assert "feeds 0 and 1 begin with the same rows" in line
    assert "for each shard_index" in line


ROWS_ARE_BATCHES = (
    "grain_shard: make_feed ends with .batch(2), so each row of a feed is a batch of 2 records:"
    " batch['x'] has shape (16, 2, 4). remedy: leave this .batch out of make_feed, because the"
    " .batch(16) of the feeds makes batches. If a row is meant to hold 2 records, nothing is wrong."
)


def records_of(feed):
    return grain.MapDataset.range(640)[feed.shard_index :: feed.shard_count].map(
        lambda i: {"id": i, "x": np.full(4, i, np.float32)}
    )


@pytest.mark.parametrize(
    ("make_feed", "is_told"),
    {
        "a batch": (lambda feed: records_of(feed).batch(2).to_iter_dataset(), True),
        "of a stream": (lambda feed: records_of(feed).to_iter_dataset().batch(2), True),
        "no batch": (lambda feed: records_of(feed).to_iter_dataset(), False),
        "a group": (lambda feed: records_of(feed).batch(2).map(dict).to_iter_dataset(), False),
        "tokens": (lambda feed: grain.MapDataset.range(640).batch(2).to_iter_dataset(), False),
    }.values(),
)
def test_rows_that_are_batches_are_told_with_the_shape_that_they_lead_to(
    make_feed, is_told, caplog
):
    ds = grain_shard.feeds(make_feed, num_feeds=4).batch(16)
    ds = ds.shard_to(data_mesh(2), mask_key=None)
    for _ in range(2):
        with iter(ds) as batches:
            next(batches)
    told = [line for line in caplog.messages if "make_feed ends with" in line]
    assert told == [ROWS_ARE_BATCHES] * is_told


def test_an_entry_that_the_feed_cannot_take_names_the_feed():
    ds = numbers([9] * 4).batch(8).shard_to(data_mesh(4))
    _, state = after(ds, 0)
    others = grain_shard.feeds(lambda feed: Made(lambda i: {"id": i}), num_feeds=4).batch(8)
    state["feeds"]["2"] = after(others.shard_to(data_mesh(4)), 1)[1]["feeds"]["2"]
    with pytest.raises(grain_shard.StateError, match="cannot restore this state") as refusal:
        after(ds, 1, state)
    assert "grain_shard: in feed 2 of 4" in refusal.value.__notes__


# Threads, memory, errors.


def counted(taken, slow=None, release=None):
    """Batches of feeds that count what was taken of them; one may have to wait for its release."""

    def row(feed, i):
        if feed == slow:
            assert release.acquire(timeout=HANG_S), "hangs"
        taken[feed] += 1
        return {"id": np.int32(i)}

    return feeds_of(row, 4, 8).shard_to(data_mesh(2), cpu_buffer_size=3, device_buffer_size=2)


def test_fast_feeds_wait_for_a_slow_one():
    taken, release = [0] * 4, threading.Semaphore(0)
    with iter(counted(taken, 1, release)) as batches:
        batches.start_prefetch()
        for step in range(4):
            release.release(2)  # the slow feed's rows of one batch
            next(batches)
            rows = 2 * (step + 1)
            assert taken[1] == rows
            # The others are ahead by the batches that may wait on the host, and no farther.
            assert all(rows <= of_feed <= rows + 2 * 3 for of_feed in taken)
        release.release(1000)


def test_no_feed_is_read_farther_ahead_than_the_buffers_go():
    taken = [0] * 4
    with iter(counted(taken)) as batches:
        for step in range(1, 5):
            next(batches)
            eventually(lambda: min(taken) >= 2 * (step + 3 + 2))
            assert taken == [2 * (step + 3 + 2)] * 4
    eventually(lambda: not background_threads())
    assert taken == [2 * (4 + 3 + 2)] * 4


@pytest.mark.parametrize(
    ("options", "num_workers"),
    [(IN_TURN, 0), (grain.ReadOptions(), 0), pytest.param(IN_TURN, 1, marks=pytest.mark.slow)],
    ids=["in turn", "ahead", "in a worker"],
)
@pytest.mark.parametrize(
    ("fail", "error", "match"),
    [
        (lambda: raising(ValueError("five")), ValueError, "^five(\n|$)"),
        (lambda: raising(KeyboardInterrupt("five")), KeyboardInterrupt, "five"),
        (lambda: raising(Odd("five")), Odd, "five"),
        (lambda: next(iter([])), RuntimeError, "which looks like the end of the data\n"),
    ],
    ids=["an exception", "Ctrl-C", "no Exception", "an end"],
)
def test_a_feed_that_raises_is_named_after_the_batches_before(
    fail, error, match, options, num_workers
):
    def row(feed, i):
        if (feed, i) == (2, 5):
            fail()
        return {"id": np.int32(100 * feed + i)}

    ds = feeds_of(row, 4, 8, length=50, options=options)
    if num_workers and not issubclass(error, Exception):
        error = RuntimeError  # the other one would end the worker
    with iter(ds.shard_to(data_mesh(4), num_workers=num_workers)) as batches:
        assert [batch[:2] for batch in ids([next(batches), next(batches)])] == [[0, 1], [2, 3]]
        for _ in range(2):
            with pytest.raises(error, match=match) as raised:
                next(batches)
            notes = raised.value.__notes__
            assert notes.count("grain_shard: in feed 2 of 4") == 1
            assert any("record 5 of the dataset" in note for note in notes)
        if num_workers:
            frames = [entry.name for entry in raised.traceback]
            assert "row" in frames or "in row\n" in "".join(notes), "the worker's traceback"
        assert batches.get_state()["step"] == 2
    assert_no_child_is_left()


def test_a_readers_pipeline_is_closed_when_its_feed_ends_and_when_the_iterator_is():
    closed, opened = [], []  # kept, as Grain closes what is collected

    class Kept(Made):
        def __iter__(self):
            opened.append(super().__iter__())
            return opened[-1]

    def make_feed(feed):
        number = feed.shard_index
        return Kept(
            lambda i: {"id": np.int32(i)}, [2, 1000][number], lambda _: closed.append(number)
        )

    feeds = grain_shard.feeds(make_feed, num_feeds=2)
    with iter(feeds.batch(2).shard_to(data_mesh(2))) as batches:
        for _ in range(5):
            next(batches)
        assert set(closed) == {0}
    assert set(closed) == {0, 1}


def unclosable(fails, on_close):
    """Numbers without end; says that it is closed, which may fail."""
    errors = [OSError("cannot close")] if fails else []

    def close(iterator):
        on_close()
        if errors:
            raise errors.pop()

    return Made(lambda i: {"id": np.int32(i)}, on_close=close)


def test_a_feed_that_cannot_be_closed_is_told_when_every_other_is_closed():
    closed = []

    def make_feed(feed):
        number = feed.shard_index
        return unclosable(number == 1, lambda: closed.append(number))

    batches = iter(grain_shard.feeds(make_feed, num_feeds=3).batch(3))
    next(batches)
    with pytest.raises(OSError, match="cannot close") as raised:
        batches.close()
    assert {0, 1, 2} <= set(closed)
    assert raised.value.__notes__ == ["grain_shard: while closing feed 1"]


def test_a_state_is_taken_also_if_a_feed_that_was_open_cannot_be_closed():
    ds = grain_shard.feeds(lambda feed: unclosable(True, lambda: None), num_feeds=2).batch(2)
    batches = iter(ds)
    for _ in range(3):
        next(batches)
    state = batches.get_state()
    next(batches)
    with pytest.raises(OSError, match="cannot close"):
        batches.set_state(state)
    assert next(batches)["id"].tolist() == [3, 3]
    with contextlib.suppress(OSError):
        batches.close()


# What is refused.


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (
            {"id": np.int64(0)},
            "batch['id']: in a row of feed 1, the leaf is int64[], but int32[] in other rows",
        ),
        (
            {"id": np.zeros(2, np.int32)},
            "batch['id']: in a row of feed 1, the leaf is int32[2], but int32[] in other rows",
        ),
        (
            {"other": np.int32(0)},
            "batch['other'] only in a row of feed 1, not in a row of feed 0; batch['id'] only in"
            " a row of feed 0, not in a row of feed 1.",
        ),
        (
            {"id": None},
            "batch['id']: two rows have different structures: batch['id'] only in a row of feed 0",
        ),
    ],
)
@pytest.mark.parametrize("rows_before", [0, 2])
def test_a_row_unlike_the_others_is_refused_and_the_error_stands(second, problem, rows_before):
    def row(feed, i):
        return second if (feed, i) == (1, rows_before) else {"id": np.int32(0)}

    ds = feeds_of(row, 2, 2, length=rows_before + 1)
    for dataset in (ds, ds.shard_to(data_mesh(2))):
        with contextlib.closing(iter(dataset)) as batches:
            for _ in range(rows_before):
                next(batches)
            for _ in range(2):  # the rows that the feeds have given are gone: nothing may follow
                with pytest.raises(grain_shard.ShardingError, match=re.escape(problem)):
                    next(batches)


EIGHT_HOSTS = hosts_mesh({"data": 8}, hosts=8, devices_per_host=1)
REFUSED = {
    "no feeds": (lambda: numbers([]), "num_feeds=0 is not an integer of at least 1"),
    "no function": (
        lambda: grain_shard.feeds([1], num_feeds=1),
        "make_feed is a list, not a function",
    ),
    "batch": (lambda: numbers([9] * 3).batch(8), "use a batch size of 6 or 9, or"),
    "small batch": (lambda: numbers([9] * 3).batch(2), "use a batch size of 3, or a num_feeds"),
    "rows": (
        lambda: numbers([9] * 4).batch(8).shard_to(data_mesh(4), rows="local"),
        "leave rows out",
    ),
    "shards": (
        lambda: numbers([9] * 3).batch(6).shard_to(data_mesh(4), remainder="drop"),
        'use a batch size of 12, or pass remainder="pad"',
    ),
    "no dataset": (
        lambda: grain_shard.feeds(lambda feed: [feed], num_feeds=4).batch(8).shard_to(data_mesh(4)),
        "make_feed returned a list",
    ),
    "random access": (
        lambda: list(grain_shard.feeds(lambda f: grain.MapDataset.range(3), num_feeds=1).batch(1)),
        "make_feed returned a RangeMapDataset",
    ),
    "an option of Grain's .batch": (
        lambda: numbers([9] * 4).batch(8, drop_remainder=True),
        "the .batch of feeds takes no drop_remainder",
    ),
    "fewer feeds than hosts": (
        lambda: numbers([9] * 4).batch(8).shard_to(EIGHT_HOSTS),
        "num_feeds=4 is too small for 8 hosts with different rows",
    ),
    "a host without a feed": (
        lambda: numbers([9] * 10).batch(10).shard_to(EIGHT_HOSTS),
        "host 5 would hold only rows of padding",
    ),
}


@pytest.mark.parametrize(("build", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_work_is_refused_with_a_remedy(build, message):
    with pytest.raises(grain_shard.ShardingError, match=message):
        list(build())


@pytest.mark.parametrize(
    ("raised", "error", "match"),
    [
        (FileNotFoundError("no such file"), FileNotFoundError, "no such file"),
        (StopIteration(), RuntimeError, r"give each next\(\.\.\.\) in "),  # of a bare next(...)
    ],
)
def test_an_error_in_make_feed_is_found_when_the_pipeline_is_built(raised, error, match):
    ds = grain_shard.feeds(lambda feed: raising(raised), num_feeds=4).batch(8)
    with pytest.raises(error, match=match) as found:
        ds.shard_to(data_mesh(4))
    assert found.value.__notes__ == ["grain_shard: in feed 0 of 4"]


@pytest.mark.parametrize("method", ["map", "filter", "shuffle", "pipe"])
def test_a_transformation_of_feeds_is_refused_with_the_place_where_it_belongs(method):
    with pytest.raises(AttributeError, match=rf"^feeds have no \.{method}\.") as error:
        getattr(numbers([9] * 4), method)
    assert "remedy: transform rows in make_feed." in str(error.value)


FILES = ["a", "b"]
WITHOUT_A_FILE = {
    "grain finds it": lambda feed: grain.experimental.InterleaveIterDataset(
        [grain.MapDataset.source(file).to_iter_dataset() for file in FILES[feed.shard_index :: 4]],
        cycle_length=1,
    ),
    "make_feed finds it": lambda feed: (
        grain.MapDataset.source(FILES[feed.shard_index]).map(ord).to_iter_dataset()
    ),
}


@pytest.mark.parametrize("make_feed", WITHOUT_A_FILE.values(), ids=WITHOUT_A_FILE)
def test_a_feed_without_a_file_is_named_and_asked_about(make_feed):
    batches = iter(grain_shard.feeds(make_feed, num_feeds=4).batch(4))
    with pytest.raises(IndexError) as error:
        next(batches)
    problem, remedy = str(error.value).splitlines()
    assert re.match(
        r"the feed failed before its first row \(.+\)\. There may be fewer files than feeds\. ",
        problem,
    )
    assert remedy.startswith("  remedy: pass a num_feeds that is at most the number of files")
    assert error.value.__notes__[0] == "grain_shard: in feed 2 of 4"
    assert type(error.value.__cause__) is IndexError


def test_a_feed_whose_glob_may_open_no_folder_is_told_the_limit_of_open_files(tmp_path):
    (tmp_path / "1").touch()

    def make_feed(feed):
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
        try:
            files = sorted(glob.glob(str(tmp_path / "*")))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        return grain.MapDataset.source(files[feed.shard_index]).map(int).to_iter_dataset()

    with pytest.raises(IndexError) as error:
        next(iter(grain_shard.feeds(make_feed, num_feeds=1).batch(1)))
    problem, remedy = str(error.value).splitlines()
    assert problem.endswith("glob then finds no file, and raises no error.")
    assert remedy.endswith("raise the limit of open files (ulimit -n).")


def test_an_index_error_of_a_later_row_is_not_asked_about():
    batches = iter(feeds_of(lambda feed, i: [5, 6][i], 1, 1, length=3))
    assert [next(batches).item(), next(batches).item()] == [5, 6]
    with pytest.raises(IndexError) as error:
        next(batches)
    assert "fewer files" not in str(error.value)


AFTER_BATCH = {
    "map": lambda ds: ds.map(lambda batch: {"id": batch["id"] * 2}),
    "filter": lambda ds: ds.filter(lambda batch: True),
    "seed, random_map": lambda ds: ds.seed(1).random_map(lambda batch, rng: batch),
    "prefetch": lambda ds: grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=1),
    "mix": lambda ds: grain.IterDataset.mix([ds, ds]),
}


@pytest.mark.parametrize("follow", AFTER_BATCH.values(), ids=AFTER_BATCH)
@pytest.mark.parametrize("rows", [None, "global", "local"])
def test_what_follows_the_batch_of_feeds_is_refused_with_what_to_do(follow, rows):
    ds = follow(numbers([2, 2]).batch(4))
    with pytest.raises(grain_shard.ShardingError) as refusal:
        ds.shard_to(data_mesh(2), rows=rows)
    assert str(refusal.value) == (
        f"{ds} follows the .batch of feeds, where a host has only the rows of its own feeds.\n"
        "  mesh:   data=2\n"
        "  remedy: move this transformation into make_feed, where it gets single rows: return"
        " ds.map(...). Then call .batch(B).shard_to(mesh) on the feeds, with no transformation in"
        " between."
    )


def test_after_an_error_the_batches_alone_raise_it_again_and_lose_no_row():
    failures = [OSError("once")]

    def row(feed, i):
        if (feed, i) == (1, 1) and failures:
            raise failures.pop()
        return {"id": np.int32(10 * feed + i)}

    batches = iter(feeds_of(row, 2, 2, length=4))
    assert next(batches)["id"].tolist() == [0, 10]
    state = batches.get_state()
    for _ in range(2):
        with pytest.raises(OSError, match="once"):
            next(batches)
    assert batches.get_state() == state
    batches.set_state(state)
    assert [batch["id"].tolist() for batch in batches] == [[1, 11], [2, 12], [3, 13]]
    batches.close()
    with pytest.raises(ValueError, match="closed iterator"):
        next(batches)


def test_after_an_interrupt_the_batches_alone_lose_no_row():
    interrupts = [KeyboardInterrupt()]

    def row(feed, i):
        if (feed, i) == (1, 1) and interrupts:
            raise interrupts.pop()
        return {"id": np.int32(10 * feed + i)}

    batches = iter(feeds_of(row, 2, 2, length=4))
    assert next(batches)["id"].tolist() == [0, 10]
    state = batches.get_state()
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert batches.get_state() == state
    assert [batch["id"].tolist() for batch in batches] == [[1, 11], [2, 12], [3, 13]]


def test_several_epochs_of_files_are_resumed_in_the_middle(tmp_path):
    """As `docs/data.md` chains them. Of `.repeat`, see test_feed_reads.py."""
    for part in range(16):
        table = pyarrow.table({"id": np.arange(25) + 25 * part})
        pyarrow.parquet.write_table(table, tmp_path / f"rows-{part:02}.parquet")

    def make_feed(feed):
        files = sorted(tmp_path.glob("rows-*.parquet"))[feed.shard_index :: feed.shard_count]

        def one_epoch(epoch):
            order = np.random.default_rng(epoch).permutation(len(files))
            stream = grain.experimental.ParquetIterDataset([str(files[i]) for i in order])
            stream = grain.experimental.WindowShuffleIterDataset(stream, window_size=50, seed=epoch)
            return stream.map(lambda row: {"id": np.int32(row["id"]), "epoch": np.int32(epoch)})

        epochs = [one_epoch(epoch) for epoch in range(3)]
        return grain.experimental.InterleaveIterDataset(epochs, cycle_length=1)

    ds = grain_shard.feeds(make_feed, num_feeds=8).batch(48)
    ds = ds.shard_to(data_mesh(8), remainder="error", mask_key=None)
    taken = with_states(ds)
    rows = {name: np.concatenate([batch[name] for batch, _ in taken]) for name in ("id", "epoch")}
    whole = [rows["id"][rows["epoch"] == epoch].tolist() for epoch in range(3)]
    assert all(sorted(of_epoch) == list(range(400)) for of_epoch in whole)
    assert whole[0] != whole[1] != whole[2]
    # After ten batches it is in the second epoch.
    assert_same(with_states(ds, taken[9][1]), taken[10:])
