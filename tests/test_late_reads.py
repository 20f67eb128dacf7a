"""A read that takes many times what others take is asked for again, and the first answer wins.

Sources wait for what can come only of a second request. So nothing here depends on how fast
anything is: without that request it would hang.
"""

import collections
import gc
import re
import threading
import time
import weakref

import grain
import jax
import numpy as np
import pytest
from grain_shard.reading.late import Lateness
from hypothesis import given, settings
from hypothesis import strategies as st

import grain_shard
from grain_shard.reading import late, reads, rows
from grain_shard.reading.faults import FAIL_AT_ONCE, Faults
from tests.conftest import HANG_S, background_threads, data_mesh, ids, wait
from tests.counting_source import SOURCES, BatchedSource, Source
from tests.test_reads import in_order

MS = 1e-3


SECOND = 5 * MS  # when the second read begins


def learned(*, reads=100, ms=5, processor_ms=0.0):
    """After so many reads, of which one begins every 5 ms."""
    lateness = Lateness()
    for i in range(reads):
        lateness.took(i * SECOND, i * SECOND + ms * MS, processor_ms * MS)
    return lateness


class TestLateness:
    """Of a read that began with the second of the others."""

    @pytest.mark.parametrize(
        ("lateness", "ms_later", "is_late"),
        [
            pytest.param(learned(), 12, False, id="twice as long is not many times"),
            pytest.param(learned(), 20, True, id="four times as long is"),
            pytest.param(learned(reads=2000, ms=1), 9, False, id="a moment is never late"),
            pytest.param(learned(reads=0), 10_000, False, id="nothing is known yet"),
            pytest.param(learned(reads=19), 10_000, False, id="one in twenty of 19 is none"),
            pytest.param(learned(reads=21), 10_000, True, id="of 21 it is one"),
            pytest.param(learned(processor_ms=1), 10_000, False, id="reads that compute"),
            pytest.param(learned(processor_ms=0.1), 10_000, True, id="reads that hardly do"),
        ],
    )
    def test_what_is_late(self, lateness, ms_later, is_late):
        assert lateness.is_late(SECOND, SECOND + ms_later * MS) is is_late

    def test_none_is_late_before_one_that_began_later_was_answered(self):
        lateness, last = learned(), 99 * 5 * MS
        assert lateness.is_late(last - 1 * MS, 10.0)
        assert not lateness.is_late(last, 10.0)

    def test_usual_is_what_nineteen_of_twenty_stay_below(self):
        lateness = Lateness()
        for i in range(2000):
            lateness.took(0.0, (100 if i % 10 == 0 else 1) * MS, 0.0)
        assert 290 * MS < lateness.patience_s < 400 * MS
        for i in range(2000):
            lateness.took(0.0, (100 if i % 50 == 0 else 4) * MS, 0.0)
        assert 11 * MS < lateness.patience_s < 20 * MS

    def test_one_read_in_twenty_is_asked_for_again_and_eight_in_a_row_at_most(self):
        lateness, asked = learned(reads=101), []
        for _ in range(5):
            while lateness.is_late(SECOND, 10.0):
                lateness.asks_again()
            asked.append(lateness.asked_again)
            for _ in range(40):
                lateness.took(0.0, 5 * MS, 0.0)
        assert asked == [5, 7, 9, 11, 13]
        lateness = learned(reads=10_000)
        while lateness.is_late(SECOND, 100.0):
            lateness.asks_again()
        assert lateness.asked_again == 8


@pytest.fixture
def impatient(monkeypatch):
    """What is late is late at once, and as much may be asked for again as is read."""
    monkeypatch.setattr(late, "_LEAST_S", 0.0)
    monkeypatch.setattr(late, "_COMPUTES", float("inf"))
    monkeypatch.setattr(late, "_SHARE", 1.0)
    monkeypatch.setattr(reads, "_READ_S", 0.0)  # one record at a time


def record(i):
    return {"id": np.int32(i)}


def sharded(source, **options):
    ds = grain.MapDataset.source(source).map(record).batch(8)
    return ds.shard_to(data_mesh(2), num_threads=4, **options)


@pytest.fixture(params=SOURCES.values(), ids=SOURCES)
def kind(request):
    return request.param


@pytest.mark.usefixtures("impatient")
class TestTheFirstAnswerWins:
    def test_a_second_request_comes_while_the_first_is_under_way(self, kind):
        second = threading.Event()

        def first_waits_for_the_second(index, number):
            if index == 17:
                wait(second) if number == 1 else second.set()

        source = kind(200, first_waits_for_the_second)
        with iter(sharded(source)) as iterator:
            assert ids(iterator) == in_order(200, 8)
            said = r"4 \(as asked for\); \d+ of \d+ reads were late and asked for again"
            assert re.fullmatch(said, iterator.read_threads)
        assert source.requests[17] == 2

    @pytest.mark.parametrize("num_records", [24, 200], ids=["near the end", "in the middle"])
    def test_nobody_waits_for_the_one_that_has_lost(self, kind, num_records):
        release = threading.Event()

        def first_waits(index, number):
            if index == 9 and number == 1:
                wait(release)

        with iter(sharded(kind(num_records, first_waits))) as iterator:
            assert ids(iterator) == in_order(num_records, 8)
            threads = background_threads()  # the one that is inside the source
            release.set()
        assert not any(thread.is_alive() for thread in threads)

    def test_no_more_than_one_more_request_is_made(self):
        release, both = threading.Event(), threading.Barrier(3)

        def all_wait(index, number):
            if index == 9:
                both.wait(HANG_S)
                wait(release)

        source = Source(800, all_wait)
        with iter(sharded(source)) as iterator:
            assert ids([next(iterator)]) == [list(range(8))]
            both.wait(HANG_S)
            release.set()
            assert ids(iterator) == in_order(800, 8)[1:]
        assert source.requests[9] == 2

    def test_what_the_user_maps_is_mapped_once(self, kind):
        mapped, second = collections.Counter(), threading.Event()

        def first_waits_for_the_second(index, number):
            if index == 17:
                wait(second) if number == 1 else second.set()

        def count(element):
            mapped[int(element["id"])] += 1
            return element

        source = kind(200, first_waits_for_the_second)
        ds = grain.MapDataset.source(source).map(record).map(count).batch(8)
        assert ids(ds.shard_to(data_mesh(2), num_threads=4)) == in_order(200, 8)
        assert source.requests[17] == 2
        assert mapped == collections.Counter(range(200))

    def test_a_mixture_of_sources_is_asked_again_too(self):
        second = threading.Event()

        def first_waits_for_the_second(index, number):
            if index == 17:
                wait(second) if number == 1 else second.set()

        of_source = [
            grain.MapDataset.source(Source(100, on_read)).map(record)
            for on_read in (first_waits_for_the_second, lambda index, number: None)
        ]
        ds = grain_shard.mix(of_source, {0: [1, 1]})[:200].batch(8)
        batches = list(ds.shard_to(data_mesh(2), num_threads=4))
        assert second.is_set()
        for batch, expected in zip(batches, ds, strict=True):
            np.testing.assert_array_equal(
                np.asarray(batch["id"])[: len(expected["id"])], expected["id"]
            )


@pytest.mark.usefixtures("impatient")
class TestErrors:
    """Each outcome of two requests, whichever of them is back first."""

    @pytest.mark.parametrize("failing", [1, 2])
    def test_an_error_of_one_is_none_if_the_other_is_answered(self, kind, failing):
        second = threading.Event()

        def one_fails(index, number):
            if index != 17:
                return
            wait(second) if number == 1 else second.set()
            # What comes third is asked to find out which record of several has failed.
            if number in (failing, 3):
                raise OSError("seventeen")

        source = kind(200, one_fails)
        assert ids(sharded(source)) == in_order(200, 8)

    def test_if_both_fail_it_is_one(self, kind):
        second = threading.Event()

        def both_fail(index, number):
            if index == 17:
                wait(second) if number == 1 else second.set()
                raise OSError("seventeen")

        seen = []
        with (
            iter(sharded(kind(200, both_fail), retries=0)) as iterator,
            pytest.raises(OSError, match="seventeen") as caught,
        ):
            seen.extend(ids([batch])[0] for batch in iterator)
        assert seen == in_order(16, 8)
        assert "record 17 of the dataset" in caught.value.__notes__[0]

    def test_what_has_failed_is_not_asked_for_again(self):
        asked = []

        def fail(index, number):
            if index == 17:
                asked.append(number)
                raise OSError("seventeen")

        with iter(sharded(Source(200, fail), retries=0)) as iterator:
            for _ in range(2):
                next(iterator)
            with pytest.raises(OSError, match="seventeen"):
                next(iterator)
        assert asked == [1, 2]  # the second time to find out which record it was


class OfMyOwn(grain.MapDataset):
    """A dataset that is no source: nobody can tell what it runs."""

    def __init__(self, source):
        super().__init__()
        self._of = source

    def __len__(self):
        return len(self._of)

    def __getitem__(self, index):
        return self.slice(index) if isinstance(index, slice) else self._of[index]


@pytest.mark.usefixtures("impatient")
class TestAskedOnce:
    """The first read of a record waits until others have gone as far as they can without it."""

    @pytest.mark.parametrize("how", ["told so", "no source", "a batch of its own", "one thread"])
    def test_is(self, how, monkeypatch):
        far_enough = threading.Event()

        def wait_for_the_others(index, number):
            if how != "one thread" and index == 9:
                wait(far_enough)
            elif index == 31:  # the last one for which there is room
                far_enough.set()

        source = Source(400, wait_for_the_others)
        ds, options = grain.MapDataset.source(source), {"num_threads": 31}
        if how == "no source":
            ds = OfMyOwn(source)
        ds = ds.map(record).batch(8)
        if how == "a batch of its own":
            ds = ds.map(lambda batch: batch)
        if how == "told so":
            options["reread_slow"] = False
        if how == "one thread":
            options["num_threads"] = 1
        assert ids(ds.shard_to(data_mesh(2), **options)) == in_order(400, 8)
        source.requests[0] = 1  # read once more, to learn what records look like
        assert source.requests == collections.Counter(range(400))


@settings(max_examples=40, deadline=None)
@given(
    num_records=st.integers(1, 70),
    global_batch_size=st.integers(1, 17),
    num_threads=st.sampled_from([2, 3, 8]),
    buffer_size=st.integers(1, 5),
    many=st.booleans(),
)
def test_the_batches_are_the_same_whatever_is_asked_for_again(
    num_records, global_batch_size, num_threads, buffer_size, many
):
    with pytest.MonkeyPatch.context() as patch:
        # Whatever is under way is late, in no time.
        patch.setattr(reads, "_READ_S", 0.0)
        patch.setattr(Lateness, "is_late", lambda self, start, now: True)
        patch.setattr(Lateness, "patience_s", 0.0)
        kind = BatchedSource if many else Source
        ds = (
            # Inside a read others get their turn, to ask for the same.
            grain.MapDataset.source(kind(num_records, lambda index, number: time.sleep(1e-4)))
            .seed(3)
            .shuffle()
            .map(record)
            .random_map(lambda r, rng: {**r, "noise": rng.random(dtype=np.float32)})
            .batch(global_batch_size)
        )
        got = list(ds.shard_to(data_mesh(1), cpu_buffer_size=buffer_size, num_threads=num_threads))
    for batch, expected in zip(got, ds, strict=True):
        for key, leaf in expected.items():
            np.testing.assert_array_equal(np.asarray(batch[key])[: len(leaf)], leaf)


def test_a_read_that_has_lost_does_not_keep_the_memory_of_its_batch():
    ds = grain.MapDataset.range(8).map(record).batch(8)
    reader = rows.row_reader(ds)
    made = reader.begin([0], [None], Faults(FAIL_AT_ONCE))[0]
    (elements,) = reader.read([reads.Piece(made, 0, 8)], float("inf"))
    made.write(elements, 0, float("inf"))
    batch = made.finish()
    arrays = [weakref.ref(leaf) for leaf in jax.tree.leaves(batch)]
    del batch, elements
    gc.collect()
    assert [ref() for ref in arrays] == [None]
