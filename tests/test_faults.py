"""Reads that fail are tried again; records that stay bad end the run, or are left out.

Pauses take no time here (see conftest), but for the tests of their end.
"""

import collections
import contextlib
import errno
import gc
import io
import re
import ssl
import threading
import types
import urllib.error
import weakref

import grain
import jax
import numpy as np
import pytest
import requests
from hypothesis import given, settings
from hypothesis import strategies as st

import grain_shard
from grain_shard import (
    BadRecordsError,
    BatchLayout,
    BatchSchedule,
    GrainShardError,
    PadToDivisible,
    Retries,
    ShardBatch,
)
from grain_shard.reading import faults
from grain_shard.reading.faults import FaultRules, Faults
from tests.conftest import (
    assert_ended,
    background_threads,
    data_mesh,
    eventually,
    ids,
    refused,
    to_numpy,
    wait,
)
from tests.counting_source import SOURCES, BatchedSource, InFiles, Source, bad
from tests.pipelines import IN_TURN, after, flat, going_on, shared_out


def named(name, module, base=Exception, **attributes):
    """An error of a class of some library's, which need not be there."""
    return type(name, (base,), {"__module__": module, **attributes})("it failed")


def status(code):
    return types.SimpleNamespace(status_code=code)


@pytest.mark.parametrize(
    ("error", "heals"),
    [
        (OSError("anything"), True),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (FileNotFoundError(), False),
        (PermissionError(), False),
        (IsADirectoryError(), False),
        (OSError(errno.EIO, "Input/output error"), True),
        (OSError(errno.ENOSPC, "No space left on device"), False),
        (OSError(errno.EROFS, "Read-only file system"), False),
        (ssl.SSLEOFError(), True),
        (ssl.SSLCertVerificationError(), False),
        (urllib.error.URLError(ssl.SSLCertVerificationError()), False),
        (urllib.error.URLError(ConnectionResetError()), True),
        (io.UnsupportedOperation("read"), False),
        (ValueError("record 3 is corrupt"), False),
        (KeyError("image"), False),
        (KeyboardInterrupt(), False),
        (requests.exceptions.ConnectionError(), True),
        (requests.exceptions.ReadTimeout(), True),
        (requests.exceptions.InvalidURL(), False),
        (named("ServiceUnavailable", "google.api_core.exceptions", code=503), True),
        (named("TooManyRequests", "google.api_core.exceptions", code=429), True),
        (named("NotFound", "google.api_core.exceptions", code=404), False),
        (named("HTTPError", "requests.exceptions", OSError, response=status(502)), True),
        (named("HTTPError", "requests.exceptions", OSError, response=status(403)), False),
        (named("ConnectionError", "requests.exceptions", OSError, response=None), True),
        (named("HTTPError", "urllib.error", OSError, code=404), False),
        (named("TransportError", "google.auth.exceptions", retryable=True), True),
    ],
    ids=lambda value: str(value) if isinstance(value, bool) else type(value).__name__,
)
def test_what_a_second_try_may_heal_is_tried_again_and_all_else_comes_at_once(error, heals, kind):
    def fail(index, number):
        if (index, number) == (1, 1):
            raise error

    ds = batches(kind(4, fail)).shard_to(data_mesh(1), num_threads=1)
    if heals:
        assert ids(ds) == [[0, 1, 2, 3]]
    else:
        caught, counts = failure_of(ds, type(error))
        assert caught is error
        assert counts.retries == 0


def all_of(batches):
    """The ids of all valid rows."""
    return flat(ids(batches))


def masked(ds, devices=2, **options):
    return ds.shard_to(data_mesh(devices), **{"on_bad_record": "mask", **options})


@pytest.fixture(params=SOURCES.values(), ids=SOURCES)
def kind(request):
    return request.param


def record(i):
    return {"id": np.int32(i), "pair": np.full(2, i, np.float32)}


def first_time(index, number):
    """Every third record fails when it is asked for first."""
    if index % 3 == 0 and number == 1:
        raise ConnectionResetError(f"record {index}")


def batches(source, global_batch_size=8):
    return grain.MapDataset.source(source).map(record).batch(global_batch_size)


def of_feeds(source, read_options=None):
    return shared_out(grain.MapDataset.source(source).map(record), 2, 8, read_options)


def failure_of(ds, error, match=None):
    """The error that ends the loop, and the faults that were counted."""
    with iter(ds) as iterator, pytest.raises(error, match=match) as caught:
        list(iterator)
    return caught.value, iterator.stats().faults


PIPELINES = {
    "random access": lambda source: batches(source).shard_to(data_mesh(2)),
    "one thread": lambda source: batches(source).shard_to(data_mesh(2), num_threads=1),
    "workers": lambda source: batches(source).shard_to(data_mesh(2), num_workers=2),
    "whole batches": lambda source: (
        grain.MapDataset.source(source)
        .map(record)
        .batch(8, batch_fn=lambda rows: jax.tree.map(lambda *leaves: np.stack(leaves), *rows))
        .shard_to(data_mesh(2))
    ),
    "feeds": lambda source: of_feeds(source).shard_to(data_mesh(2)),
    "feeds in turn": lambda source: of_feeds(source, IN_TURN).shard_to(data_mesh(2)),
    "feeds in workers": lambda source: of_feeds(source).shard_to(data_mesh(2), num_workers=2),
    "stream": lambda source: (
        grain.MapDataset.source(source).map(record).to_iter_dataset().filter(lambda row: True)
        .batch(8).shard_to(data_mesh(2))
    ),
    "prefetch_to_device": lambda source: grain_shard.prefetch_to_device(
        batches(source).map(lambda batch: {**batch, "valid_mask": batch["id"] >= 0})
    ),
}  # fmt: skip


class TestRetries:
    @pytest.mark.parametrize(
        ("name", "kind"),
        [
            (name, kind)
            for name in PIPELINES
            for kind in SOURCES
            if "workers" not in name or kind == "many in a call"
        ],
    )
    def test_what_fails_once_is_had_by_another_try(self, name, kind):
        pipeline, kind = PIPELINES[name], SOURCES[kind]
        with contextlib.closing(iter(pipeline(kind(60, first_time)))) as iterator:
            rows = all_of(iterator)
            assert sorted(rows) == list(range(60))
            counts = iterator.stats().faults
        assert counts.retries > 0
        assert counts.bad_records == counts.records == 0  # counted only where some may be left out

    def test_what_a_function_raises_is_not_tried_again(self):
        calls = collections.Counter()

        def load(i):
            calls[i] += 1
            if i == 5:
                raise OSError("no network")
            return record(i)

        ds = grain.MapDataset.range(16).map(load).batch(8).shard_to(data_mesh(2), num_threads=1)
        _, counts = failure_of(ds, OSError, "no network")
        assert counts.retries == 0
        assert calls[5] == 2  # the second time to find out which record it was

    def test_unless_its_class_is_named_and_then_it_is_given_anew_what_it_may_have_changed(self):
        def load(row):
            number = row.pop("id")  # a second call with the same dict would miss it
            if number == 5 and not failed:
                failed.append(number)
                raise LookupError("once")
            return record(number)

        class Rows(Source):
            def __getitem__(self, index):
                return {"id": super().__getitem__(index)}

        failed = []
        ds = grain.MapDataset.source(Rows(16, first_time)).map(load).batch(8)
        retries = Retries(on=LookupError)
        with iter(ds.shard_to(data_mesh(2), num_threads=1, retries=retries)) as iterator:
            assert all_of(iterator) == list(range(16))
            assert iterator.stats().faults.retries == 7  # of 5, and of reads of 0, 3, ..., 15

    def test_the_pauses_grow_up_to_a_longest(self, monkeypatch):
        clock, tries = [0.0], []
        monkeypatch.setattr(faults, "_FIRST_PAUSE_S", 0.1)
        monkeypatch.setattr(faults._lengths, "uniform", lambda low, high: high)
        monkeypatch.setattr(faults.time, "monotonic", lambda: clock[0])
        monkeypatch.setattr(faults.time, "sleep", lambda s: clock.__setitem__(0, clock[0] + s))

        def fail():
            tries.append(clock[0])
            raise OSError("record 0")

        result = Faults(FaultRules(retries=7)).recovered(OSError("first"), fail)
        assert "record 0" in str(result.error)
        pauses = np.diff([0.0, *tries])
        np.testing.assert_allclose(pauses, [0.1, 0.3, 0.9, 2.7, 8.1, 10, 10])

    def test_nothing_is_tried_again_once_it_is_stopped_in_a_pause(self, monkeypatch):
        counting, tries = Faults(FaultRules(retries=7)), []
        monkeypatch.setattr(faults, "_FIRST_PAUSE_S", 0.1)
        monkeypatch.setattr(faults.time, "sleep", lambda seconds: counting.stop())
        error = OSError("away")
        assert counting.recovered(error, lambda: tries.append(1)).error is error
        assert not tries

    def test_what_a_failed_read_held_is_let_go_without_the_garbage_collector(self, kind):
        """A frame that has failed, and whose read was healed by another try, may hold much."""

        class Buffer:
            """Memory that a read needs while it lasts."""

        held = weakref.WeakSet()

        def fail(index, number):
            buffer = Buffer()
            held.add(buffer)
            if number == 1:
                raise OSError("once")

        gc.collect()
        gc.disable()
        try:
            ds = batches(kind(16, fail))
            assert all_of(ds.shard_to(data_mesh(2))) == list(range(16))
            eventually(lambda: not held)  # a thread may not be done yet
        finally:
            gc.enable()


@pytest.mark.parametrize("how", ["close", "collect"])
@pytest.mark.parametrize("name", ["random access", "feeds", "feeds in turn", "stream"])
def test_a_pause_of_ten_minutes_ends_as_soon_as_nobody_waits_for_it(name, how, kind, monkeypatch):
    monkeypatch.setattr(faults, "_FIRST_PAUSE_S", 600.0)
    monkeypatch.setattr(faults, "_LONGEST_PAUSE_S", 600.0)
    iterator = iter(PIPELINES[name](kind(64, bad(3, error=OSError))))
    iterator.start_prefetch()
    eventually(lambda iterator=iterator: iterator.stats().faults.retries)
    threads = background_threads()
    if how == "close":
        iterator.close()
    del iterator
    gc.collect()
    assert_ended(threads)


class TestMask:
    @settings(max_examples=60, deadline=None)
    @given(data=st.data())
    def test_all_other_rows_are_where_they_were(self, data):
        num_records = data.draw(st.integers(1, 50), "records")
        global_batch_size = data.draw(st.integers(1, 12), "batch size")
        several = data.draw(st.booleans(), "many in a call")
        threads = data.draw(st.sampled_from([1, 2, 8]), "threads")
        # At least one is good, or nothing tells what a record looks like.
        everywhere = st.sets(st.integers(0, num_records - 1), max_size=num_records - 1)
        corrupt, undecodable = data.draw(everywhere, "corrupt"), data.draw(everywhere, "odd")
        flaky = data.draw(everywhere, "flaky")
        if len(corrupt | undecodable) == num_records:
            undecodable = set()

        def fail(index, number):
            if index in corrupt:
                raise ValueError("corrupt")
            if index in flaky and number == 1:
                raise OSError("once")

        def decode(i, fails=True):
            if fails and i in undecodable:
                raise LookupError("odd")
            return {"id": np.int32(i), "text": f"record {i}"}

        def augment(row, rng):
            return {**row, "noise": rng.normal(size=2).astype(np.float32)}

        def pipeline(source, decode):
            ds = grain.MapDataset.source(source).seed(4).shuffle().map(decode)
            return ds.random_map(augment).batch(global_batch_size)

        source = (BatchedSource if several else Source)(num_records, fail)
        ds = pipeline(source, decode).shard_to(
            data_mesh(1), num_threads=threads, on_bad_record="mask", max_bad_records=50
        )
        with iter(ds) as iterator:
            got = [to_numpy(batch) for batch in iterator]
            counts = iterator.stats().faults
        expected = list(pipeline(np.arange(num_records), lambda i: decode(i, False)))
        missing = corrupt | undecodable
        expected_ids = np.concatenate([batch["id"] for batch in expected])
        assert len(got) == len(expected)
        for batch, wanted in zip(got, expected, strict=True):
            is_good = ~np.isin(wanted["id"], list(missing))
            mask, rows = batch.pop("valid_mask"), len(is_good)  # the last batch may be short
            np.testing.assert_array_equal(mask[:rows], is_good)
            assert not mask[rows:].any()
            assert batch.keys() == wanted.keys()
            for name, leaf in batch.items():
                assert leaf.dtype == wanted[name].dtype or name == "text"
                np.testing.assert_array_equal(leaf[mask], wanted[name][is_good])
                assert not leaf[~mask].any(), "bad rows are padding"
        assert counts.bad_records == len(missing) == len(counts.listed)
        # Each is named by its place in the source, from before the shuffle.
        assert {one.origin.record for one in counts.listed} == missing
        assert all(expected_ids[one.record] == one.origin.record for one in counts.listed)
        assert counts.records == num_records

    @settings(max_examples=60, deadline=None)
    @given(
        num_records=st.integers(2, 40),
        rows_per_shard=st.integers(1, 3),
        divisor=st.integers(1, 6),
        missing=st.sets(st.integers(1, 39)),
        several=st.booleans(),
        data=st.data(),
    )
    def test_on_any_hosts(self, num_records, rows_per_shard, divisor, missing, several, data):
        global_batch_size = rows_per_shard * divisor
        shards = data.draw(st.sets(st.integers(0, divisor - 1), min_size=1), "shards of a host")
        layout = BatchLayout(divisor, tuple(sorted(shards)))
        source = (BatchedSource if several else Source)(num_records, bad(*missing))
        ds = batches(source, global_batch_size).pipe(PadToDivisible(divisor))
        ds = ds.pipe(ShardBatch(layout))
        rules = FaultRules(on_bad_record="mask", max_bad_records=1.0)
        held = layout.rows(global_batch_size)
        for index in range(len(ds)):
            got = ds.host_rows.read_batch(index, Faults(rules))
            indices = index * global_batch_size + held
            is_good = [i < num_records and i not in missing for i in indices.tolist()]
            np.testing.assert_array_equal(got["valid_mask"], is_good)
            np.testing.assert_array_equal(got["id"], np.where(is_good, indices, 0))

    def test_a_batch_may_be_all_bad_and_the_first_one(self, kind):
        ds = masked(batches(kind(24, bad(*range(8)))), 4)
        assert ids(ds) == [[], list(range(8, 16)), list(range(16, 24))]
        assert ds.abstract_batch()["pair"].shape == (8, 2)

    def test_if_no_record_tells_what_rows_look_like_it_is_an_error(self, kind):
        ds = masked(batches(kind(24, bad(*range(24)))), 4)
        with pytest.raises(BadRecordsError, match="none of the first 24 records can be read"):
            next(iter(ds))
        with pytest.raises(BadRecordsError, match="ValueError: record 23 is corrupt"):
            ds.abstract_batch()

    def test_schedules_epochs_and_seek(self):
        source = Source(20, bad(2, 13))
        records = grain.MapDataset.source(source).map(record)
        ds = masked(records.pipe(BatchSchedule({0: 4, 2: 8})))
        by_step = [[0, 1, 3], [4, 5, 6, 7], [8, 9, 10, 11, 12, 14, 15], [16, 17, 18, 19]]
        assert ids(ds) == by_step
        with ds.epochs(2) as epochs:
            assert ids(next(epochs)) == by_step
        with iter(ds) as iterator:
            iterator.seek(2)
            assert ids(iterator) == by_step[2:]
            assert [one.record for one in iterator.stats().faults.listed] == [13]

    def test_the_state_knows_nothing_of_it(self):
        (_, state), (_, good) = (
            after(masked(batches(Source(40, fail))), 2) for fail in (bad(2, 13), bad())
        )
        assert state == good
        rest = going_on(masked(batches(Source(40, bad(2, 13, 30))), 4), state)
        assert rest[:2] == [list(range(16, 24)), [24, 25, 26, 27, 28, 29, 31]]

    @pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, GrainShardError])
    @pytest.mark.parametrize("name", ["random access", "feeds"])
    def test_an_error_that_is_about_more_than_a_record_leaves_none_out(self, name, error):
        source = Source(40, bad(3, error=error))
        ds = batches(source) if name == "random access" else of_feeds(source)
        assert failure_of(masked(ds), error)[1].bad_records == 0


class TestTooMany:
    @pytest.mark.parametrize(
        ("most", "ends", "num_workers"),
        [(3, False, 0), (np.int64(3), False, 1), (2, True, 1), (2, True, 0), (0, True, 0)],
    )
    def test_a_number(self, most, ends, num_workers):
        ds = batches(Source(40, bad(1, 17, 33)))
        ds = masked(ds, max_bad_records=most, num_workers=num_workers)
        if not ends:
            assert len(ids(ds)) == 5
            return
        error, _ = failure_of(ds, BadRecordsError, rf"max_bad_records={most} allows")
        assert "record 1 of the dataset before .batch: ValueError: record 1 is" in str(error)

    @pytest.mark.parametrize(
        ("num_records", "global_batch_size", "indices", "most", "valid_rows"),
        [
            # A share of a thousand records at least: ten of 1,500 are bad, all at the beginning.
            (1500, 50, range(10, 20), 0.011, 1490),
            (1500, 50, range(10, 20), 0.009, None),
            # A share of the records read.
            (10_000, 100, range(0, 10_000, 50), 0.03, 9800),
        ],
    )
    def test_a_share(self, num_records, global_batch_size, indices, most, valid_rows):
        source = BatchedSource(num_records, bad(*indices))
        ds = masked(batches(source, global_batch_size), max_bad_records=most)
        if valid_rows is None:
            with pytest.raises(BadRecordsError, match="10 of "):
                list(ds)
        else:
            assert len(all_of(ds)) == valid_rows

    @pytest.mark.parametrize("feeds", [False, True], ids=["random access", "feeds"])
    def test_a_source_that_is_away_is_not_asked_for_every_record(self, kind, feeds):
        source = kind(4000, bad(*range(1000, 4000), error=ConnectionError))
        ds = of_feeds(source) if feeds else batches(source, 200)
        message = r"(?s)could not be read in 5 tries.*reach the source"
        ds = masked(ds, max_bad_records=5, num_threads=1)
        _, counts = failure_of(ds, BadRecordsError, message)
        # Four for each of 6, and for those that were read beside them; not for each of 3,000.
        assert counts.retries < 600


class TestFeeds:
    """A bad record is dropped, as a filter drops it: rows after it come sooner."""

    @pytest.mark.parametrize(
        ("num_workers", "options", "kind"),
        [
            (0, None, Source),
            (0, None, BatchedSource),
            (0, IN_TURN, Source),
            (0, IN_TURN, BatchedSource),
            (2, None, BatchedSource),
        ],
    )
    def test_bad_records_are_dropped_and_counted(self, num_workers, options, kind):
        ds = masked(of_feeds(kind(40, bad(0, 6, 17)), options), num_workers=num_workers)
        with iter(ds) as iterator:
            rows = ids(iterator)
            counts = iterator.stats().faults
        even = [i for i in range(0, 40, 2) if i not in (0, 6)]
        odd = [i for i in range(1, 40, 2) if i != 17]
        assert rows == [even[k : k + 4] + odd[k : k + 4] for k in range(0, 20, 4)]
        assert (counts.bad_records, counts.records) == (3, 40)
        assert sorted((one.feed, one.record) for one in counts.listed) == [(0, 0), (0, 3), (1, 8)]

    def test_those_after_the_end_do_not_count_however_far_other_feeds_are(self):
        """Feed 0 ends after two batches. By then feed 1 has read the record of its turn 4."""
        is_past = threading.Event()

        def make_feed(feed):
            def row(i):
                if feed.shard_index == 1 and i == 4:
                    is_past.set()
                    raise ValueError("after the end")
                if feed.shard_index == 2 and i == 0:
                    wait(is_past)
                    raise ValueError("before the end")
                return {"id": np.int32(i)}

            length = 2 if feed.shard_index == 0 else 20
            return grain.MapDataset.range(length).map(row).to_iter_dataset()

        ds = grain_shard.feeds(make_feed, num_feeds=3).batch(3)
        how = {"remainder": "drop", "on_bad_record": "mask", "max_bad_records": 1}
        with iter(ds.shard_to(data_mesh(1), cpu_buffer_size=5, num_threads=3, **how)) as iterator:
            assert ids(iterator) == [[0, 0, 1], [1, 1, 2]]
            assert [one.feed for one in iterator.stats().faults.listed] == [2]

    def test_a_state_goes_on_after_them(self):
        def feeds(devices):
            return masked(of_feeds(Source(40, bad(0, 6, 17))), devices)

        seen, state = after(feeds(2), 2)
        assert seen + going_on(feeds(4), state) == ids(feeds(2))


def shuffled(source):
    return grain.MapDataset.source(source).shuffle(seed=1)


def mixed(source):
    return grain_shard.mix([grain.MapDataset.source(source), shuffled(source)], {0: (1, 1)})


# What stands between the source and .batch, and whether the way through it is known.
WAYS = {
    "nothing": (grain.MapDataset.source, True),
    "a shuffle": (shuffled, True),
    "a slice of a shuffle": (lambda source: shuffled(source)[1::2], True),
    "repeated": (lambda source: shuffled(source).repeat(3), True),
    "mixed": (mixed, True),
    "concatenated": (lambda s: grain.MapDataset.concatenate([shuffled(s), shuffled(s)]), True),
    "no source": (lambda source: grain.MapDataset.range(40).map(lambda i: source[i]), False),
}


class TestOrigins:
    """A record that fails is named by its place in the source, where the way there is known."""

    @pytest.mark.parametrize(("records", "is_known"), WAYS.values(), ids=WAYS)
    def test_of_each_record(self, records, is_known):
        numbers = list(records(range(40)))
        assert len(set(numbers)) > 5
        # One record is good, to tell what a row looks like.
        all_others = set(numbers) - {numbers[0]}
        ds = records(InFiles(40, bad(*all_others))).map(record).batch(8)
        with iter(masked(ds, max_bad_records=1.0)) as iterator:
            list(iterator)
            origins = {one.record: one.origin for one in iterator.stats().faults.listed}
        assert origins == {
            index: (number, "InFiles", f"file-{number // 10}", number % 10) if is_known else None
            for index, number in enumerate(numbers)
            if number in all_others
        }

    @pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=pytest.mark.slow)])
    def test_the_list_and_the_error_name_the_file(self, num_workers):
        ds = shuffled(InFiles(40, bad(17))).map(record).batch(8)
        above = list(shuffled(np.arange(40))).index(17)
        options = {"on_bad_record": "mask", "num_workers": num_workers}
        with iter(ds.shard_to(data_mesh(2), **options)) as iterator:
            list(iterator)
            (listed,) = iterator.stats().faults.listed
        error, origin = "ValueError: record 17 is corrupt", (17, "InFiles", "file-1", 7)
        assert listed == (above, error, None, origin)
        none_may_be_bad = ds.shard_to(data_mesh(2), max_bad_records=0, **options)
        error, _ = failure_of(none_may_be_bad, BadRecordsError)
        assert (
            "    record 17 of the source InFiles (record 7 of file-1), which is "
            f"record {above} of the dataset before .batch: ValueError: record 17 is corrupt\n"
        ) in str(error)

    def test_the_error_counts_the_bad_record_among_the_records(self):
        ds = masked(batches(Source(8, bad(0))), max_bad_records=0, num_threads=1)
        (read,) = re.findall(
            r"^1 of (\d+) records of this host", str(failure_of(ds, BadRecordsError)[0])
        )
        assert int(read) >= 1

    def test_a_feed_names_the_file(self):
        ds = masked(of_feeds(InFiles(40, bad(0, 6, 17))), max_bad_records=2)
        named = "record 17 of the source InFiles (record 7 of file-1), which is record 8 of feed 1"
        assert f"{named}: ValueError" in str(failure_of(ds, BadRecordsError)[0])

    @pytest.mark.parametrize("where", [lambda i: 1 / 0, lambda i: "here", lambda i: (i, i), None])
    def test_a_method_of_that_name_that_says_something_else_does_no_harm(self, where):
        source = Source(8, bad(3))
        source.where = where
        with iter(masked(batches(source))) as iterator:
            list(iterator)
            (listed,) = iterator.stats().faults.listed
        assert listed.origin == (3, "Source", None, None)


PLACE = (
    "grain_shard: while evaluating record 5 of the source Source, which is record 5 of the dataset"
    " before .batch, for batch 5"
)
PLACE_OF_SEVERAL = (
    "grain_shard: while evaluating one of the records 4 to 7 of the dataset before .batch, for"
    " batch 1"
)
SUCCEEDED = (
    ". The read failed. Another read, made for this message, succeeded. If the source is not safe"
    " for several threads, hold a lock around its reads. "
)
NOT_AGAIN = (
    f"{SUCCEEDED}By default a read is not tried again after a RuntimeError. To try it again, pass"
    " retries=Retries"
)
MORE = f"{SUCCEEDED}For more tries, pass retries=Retries"


@pytest.mark.parametrize(
    ("kind", "global_batch_size", "error", "retries", "tries", "advice"),
    [
        (Source, 1, RuntimeError, 4, 1, f"{NOT_AGAIN}(4, on=RuntimeError)"),
        (BatchedSource, 4, RuntimeError, 4, 1, f"{NOT_AGAIN}(4, on=RuntimeError)"),
        (Source, 1, RuntimeError, Retries(2, on=KeyError), 1, f"{NOT_AGAIN}(2, on=RuntimeError)"),
        (Source, 1, OSError, 0, 1, f"{MORE}(4, on=OSError)"),
        (Source, 1, OSError, 4, 5, f"{MORE}(8, on=OSError)"),
        (Source, 1, KeyError, Retries(1, on=LookupError), 2, f"{MORE}(2, on=KeyError)"),
        # A second read fails, too.
        (Source, 1, OSError, 0, 1, ""),
        (Source, 1, OSError, 2, 3, ""),
    ],
)
def test_an_error_says_how_often_it_was_tried_and_how_to_have_it_tried_again_if_that_may_help(
    kind, global_batch_size, error, retries, tries, advice
):
    """It ends the run, also if a second read, made to find its record, succeeds."""

    def flaky(index, number):
        if index == 5 and (number <= tries or not advice):
            raise error("flaky")

    source = kind(8, flaky)
    ds = batches(source, global_batch_size).shard_to(data_mesh(1), num_threads=1, retries=retries)
    caught, counts = failure_of(ds, error, "flaky")
    assert counts.retries == tries - 1
    if kind is Source:
        assert source.requests[5] == tries + 1  # once more at the end, for the message
    tried = [f"grain_shard: the read was tried {tries} times"] if tries > 1 else []
    place = PLACE_OF_SEVERAL if kind is BatchedSource else PLACE
    notes = [note for note in caught.__notes__ if note.startswith("grain_shard")]
    assert notes == [*tried, place + advice]


ROWS = grain.MapDataset.range(64).map(record)
STREAM = ROWS.to_iter_dataset(IN_TURN)


def numbers(feed):
    return grain_shard.from_iterable(lambda: iter([{"id": np.zeros(2)}]), rows="local")


@pytest.mark.parametrize(
    ("build", "problem"),
    [
        (lambda: masked(ROWS.batch(8), mask_key=None), "needs a mask"),
        (lambda: masked(ROWS.batch(8).map(dict)), "rows that are read one by one"),
        (lambda: masked(ROWS.batch(8, batch_fn=np.stack)), "rows that are read one by one"),
        (lambda: masked(STREAM.batch(8), rows="global"), "needs random access or feeds"),
        (lambda: masked(numbers(None)), "needs random access or feeds"),
        (
            lambda: masked(grain_shard.feeds(numbers, num_feeds=2).batch(8)),
            "feeds that begin with a grain.MapDataset, and feed 0 does not",
        ),
        (lambda: masked(ROWS.batch(8), on_bad_record="skip"), "on_bad_record='skip' is not one of"),
        *(
            (
                lambda most=most: masked(ROWS.batch(8), max_bad_records=most),
                "neither a whole number of records nor a share of them",
            )
            for most in (1.5, -1, True, float("nan"), "1")
        ),
        (lambda: masked(ROWS.batch(8), retries=-1), "retries=-1 is not an integer of at least 0"),
        (lambda: masked(ROWS.batch(8), retries="often"), "retries='often' is not an integer"),
        (lambda: Retries(on="OSError"), "on='OSError' is not an exception class"),
        (lambda: Retries(on=(KeyError, KeyboardInterrupt)), "is not an exception class"),
    ],
)
def test_refused_when_built(build, problem):
    with refused(problem):
        build()


def test_a_flood_of_errors_is_no_flood_of_lines(caplog):
    ds = batches(Source(400, lambda i, number: bad(i)(i, 0) if i % 2 else first_time(i, number)))
    with caplog.at_level("WARNING"):
        list(masked(ds, max_bad_records=200))
    assert len([line for line in caplog.messages if "record" in line]) <= 2


def bare(element, *rest):
    """Returns the element, or ends like a bare ``next()`` if it is, or holds, number 13."""
    if 13 in np.atleast_1d(element["id"] if isinstance(element, dict) else element):
        next(iter([]))
    return element


def feeds_of_all(make):
    return grain_shard.feeds(lambda feed: make(), num_feeds=1).batch(8)


BARE_ROWS = ROWS.map(bare).to_iter_dataset(IN_TURN)
RECORD = "record 13 of the dataset"
BARE = {
    "records": (lambda: ROWS.map(bare).batch(8), RECORD),
    "batches": (lambda: ROWS.batch(8).map(bare), "batch 1 of the dataset"),
    "stream of mapped records": (lambda: BARE_ROWS.batch(8), RECORD),
    "feed of mapped records": (lambda: feeds_of_all(lambda: BARE_ROWS), RECORD),
}


@pytest.mark.parametrize(("build", "named"), BARE.values(), ids=BARE)
def test_a_bare_next_in_a_function_of_a_record_is_an_error_and_no_end(build, named):
    seen = []
    with iter(build().shard_to(data_mesh(2))) as batches:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="raised StopIteration") as failure:
                seen.extend(batches)
    assert ids(seen) == [list(range(8))]
    told = "".join([str(failure.value), *failure.value.__notes__])
    assert named in told
    assert "give each next(...) in " in told
