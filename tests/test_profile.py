"""`profile` sees what each thread of a pipeline does, and names the bottleneck.

Of pipelines that run, the lanes are asserted in which their functions are, and no time. The verdict
is asserted for loops whose times the test makes up.
"""

import dataclasses
import functools
import gzip
import json
import pkgutil
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest

from grain_shard import GrainShardError, profile
from grain_shard.measuring import Profile
from grain_shard.placement import prefetch_to_device
from grain_shard.spans import Span
from grain_shard.tools.measuring.loop import run_loop
from grain_shard.tools.measuring.measurement import PipelineFacts
from tests.conftest import data_mesh, wait


def record(i):
    return {"id": np.int32(i)}


def step(batch):
    return batch["id"].sum()


def batches(decode=record):
    return grain.MapDataset.range(1000).map(decode).batch(1)


def sharded(ds=None, **options):
    return (batches() if ds is None else ds).shard_to(data_mesh(1), **options)


def same(batch):
    return batch


PIPELINES = {
    # A pipeline with a function whose calls are noted, and the lanes in which these calls are.
    "map": (lambda noted: sharded(batches(noted(record))), {"read"}),
    "map after batch": (lambda noted: sharded(batches().map(noted(same))), {"read"}),
    "map after placing": (lambda noted: sharded().map(noted(same)), {"wait"}),
    "prefetch_to_device": (lambda noted: prefetch_to_device(batches(noted(record))), {"read"}),
    "Grain alone": (lambda noted: batches(noted(record)), set()),
}
WORK = {
    "batch": "grain_shard.reading.stack.RowStacker.write",
    "pad": "grain_shard.reading.batch_builder.pad_batch",
    "place": "grain_shard.sharding.assemble.Assembler.__call__",
}


def noting(calls, function):
    """The function, which adds the thread and the time of each of its calls to a list."""

    def noted(*args):
        start = time.perf_counter()
        result = function(*args)
        calls.append((threading.current_thread().name, start, time.perf_counter()))
        return result

    return noted


def lanes_of(calls, ds, step=step):
    """Runs a loop, and returns the lanes in which these calls were."""
    spans, _, _ = run_loop(ds, 20, step)
    assert len(calls) >= 20
    return {
        span.stage
        for span in spans
        for thread, start, end in calls
        if span.thread == thread and span.start <= start <= end <= span.end
    }


@pytest.mark.parametrize(("made", "lanes"), PIPELINES.values(), ids=PIPELINES)
def test_the_time_of_a_function_is_in_the_lane_that_it_runs_in(made, lanes):
    calls = []
    assert lanes_of(calls, made(functools.partial(noting, calls))) == lanes


@pytest.mark.parametrize(("stage", "function"), WORK.items())
def test_so_is_the_time_of_a_stage(stage, function, monkeypatch):
    calls = []
    monkeypatch.setattr(function, noting(calls, pkgutil.resolve_name(function)))
    assert lanes_of(calls, sharded()) == {stage}


def test_so_is_the_time_of_the_step():
    calls = []
    assert lanes_of(calls, sharded(), noting(calls, step)) == {"step"}


def test_the_work_of_an_executor_is_seen():
    with ThreadPoolExecutor(2) as executor:
        profiled = profile(sharded(executor=executor), step, 20)
    spans = profiled.recorded_spans
    assert len([s for s in spans if s.stage == "work"]) >= 20
    assert "task" in {s.part for s in spans if s.stage == "read"}


def test_without_a_step_the_loop_only_waits():
    profiled = profile(sharded(), num_batches=10)
    assert profiled.wait_share == 1
    assert "step" not in profiled.lanes_s
    # The functions are told from the range that they are over.
    assert "map" in {s.part for s in profiled.recorded_spans}


def measured(pipeline=None, num_examples=0, **lanes):
    """A loop of 10 seconds, from (thread, start, end, processor_s, part) in each lane.

    In "room" a thread rests, as the buffer is full.
    """
    spans = [Span(lane, *at) for lane, ats in lanes.items() for at in ats]
    batches = len(lanes.get("wait", [0]))
    return Profile(batches, batches, 0, 10, tuple(spans), pipeline, num_examples)


READING = {"read": [("t", 0, 10)], "wait": [("main", 0, 8)], "step": [("main", 8, 10)]}
BOTH_HALF, REST_HALF = [("t", 0, 4.9), ("u", 0, 4.9)], [("t", 4.9, 10), ("u", 4.9, 10)]
REST_2 = [("t", 8, 10)]
# The loop waits long for the first of five batches, and half a second for each of the others.
UNEVENLY = [("main", 0, 4), *(("main", at, at + 0.5) for at in (5, 6, 7, 8))]
OWN_WORK = {
    "wait": [("main", 0, 3), *(("main", at, at + 0.5) for at in (4, 5, 6))],
    "step": [("main", 7, 10)],
}


@pytest.mark.parametrize(
    ("lanes", "expected"),
    [
        # Waits exactly as much as is let pass, and a little more.
        ({"wait": [("main", 0, 0.99)], "step": [("main", 1, 10)]}, "step"),
        ({"wait": [("main", 0, 1.01)], "step": [("main", 1.01, 10)]}, "unseen"),
        # Both threads that make batches rest for a little more than half of the time, as the buffer
        # is full. The loop waits for all of its batches alike, or for few of them.
        ({**READING, "read": BOTH_HALF, "room": REST_HALF}, "unseen"),
        ({**READING, "read": BOTH_HALF, "room": REST_HALF, "wait": UNEVENLY}, "buffer"),
        ({**READING, "read": [("t", 0, 9), ("u", 0, 9)]}, "read"),
        # If they stand still without a full buffer, a larger one could not help: the interpreter's
        # lock lets one work at a time, or other processes have the processors.
        ({**READING, "read": BOTH_HALF, "wait": UNEVENLY}, "read"),
        ({**READING, "read": [(f"t{i}", i, i + 0.3) for i in range(10)]}, "read"),
        # One of two that rests is not both; a thread that makes no batches does not count.
        ({**READING, "read": [("t", 0, 10), ("u", 0, 1)], "room": [("u", 1, 10)]}, "read"),
        ({**READING, "read": [("t", 0, 4)], "room": [("d", 0, 10)]}, "read"),
        # The same threads read, stack and pad; placing has a thread of its own.
        ({**READING, "read": [("t", 0, 2)], "batch": [("t", 2, 9)]}, "batch"),
        ({**READING, "read": [("t", 0, 2)], "pad": [("t", 2, 9)]}, "pad"),
        ({**READING, "read": [("t", 0, 8)], "room": REST_2, "place": [("d", 0, 9)]}, "place"),
        ({**READING, "read": [("t", 0, 9)], "place": [("d", 0, 8)]}, "read"),
        # Nearly as busy as the loop has own work, or as busy: larger buffers help only before.
        ({**OWN_WORK, "read": [("t", 0, 5.4)], "room": [("t", 5.4, 10)]}, "buffer"),
        ({**OWN_WORK, "read": [("t", 0, 5.5)], "room": [("t", 5.5, 10)]}, "read"),
        # Half of the waiting while nothing is at work.
        ({**READING, "read": [("t", 0, 4)], "room": [("t", 4, 10)]}, "handover"),
        ({**READING, "read": [("t", 0, 4.1)], "room": [("t", 4.1, 10)]}, "unseen"),
        ({**READING, "read": [("t", 0, 3), ("u", 2, 4.1)], "room": [("t", 4.1, 10)]}, "unseen"),
        # Threads that compute may wait for the interpreter's lock in any stage: here in padding.
        ({**READING, "read": [("t", 0, 4, 4)], "pad": [("u", 0, 9, 1)]}, "read"),
        ({**READING, "read": [("t", 0, 4)], "pad": [("u", 0, 9)]}, "pad"),
    ],
)
def test_the_verdict_follows_from_the_figures(lanes, expected):
    assert measured(**lanes).bottleneck == expected


@pytest.mark.parametrize(("num_workers", "expected"), [(1, "workers"), (0, "unseen")])
def test_the_verdict_on_a_loop_that_waits_for_what_is_not_seen(num_workers, expected):
    profiled = measured(PipelineFacts(num_workers=num_workers), **READING | {"read": []})
    assert profiled.bottleneck == expected
    assert profiled.advice
    unseen = "not seen: reading, stacking and padding in the worker processes (num_workers=1)"
    assert (unseen in str(profiled)) == (num_workers == 1)


def test_a_verdict_of_buffer_says_on_what_it_rests():
    profiled = measured(**READING | {"read": BOTH_HALF, "room": REST_HALF, "wait": UNEVENLY})
    assert profiled.found.reason == (
        "the loop waits 60% of the time, and batches are in the making only 49% of it: half of the"
        " waiting is for 1 of 5 batches, 4,000.0 ms or more for each, and the buffers hold too few"
        " ready batches."
    )
    assert profiled.advice[0].startswith("raise cpu_buffer_size (4 now)")


IN_PYTHON = "compute: about 500 examples a second at best if that is Python code"
SIDE_BY_SIDE = "compute: about 250 examples a second for each processor."
SOURCE_READS = [("t", 0, 9, 0.1), ("t", 9, 10, 0, "map")]
EIGHT_IN_TURN = [(f"t{i}", 0, 10, 1, "map") for i in range(8)]
TWO_AT_ONCE = [(t, 0, 10, 8, "map") for t in "tu"]
MIXED = [("t", 0, 9, 3), ("t", 9, 9.1, 0, "map")]
HELD_UP = "or would compute if other processes did not use the processors"
MORE_READS = (
    "raise cpu_buffer_size (4 now) if they wait for files or a network, so that more is read side"
    " by side: for 20% of the time"
)


@pytest.mark.parametrize(
    ("reads", "rests", "reason", "advice", "not_advised"),
    [
        # 4000 examples in 8 seconds of one processor.
        ([("t", 0, 10, 8, "map")], [], IN_PYTHON, "num_workers", "buffer"),
        ([("t", 0, 10, 8)], [], IN_PYTHON, "num_workers", ""),
        # Many threads, one of which works at a time: the others wait for the interpreter's lock.
        (EIGHT_IN_TURN, [], IN_PYTHON, "pass num_workers", "raise cpu_buffer"),
        # Threads compute side by side.
        (TWO_AT_ONCE, [], SIDE_BY_SIDE, "pass num_workers", "raise cpu_buffer_size"),
        # Reads that wait, with room for more of them and without.
        (
            SOURCE_READS,
            [],
            "records in the source. They keep 0.01 processors busy, so they wait.",
            "num_threads",
            "raise cpu_buffer_size",
        ),
        (
            SOURCE_READS,
            [],
            "records in the source. They keep 0.01 processors busy, so they wait.",
            "give the source a _getitems",
            "",
        ),
        (
            SOURCE_READS,
            [("t", 1, 3)],
            "records in the source. They keep 0.01 processors busy, so they wait.",
            MORE_READS,
            "num_workers",
        ),
        (
            [("t", 0, 10, 0.1, "map")],
            [],
            "records in your functions. They keep 0.01 processors busy, so they wait.",
            "num_threads",
            "num_workers",
        ),
        (
            [("t", 0, 10, 0.1, "map")],
            [],
            "records in your functions. They keep 0.01 processors busy, so they wait.",
            "leave num_threads out",
            "source",
        ),
        # What is not told apart may be either.
        (
            [("t", 0, 10, 0.1)],
            [],
            "records in the source, or in your functions. They",
            "_getitems",
            "raise",
        ),
        # Between the two nobody can tell.
        (
            MIXED,
            [],
            f"records in the source. They keep 0.3 processors busy, so they wait, {HELD_UP}.",
            "pass num_workers if they compute",
            "raise",
        ),
    ],
)
def test_processor_time_tells_if_reads_compute_or_wait(reads, rests, reason, advice, not_advised):
    profiled = measured(num_examples=4000, **READING | {"read": reads, "room": rests})
    assert profiled.bottleneck == "read"
    assert reason in profiled.found.reason
    assert advice in " ".join(profiled.advice)
    assert not not_advised or not_advised not in " ".join(profiled.advice)


BEFORE_BATCH = "after .batch (or the work of its batch_fn) before .batch"


@pytest.mark.parametrize(
    ("pipeline", "given", "not_given"),
    [
        (PipelineFacts(), "if they wait for files or a network", "every row"),
        (PipelineFacts(amplification=4), "every row 4 times", ".mp_prefetch"),
        (PipelineFacts(reads_other_rows=True), BEFORE_BATCH, "every row"),
        (PipelineFacts(is_stream=True, amplification=4), ".mp_prefetch", "every row"),
        (PipelineFacts(is_stream=True), ".mp_prefetch", "num_threads"),
    ],
)
def test_the_advice_fits_the_pipeline(pipeline, given, not_given):
    advice = " ".join(measured(pipeline, **READING).advice)
    assert given in advice
    assert not_given not in advice


@pytest.mark.parametrize(
    ("size", "workers", "work_s", "reason", "advice"),
    [
        (8, 2, 10, "8.0 tasks.* 10,000.0 ms: 10,000.0 ms at.* 100% busy", "add workers, and"),
        (2, 2, 10, "2.0 tasks.* 0.0 ms on the net.* 100% busy", "raise cpu.*would have no task"),
        (2, 2, 2, r"8,000.0 ms on the network.*\(2 seen\) are 20% busy", "raise .* to 10 or more"),
        (8, 1, 4, r"6,000.0 ms on the network.*\(1 seen\) are 40% busy", "network.*uint8 images"),
    ],
)
def test_tasks_of_an_executor_are_told_from_their_way(size, workers, work_s, reason, advice):
    tasks = [(f"t{i}", 0, 10, 0, "task") for i in range(size)]
    works = [(f"w{i}", 10 - work_s, 10) for i in range(workers)]
    pipeline = PipelineFacts(cpu_buffer_size=size, has_executor=True)
    profiled = measured(pipeline, **READING | {"read": tasks, "work": works})
    assert profiled.bottleneck == "executor"
    assert re.search(reason, profiled.found.reason), profiled
    assert re.search(advice, " ".join(profiled.advice)), profiled


@pytest.mark.parametrize(
    ("ds", "expected"),
    [
        (sharded(), PipelineFacts()),
        (
            sharded(cpu_buffer_size=7, num_workers=2),
            PipelineFacts(cpu_buffer_size=7, num_workers=2),
        ),
        (sharded(batches().map(dict)), PipelineFacts()),  # one host needs all of the rows anyway
        (sharded(batches().to_iter_dataset().map(dict)), PipelineFacts(is_stream=True)),
    ],
)
def test_what_the_advice_knows_of_a_pipeline(ds, expected):
    assert PipelineFacts.of(ds) == expected


class TestProfile:
    def test_spans_lie_within_the_loop_and_the_loop_waits_or_steps(self):
        # A batch is being read when the loop begins, and when it ends.
        profiled = profile(sharded(batches()), step, 10, warmup=3)
        assert (profiled.num_batches, profiled.warmup) == (10, 3)
        assert repr(profiled).startswith("batches measured: 10 (after 3 of warm-up)\n")
        assert set(profiled.lanes_s) >= {"place", "wait", "step"}
        for span in profiled.spans:
            assert 0 <= span.start <= span.end <= profiled.seconds, span
        loop = [(s.stage, s.end) for s in profiled.spans if s.stage in ("wait", "step")]
        assert [lane for lane, _ in loop] == ["wait", "step"] * 10
        assert loop[-1][1] == profiled.seconds

    def test_figures_follow_from_spans(self):
        loop = measured(wait=[("main", 0, 2)], step=[("main", 2, 8)])  # then 2 seconds of neither
        assert loop.wait_share == 0.25
        profiled = measured(read=[("t5", 0, 1), *((f"t{i}", i, i + 1) for i in range(5))])
        assert (profiled.lane_s("read"), profiled.busy("read")) == (6, 0.5)
        # The last three of this span's four seconds lie within the loop.
        assert measured(read=[("t", -1, 3, 2)]).processor_s("read") == 1.5

    def test_a_table_and_sentences(self):
        reading = [Span("read", "t", 0.0, 0.004), Span("read", "u", 0.001, 0.005)]
        loop = [Span("wait", "main", 0.0, 0.004), Span("step", "main", 0.004, 0.005)]
        profiled = Profile(2, 3, 1, 0.005, (*reading, *loop), PipelineFacts(), 62, 39_450)
        assert str(profiled) == repr(profiled)
        lines = str(profiled).splitlines()
        table, reasons, advice = lines[:8], lines[8:11], lines[11]
        assert table == [
            "batches measured: 2 of 3, then the dataset ended (after 1 of warm-up)",
            "12,400 examples/s, 7.9 MB/s, 2.500 ms a batch; the loop waits 80.0% of the time",
            "",
            "lane    threads         total       a batch    busy",
            "read          2       0.008 s      4.000 ms    100%",
            "wait          1       0.004 s      2.000 ms     80%",
            "step          1       0.001 s      0.500 ms     20%",
            "",
        ]
        assert reasons == [
            "bottleneck: read; batches are in the making 100% of the time, by 1.6 threads on",
            "  average, mostly reading and decoding records in the source, or in your",
            "  functions. They keep 0 processors busy, so they wait.",
        ]
        assert advice.startswith("  - if they wait for files or a network, leave num_threads out")

    def test_threads_that_make_batches_tell_when_the_buffer_is_full(self, monkeypatch):
        resting, annotate = threading.Event(), jax.profiler.TraceAnnotation

        def noted(name):
            if (name, "host" in threading.current_thread().name) == ("grain_shard.room", True):
                resting.set()
            return annotate(name)

        monkeypatch.setattr(jax.profiler, "TraceAnnotation", noted)
        profiled = profile(sharded(), lambda batch: wait(resting) or step(batch), 10, warmup=0)
        readers = {s.thread for s in profiled.recorded_spans if s.stage == "read"}
        assert readers & {s.thread for s in profiled.rests}
        assert all(0 <= s.start <= s.end <= profiled.seconds for s in profiled.rests)
        assert "room" not in profiled.lanes_s

    def test_it_says_how_many_reads_went_side_by_side_and_why(self):
        for fixed, words in [(None, r"\d+ \(.+\)"), (3, r"3 \(num_threads\)")]:
            profiled = profile(sharded(num_threads=fixed), step, 5)
            assert re.fullmatch(words, profiled.read_threads)
            adapted = f"adapted while the loop ran: {profiled.read_threads}\n(threads come"
            assert adapted in str(profiled)
        assert profile([np.ones(4)] * 3, num_batches=2).read_threads == ""

    @pytest.mark.parametrize(
        ("num_batches", "asked", "tells"),
        [(1, 50, False), (9, 50, False), (10, 50, True), (1, 2, True)],
    )
    def test_of_too_few_batches_it_only_tells_how_to_have_more(self, num_batches, asked, tells):
        sizes = {"num_batches": num_batches, "num_batches_asked": asked}
        few = dataclasses.replace(measured(**READING), **sizes)
        assert few.bottleneck == ("read" if tells else "unseen")
        assert tells or f"{num_batches} of the {asked} batches" in few.found.reason
        assert tells or few.advice == ("put .repeat() before .batch, and profile again.",)

    def test_a_step_that_returns_nothing_is_refused(self):
        with pytest.raises(ValueError, match="returned nothing"):
            profile(sharded(), lambda batch: None)


class TestPicture:
    def test_one_lane_for_each_that_was_seen_over_milliseconds(self):
        profiled = profile(sharded(), step, 5)
        (axes,) = profiled.plot().axes
        lanes = [label.get_text().split("\n")[0] for label in axes.get_yticklabels()]
        assert lanes == list(profiled.lanes_s)
        assert axes.get_xlim() == (0, profiled.seconds * 1e3)
        assert axes.get_xlabel() == "ms"
        assert [text.get_text().split()[0] for text in axes.figure.legends[0].texts] == lanes
        bars = sum(len(collection.get_paths()) for collection in axes.collections)
        assert bars == len(profiled.spans)

    def test_jupyter_shows_the_picture_and_prints_the_text(self, monkeypatch, capsys):
        shown = []
        in_jupyter = SimpleNamespace(display=shown.append)
        monkeypatch.setitem(sys.modules, "IPython.display", in_jupyter)
        # matplotlib asks an IPython that it finds for its version.
        monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(version_info=(9, 0)))
        profiled = profile(sharded(), step, 2)
        profiled._ipython_display_()
        (figure,) = shown
        assert figure._repr_png_().startswith(b"\x89PNG")
        assert capsys.readouterr().out == f"{profiled}\n"

    def test_without_matplotlib_there_is_text_and_an_error_with_its_remedy(self, monkeypatch):
        profiled = profile(sharded(), step, 2)
        for name in ("matplotlib", "matplotlib.figure"):
            monkeypatch.setitem(sys.modules, name, None)
        assert "bottleneck" in str(profiled)
        with pytest.raises(GrainShardError, match=r'pip install "grain-shard\[plot\]"'):
            profiled.plot()


def test_the_lanes_are_in_the_trace_of_jax_profiler(tmp_path):
    with jax.profiler.trace(str(tmp_path), create_perfetto_trace=True):
        profile(sharded(), step, 3, warmup=0)
    (file,) = tmp_path.rglob("perfetto_trace.json.gz")
    with gzip.open(file) as stream:
        events = json.load(stream)["traceEvents"]
    counts = {
        lane: sum(event.get("name") == f"grain_shard.{lane}" for event in events)
        for lane in ("read", "batch", "pad", "place", "wait", "step")
    }
    assert counts["wait"] == counts["step"] == 3
    assert min(counts.values()) >= 3
