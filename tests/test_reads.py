"""Reads that go side by side: the same batches whatever their number, and a clean life.

Sources meet at barriers, which open when so many reads are inside at once, and wait for events. So
nothing here depends on how fast anything is.
"""

import threading
from concurrent.futures import ThreadPoolExecutor

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_shard import BatchLayout, PadToDivisible, ShardBatch
from grain_shard.reading import batch_reads
from grain_shard.threads.pace import ReadPace
from tests.conftest import HANG_S, background_threads, data_mesh, eventually, ids, wait
from tests.counting_source import SOURCES, BatchedSource, Source, bad, nothing


@pytest.fixture(params=SOURCES.values(), ids=SOURCES.keys())
def source(request):
    return request.param


def record(i):
    return {"id": np.int32(i), "text": f"{i}", "pair": np.full((2,), i, np.float32)}


def batches(source, global_batch_size=8):
    return grain.MapDataset.source(source).map(record).batch(global_batch_size)


def in_order(num_records, global_batch_size):
    return [
        list(range(start, min(num_records, start + global_batch_size)))
        for start in range(0, num_records, global_batch_size)
    ]


@pytest.mark.usefixtures("one_record_at_a_time")
class TestSideBySide:
    @pytest.mark.parametrize(
        ("kind", "num_records", "together", "num_threads", "buffers"),
        [
            pytest.param(Source, 8, range(8), 8, {"cpu_buffer_size": 1}, id="of one batch"),
            pytest.param(Source, 32, range(8, 24), 16, {}, id="of several batches"),
            pytest.param(BatchedSource, 48, range(8, 40), 4, {}, id="calls for many records"),
        ],
    )
    def test_records_are_read_at_once(self, kind, num_records, together, num_threads, buffers):
        barrier = threading.Barrier(num_threads)

        def meet(index, number):
            if index in together:
                barrier.wait(HANG_S)

        ds = batches(kind(num_records, meet))
        sharded = ds.shard_to(data_mesh(2), num_threads=num_threads, **buffers)
        assert ids(sharded) == in_order(num_records, 8)

    def test_so_are_whole_batches_where_rows_cannot_be_had_alone(self):
        together = threading.Barrier(3)

        def after(batch):
            if 8 <= batch["id"][0] < 32:
                together.wait(HANG_S)
            return batch

        ds = batches(Source(48)).map(after).shard_to(data_mesh(2), num_threads=3)
        assert ids(ds) == in_order(48, 8)

    def test_one_large_call_is_made_where_one_thread_reads(self):
        source = BatchedSource(64)
        assert ids(batches(source).shard_to(data_mesh(2), num_threads=1)) == in_order(64, 8)
        assert max(map(len, source.calls)) >= 2 * 8

    def test_reads_that_wait_become_more_without_being_told(self):
        """Nobody says how many: it takes about 100 reads."""
        released = threading.Event()
        source = Source(10**6, lambda index, number: released.wait(0.01))
        with iter(batches(source).shard_to(data_mesh(2))) as iterator:
            eventually(lambda: next(iterator) and iterator.stats().read_threads >= 24)
            released.set()


@settings(max_examples=40, deadline=None)
@given(
    num_records=st.integers(1, 70),
    global_batch_size=st.integers(1, 17),
    num_threads=st.sampled_from([1, 2, 3, 8, 64]),
    buffer_size=st.integers(1, 5),
    many=st.booleans(),
    changes=st.lists(st.integers(1, 9), max_size=20),
)
def test_the_batches_are_the_same_however_many_threads_read(
    num_records, global_batch_size, num_threads, buffer_size, many, changes
):
    ds = (
        grain.MapDataset.source((BatchedSource if many else Source)(num_records))
        .seed(3)
        .shuffle()
        .map(record)
        .random_map(lambda r, rng: {**r, "noise": rng.random(dtype=np.float32)})
        .batch(global_batch_size)
    )
    settings_ = {"cpu_buffer_size": buffer_size, "num_threads": num_threads}
    with pytest.MonkeyPatch.context() as patch:
        remaining = list(changes)
        done = ReadPace.done

        def change(self, *args):
            done(self, *args)
            if remaining:
                self.count.threads = remaining.pop()

        patch.setattr(ReadPace, "done", change)
        got = list(ds.shard_to(data_mesh(1), **settings_))
    assert len(got) == len(ds)
    for batch, expected in zip(got, ds, strict=True):
        rows = len(expected["id"])
        assert batch["valid_mask"].sum() == rows
        for key, leaf in expected.items():
            np.testing.assert_array_equal(np.asarray(batch[key])[:rows], leaf)


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("size", [3, 8, 20, 100])
class TestSizesOfTasks:
    """A task takes the next records: a part of a batch, or parts of several batches."""

    @pytest.fixture(autouse=True)
    def of_a_size(self, size, monkeypatch):
        monkeypatch.setattr(batch_reads.BatchReads, "_records_at_a_time", lambda self: size)

    @pytest.mark.parametrize("remainder", ["pad", "drop"])
    def test_the_batches_are_the_same(self, source, num_threads, remainder):
        ds = batches(source(45, nothing)).shard_to(
            data_mesh(2), num_threads=num_threads, remainder=remainder
        )
        assert ids(ds) == in_order(45 if remainder == "pad" else 40, 8)

    def test_the_batches_before_an_error_come_first(self, source, num_threads):
        ds, seen = batches(source(45, bad(21, error=OSError))), []
        with (
            iter(ds.shard_to(data_mesh(2), num_threads=num_threads)) as it,
            pytest.raises(OSError, match="record 21"),
        ):
            seen.extend(ids([batch])[0] for batch in it)
        assert seen == in_order(16, 8)


@pytest.mark.usefixtures("one_record_at_a_time")
def test_an_earlier_batch_that_is_still_read_comes_before_an_error():
    """Batch 2 fails while batch 1 is read."""
    inside, failed = threading.Event(), threading.Event()

    def on_read(index, number):
        if index == 2:
            inside.set()
            wait(failed)
        if index == 4:
            wait(inside)
            threading.Timer(0.05, failed.set).start()
            raise OSError("four")

    ds = batches(Source(8, on_read), 2).shard_to(data_mesh(2), num_threads=3)
    with iter(ds) as iterator:
        assert ids([next(iterator), next(iterator)]) == [[0, 1], [2, 3]]
        with pytest.raises(OSError, match="four"):
            next(iterator)


@pytest.mark.usefixtures("one_record_at_a_time")
class TestLife:
    def test_a_first_read_that_takes_long_holds_up_no_other_pipeline(self):
        inside, release = threading.Event(), threading.Event()

        def block(index, number):
            inside.set()
            wait(release)

        def padding(on_read):
            """A batch of padding, which reads a record only to learn the structure."""
            ds = batches(Source(1, on_read)).pipe(PadToDivisible(8))
            return ds.pipe(ShardBatch(BatchLayout(8, (7,))))[0]["id"].tolist()

        with ThreadPoolExecutor(1) as thread:
            slow = thread.submit(padding, block)
            wait(inside)
            assert padding(nothing) == [0]
            assert not slow.done()
            release.set()
            assert slow.result(HANG_S) == [0]

    def test_a_system_that_allows_no_more_threads_is_no_error(self, monkeypatch):
        start, started = threading.Thread.start, []

        def refuse(thread):
            if thread.name.startswith("grain-shard-host"):
                if len(started) == 3:
                    raise RuntimeError("can't start new thread")
                started.append(thread)
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", refuse)
        ds = batches(Source(80)).shard_to(data_mesh(2), num_threads=64)
        assert ids(ds) == in_order(80, 8)
        assert len(started) == 3

    def test_an_interrupt_of_the_start_of_a_thread_leaves_no_thread(self, monkeypatch):
        start, interrupts = threading.Thread.start, [KeyboardInterrupt()]

        def interrupted(thread):
            start(thread)
            if thread.name.startswith("grain-shard-device") and interrupts:
                try:
                    raise interrupts.pop()
                finally:
                    raise RuntimeError("release unlocked lock")  # as Python does

        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with iter(batches(Source(80)).shard_to(data_mesh(2))) as iterator:
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
            assert ids(iterator) == in_order(80, 8)
        assert not background_threads()

    @pytest.mark.parametrize("method", ["begun", "done"])
    def test_an_error_of_the_stage_itself_is_no_hang(self, method, monkeypatch):
        def fail(self, *args):
            raise ZeroDivisionError("in the pace")

        monkeypatch.setattr(ReadPace, method, fail)
        with (
            iter(batches(Source(80)).shard_to(data_mesh(2))) as iterator,
            pytest.raises(ZeroDivisionError, match="in the pace"),
        ):
            list(iterator)
