"""`HedgedSource`: what comes late is asked for again, and the first answer wins.

Sources wait for what can come only of a second request. So nothing here depends on how fast
anything is: without that request it would hang.
"""

import collections
import contextlib
import functools
import gc
import itertools
import pickle
import sys
import threading
from types import SimpleNamespace

import cloudpickle
import grain
import numpy as np
import pytest

import grain_shard
from grain_shard import HedgedSource, ShardingError
from grain_shard.reading.origin import Origin
from grain_shard.sources import daemon_threads, hedged_source
from grain_shard.sources.daemon_threads import Call, DaemonThreads
from tests.conftest import (
    HANG_S,
    assert_ended,
    background_threads,
    data_mesh,
    eventually,
    ids,
    wait,
)
from tests.counting_source import SOURCES, BatchedSource, InFiles, Source, bad, nothing
from tests.pipelines import after, going_on
from tests.test_faults import PIPELINES
from tests.test_lifecycle import run
from tests.test_reads import IMPATIENT, in_order


@pytest.mark.parametrize(
    ("milliseconds", "least", "most"),
    [
        pytest.param([1] * 9 + [100], 90, 140, id="one in ten is longer"),
        pytest.param([4] * 49 + [100], 3.6, 7, id="one in fifty is longer"),
    ],
)
def test_the_usual_time_is_one_that_nineteen_of_twenty_reads_do_not_exceed(
    milliseconds, least, most, monkeypatch
):
    now = [0.0]

    def takes(index, number):
        now[0] += milliseconds[index % len(milliseconds)] / 1e3

    monkeypatch.setattr(hedged_source, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    hedged = HedgedSource(Source(2000, takes))
    for i in range(len(hedged)):
        hedged[i]
    assert least < 1e3 * hedged._usual_s < most


@pytest.mark.parametrize(("reads", "repeated"), [(0, 0), (19, 0), (21, 1), (50, 2), (400, 8)])
def test_one_read_in_twenty_is_repeated_and_eight_in_a_row_at_most(reads, repeated):
    hedged = HedgedSource(range(reads))
    assert list(hedged) == list(range(reads))
    first = Call(int, (), beside=None)
    again = iter(lambda: hedged._repeated(first, (int,)), None)
    assert len(list(again)) == hedged.asked_again == repeated


@pytest.fixture
def impatient(monkeypatch):
    for name, value in IMPATIENT.items():
        monkeypatch.setattr(hedged_source, name, value)


def record(i):
    return {"id": np.int32(i)}


def sharded(source, **options):
    return batched(HedgedSource(source)).shard_to(data_mesh(2), num_threads=4, **options)


def batched(source):
    return grain.MapDataset.source(source).map(record).batch(8)


@pytest.fixture(params=SOURCES.values(), ids=SOURCES)
def kind(request):
    return request.param


class FirstWaitsForTheSecond:
    """The first request for record 17 is answered once the second has come.

    Args:
        failing: The requests for it that then fail.
    """

    def __init__(self, failing=()):
        self.second, self.failing = threading.Event(), failing

    def __call__(self, index, number):
        if index == 17:
            wait(self.second) if number == 1 else self.second.set()
            if number in self.failing:
                raise OSError("seventeen")

    def __getstate__(self):
        return {}

    def __setstate__(self, state):  # in a worker process
        vars(hedged_source).update(IMPATIENT)
        self.__init__()


def of_a_mixture(source):
    others = grain.MapDataset.range(1000, 1000 + len(source))
    mixture = grain_shard.mix([grain.MapDataset.source(source), others], {0: [1, 1]})
    return mixture.map(record).batch(8).shard_to(data_mesh(2))


def by_grain_alone(source):
    ds = grain.MapDataset.source(source).map(lambda i: {"id": np.int32(i), "valid_mask": True})
    return ds.to_iter_dataset().batch(8)


EVERY_PIPELINE = {**PIPELINES, "a mixture": of_a_mixture, "Grain alone": by_grain_alone}


@pytest.mark.usefixtures("impatient")
class TestTheFirstAnswerWins:
    @pytest.mark.parametrize("name", EVERY_PIPELINE)
    def test_in_every_kind_of_pipeline(self, name, kind):
        source = HedgedSource(kind(200, FirstWaitsForTheSecond()))
        with contextlib.closing(iter(EVERY_PIPELINE[name](source))) as batches:
            found = ids(batches)
        without = {"workers": "random access", "feeds in workers": "feeds"}.get(name, name)
        with contextlib.closing(iter(EVERY_PIPELINE[without](kind(200, nothing)))) as batches:
            assert found == ids(batches)

    def test_what_the_user_maps_is_mapped_once_though_it_is_asked_for_twice(self, kind):
        mapped = collections.Counter()

        def count(element):
            mapped[int(element["id"])] += 1
            return element

        source = kind(200, FirstWaitsForTheSecond())
        hedged = HedgedSource(source)
        ds = grain.MapDataset.source(hedged).map(record).map(count).batch(8)
        assert ids(ds.shard_to(data_mesh(2), num_threads=4)) == in_order(200, 8)
        assert source.requests[17] == 2
        assert 1 <= hedged.asked_again < hedged.answered
        assert mapped == collections.Counter(range(200))

    @pytest.mark.parametrize("num_records", [24, 200], ids=["near the end", "in the middle"])
    def test_nobody_waits_for_the_one_that_has_lost(self, kind, num_records):
        release = threading.Event()

        def first_waits(index, number):
            if index == 9 and number == 1:
                wait(release)

        with iter(sharded(kind(num_records, first_waits))) as iterator:
            assert ids(iterator) == in_order(num_records, 8)
            threads = background_threads()  # among them the one that is inside the source
            release.set()
        del iterator
        gc.collect()
        assert_ended(threads)

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

    def test_where_all_threads_are_taken_a_read_is_asked_for_once(self, monkeypatch):
        monkeypatch.setattr(hedged_source, "_THREADS", DaemonThreads("grain-shard-one", 1))
        began, release = threading.Event(), threading.Event()

        def wait_for_the_other(index, number):
            if index == 9:
                began.set()
                wait(release)
            elif index == 31:
                release.set()

        source = Source(32, wait_for_the_other)
        hedged = HedgedSource(source)
        assert hedged[0] == 0
        reader = threading.Thread(target=hedged.__getitem__, args=(9,))
        reader.start()
        wait(began)
        assert hedged[31] == 31
        reader.join()
        assert source.requests == {0: 1, 9: 1, 31: 1}


@pytest.mark.usefixtures("impatient")
class TestErrors:
    """Each outcome of two requests, whichever of them is back first."""

    @pytest.mark.parametrize("failing", [1, 2])
    def test_an_error_of_one_is_none_if_the_other_is_answered(self, kind, failing):
        # The third request is made to find out which record of several has failed.
        source = kind(200, FirstWaitsForTheSecond(failing=(failing, 3)))
        assert ids(sharded(source)) == in_order(200, 8)

    def test_if_both_fail_it_is_one(self, kind):
        source, seen = kind(200, FirstWaitsForTheSecond(failing=range(99))), []
        with (
            iter(sharded(source, retries=0)) as iterator,
            pytest.raises(OSError, match="seventeen") as caught,
        ):
            seen.extend(ids([batch])[0] for batch in iterator)
        assert seen == in_order(16, 8)
        assert "record 17 of the dataset" in caught.value.__notes__[0]

    def test_what_has_failed_is_not_asked_for_again(self, monkeypatch):
        monkeypatch.setattr(hedged_source, "_LEAST_S", HANG_S)  # before it has failed, either
        source = Source(200, bad(17, error=OSError))
        with iter(sharded(source, retries=0)) as iterator:
            for _ in range(2):
                next(iterator)
            with pytest.raises(OSError, match="record 17 is corrupt"):
                next(iterator)
        assert source.requests[17] == 2  # the second time to find out which record it was


class TestTheSameSource:
    def test_its_records_come_from_where_those_of_the_wrapped_one_do(self):
        ds = grain.MapDataset.source(HedgedSource(InFiles(20, nothing)))
        assert Origin.of(ds, 17) == Origin(17, "InFiles", "file-1", 7)
        assert str(ds) == "SourceMapDataset(source=InFiles)"
        assert ds.paths == InFiles.paths

    @pytest.mark.parametrize("first", [True, False])
    def test_a_state_goes_on_with_it_and_without_it(self, first):
        def build(is_hedged):
            source = InFiles(20, nothing)
            return batched(HedgedSource(source) if is_hedged else source).shard_to(data_mesh(2))

        _, state = after(build(first), 1)
        assert going_on(build(not first), state) == in_order(20, 8)[1:]

    def test_it_has_batched_reads_if_the_wrapped_one_has(self, kind):
        hedged = HedgedSource(kind(20, nothing))
        assert hasattr(hedged, "__getitems__") is (kind is BatchedSource)
        assert not hasattr(hedged, "_getitems")
        if kind is BatchedSource:
            assert hedged.__getitems__([3, 1]) == [3, 1]

    def test_it_pickles_before_and_after_it_was_read(self):
        hedged = type("OfTheUser", (HedgedSource,), {})(range(100, 200))
        for _ in range(2):
            copied = pickle.loads(cloudpickle.dumps(hedged))
            assert type(copied) is type(hedged)
            assert (repr(copied), len(copied), copied[17]) == (repr(hedged), 100, 117)
            assert hedged[0] == 100
        assert repr(hedged) == "HedgedSource(range(100, 200))"

    @pytest.mark.parametrize(
        ("given", "kind"),
        [
            ((i for i in range(3)), "generator"),
            (list, "type"),
            (grain.MapDataset.range(3), "Range"),
        ],
        ids=["a generator", "a class", "a dataset"],
    )
    def test_what_has_no_items_is_refused(self, given, kind):
        with pytest.raises(ShardingError, match=f"a {kind}.*, which is no source of records"):
            HedgedSource(given)


class TestThreads:
    @pytest.mark.parametrize("has_idle", [False, True])
    def test_an_interrupt_at_any_line_delays_no_later_call(self, has_idle):
        interrupted = Call.__init__.__code__, DaemonThreads.call.__code__
        for number in itertools.count(1):
            threads, lines = DaemonThreads("grain-shard-two", 2), itertools.count(1)
            release = threading.Event()
            if has_idle:
                assert threads.call(int).wait(HANG_S)

            def interrupt(frame, event, arg, number=number, lines=lines):
                if frame.f_code not in interrupted:
                    return None
                if event == "line" and next(lines) == number:
                    raise KeyboardInterrupt
                return interrupt

            sys.settrace(interrupt)
            try:
                threads.call(release.wait, HANG_S)  # a call that the interrupted caller forgets
                break  # there are fewer lines
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            call = threads.call(int)
            assert call.wait(HANG_S / 2)
            assert call.result() == 0
            release.set()
        release.set()
        assert number > 10

    def test_a_call_for_a_thread_that_ends_meanwhile_is_made_by_another(self):
        threads = DaemonThreads("grain-shard-one", 1)

        class Slow(dict):
            def popitem(self):
                item = super().popitem()
                eventually(lambda: not threads._threads)
                return item

        assert threads.call(int).wait(HANG_S)
        threads._idle = Slow(threads._idle)
        call = threads.call(int, "7")
        assert call.wait(HANG_S)
        assert call.result() == 7

    def test_where_no_thread_can_be_started_the_caller_reads(self, monkeypatch):
        def start(thread):
            raise RuntimeError("can't start new thread")

        hedged = HedgedSource(range(2))
        monkeypatch.setattr(hedged_source, "_THREADS", DaemonThreads("grain-shard-none", 1))
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            assert hedged[0] == 0
        assert (hedged[1], hedged.answered) == (1, 1)  # no call was left for the thread

    @pytest.mark.parametrize("_", range(50))
    def test_each_call_that_is_taken_begins_at_once(self, _, request):
        request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
        sys.setswitchinterval(1e-6)
        threads, release = DaemonThreads("grain-shard-few", 2), threading.Event()
        begun, taken, ready = threading.Semaphore(0), [], threading.Barrier(6)

        def consumer():
            ready.wait(HANG_S)
            taken.append(threads.call(lambda: (begun.release(), release.wait(HANG_S))))

        consumers = [threading.Thread(target=consumer) for _ in range(6)]
        for thread in consumers:
            thread.start()
        assert_ended(consumers)
        assert all(call is None or begun.acquire(timeout=HANG_S / 2) for call in taken)
        release.set()

    def test_no_call_is_lost_where_threads_end_all_the_time(self, monkeypatch):
        monkeypatch.setattr(daemon_threads, "_IDLE_S", 0)
        threads = DaemonThreads("grain-shard-few", 3)
        results = collections.Counter()

        def consumer(name):
            for i in range(500):
                while (call := threads.call(int, str(i))) is None:
                    pass  # all threads are busy
                assert call.wait(HANG_S)
                results[name] += call.result() == i

        consumers = [threading.Thread(target=consumer, args=(name,)) for name in range(6)]
        for thread in consumers:
            thread.start()
        assert_ended(consumers)
        assert results == dict.fromkeys(range(6), 500)

    def test_they_end_soon_after_the_last_read(self):
        before = background_threads()
        hedged = HedgedSource(range(8))
        assert list(hedged) == list(range(8))
        (thread,) = background_threads() - before
        assert_ended([thread])
        assert hedged[3] == 3

    SCRIPT = """\
import os, threading, warnings
warnings.simplefilter("ignore")
from grain_shard import HedgedSource
from grain_shard.sources import daemon_threads

class Source(list):
    def __getitem__(self, index):
        if index > 5:
            began.set()
            (threading.Event().wait if index == 7 else threading.main_thread().join)()
            print(index, flush=True)
        return index

began, hedged = threading.Event(), HedgedSource(Source(range(8)))
print(hedged[3], flush=True)
if HOW == "fork":
    if child := os.fork():
        assert os.waitpid(child, 0)[1] == 0
    else:
        print(hedged[5], flush=True)
        os._exit(0)
else:
    daemon_threads._EXIT_S = 60.0 if HOW == 6 else 0.1
    threading.Thread(target=lambda: hedged[HOW], daemon=True).start()
    began.wait()
"""

    @pytest.mark.slow
    @pytest.mark.parametrize(("how", "said"), [("fork", "3\n5\n"), (6, "3\n6\n"), (7, "3\n")])
    def test_the_program_ends_after_a_fork_and_late_reads(self, how, said, tmp_path):
        assert run(f"HOW = {how!r}\n{self.SCRIPT}", tmp_path / "script.py") == (0, said, "")
