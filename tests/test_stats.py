"""`stats()`: figures that follow from what happened, by a clock that the test turns."""

import gc
import json

import grain
import numpy as np
import pytest

import grain_shard
from grain_shard.measuring import Figures
from grain_shard.spans import MAP, READ, counted_by, recorded, span
from grain_shard.stats.counts import ReadThreads
from grain_shard.stats.meter import Meter
from tests.conftest import data_mesh, ids, numbered
from tests.counting_source import Source
from tests.pipelines import KINDS, shared_out, six

NOTHING = {"records": 0, "bytes": 0}


class Loop(Meter):
    """Measures a loop by a clock that stands still until it is told to go on."""

    def __init__(self):
        self.now = 1000.0
        super().__init__(clock=lambda: self.now)

    def take(self, *, wait_s=0.0, step_s=0.0, size=NOTHING, stages=()):
        """A batch for which the loop waits, and its step."""
        tally = self.tally()
        for stage, seconds in stages:
            tally[stage] = tally.get(stage, 0.0) + seconds
        with self:
            self.now += wait_s
        self.placed({"x": np.zeros((2, 3), np.float32)})
        self.handed_out(size)
        self.now += step_s


@pytest.fixture
def loop():
    return Loop()


# What the loop waits for.


def test_shares_and_times_follow_from_the_clock(loop):
    for _ in range(10):
        loop.take(wait_s=1.0, step_s=3.0, size={"records": 8, "bytes": 100})
    total = loop.total()
    # Until the tenth batch was handed out: its step is not over.
    assert (total.seconds, total.batches, total.records, total.bytes) == (37.0, 10, 80, 1000)
    assert (total.wait_share, total.wait_s, total.step_s) == (10 / 37, 1.0, 2.7)
    assert (total.records_per_s, total.bytes_per_s) == (80 / 37, 1000 / 37)


def test_a_wait_that_goes_on_counts(loop):
    loop.take(wait_s=1.0, step_s=4.0)
    with loop:
        loop.now += 5.0
        assert (loop.total()["seconds"], loop.total()["wait"]) == (10.0, 6.0)


def test_of_late_is_without_the_first_batch_and_what_was_long_ago(loop):
    loop.take(wait_s=60.0)
    loop.take(wait_s=1.0, step_s=1.0)
    assert loop.recent().wait_share == 1.0
    assert (loop.recent()["seconds"], loop.recent()["batches"]) == (1.0, 1)
    before = num_figures()
    for wait_s in [1.0] * 100 + [0.0] * 100:
        loop.take(wait_s=wait_s, step_s=1.0)
    assert num_figures() < before + 15, "figures of long ago are not kept"
    recent = loop.recent()
    assert 60.0 <= recent["seconds"] <= 66.0
    assert recent["wait"] == 0.0
    assert loop.total()["wait"] == 161.0


def num_figures():
    gc.collect()
    return sum(type(one) is Figures for one in gc.get_objects())


# Stages.

STAGES = [
    # Seconds of each stage, of one thread, in a loop of ten seconds; which is the busiest.
    ([], None),
    ([("place", 4.0)], None),  # makers are not seen, as in worker processes, and this is not it
    ([("place", 6.0)], "place"),
    ([("read", 5.0), ("batch", 1.0), ("place", 4.0)], "read"),
    ([("read", 1.0), ("batch", 1.5), ("pad", 0.5), ("place", 2.0)], "batch"),
    ([("read", 1.0), ("place", 2.0)], "place"),
    ([("agree", 9.0), ("read", 1.0)], "read"),  # which is no work of this host's
]


@pytest.mark.parametrize(("stages", "busiest"), STAGES)
def test_the_busiest_stage(loop, stages, busiest):
    loop.take(wait_s=10.0, stages=stages)
    assert loop.total().busiest == busiest


def test_the_busiest_stage_is_that_of_threads_that_are_to_work_now():
    # 80 threads were seen, one after the other; 8 read now.
    reading = {(thread, "read"): 1.0 for thread in range(80)}
    stages_s = {**reading, (80, "place"): 2.0}
    figures = Figures({"seconds": 10.0}, stages_s, ReadThreads(8))
    assert figures.busiest == "read"


def test_seconds_of_a_stage_are_those_a_batch_of_all_threads(loop):
    for _ in range(4):
        loop.take(wait_s=1.0, stages=[("read", 3.0), ("read", 1.0), ("place", 0.5)])
    figures = loop.total()
    assert (figures.read_s, figures.place_s, figures.batch_s, figures.map_s) == (4, 0.5, None, None)


def test_a_recording_within_another_ends_alone():
    with recorded() as outer:
        with recorded() as inner, span(READ):
            pass
        with span(READ):
            pass
    assert (len(outer), len(inner)) == (2, 1)


def test_a_span_counts_for_the_iterator_of_its_thread_alone(loop):
    with span(READ):
        pass
    with counted_by(loop):
        with span(READ, part=MAP):
            pass
        with pytest.raises(OSError, match="gone"), span(READ):
            raise OSError("gone")
    with span(READ):
        pass
    assert {stage for _, stage in loop.total().stages_s} == {"read", "map"}
    assert loop.total().stage_s("read") == loop.total().stage_s("map")


def test_a_stage_that_rests_is_seen_all_the_same(loop):
    loop.take(wait_s=1.0, stages=[("read", 1.0), ("place", 1.0)])
    loop.take(wait_s=1.0, stages=[("place", 0.75)])
    recent = loop.recent()
    assert (recent.read_s, recent.place_s, recent.batch_s) == (0.0, 0.75, None)
    assert recent.busiest == "place"


# Pipelines.


def test_counts_of_reads_go_on_where_the_iterator_goes_on_elsewhere():
    def fail(index, number):
        if index == 13:
            raise ValueError("corrupt")
        if (index, number) == (17, 1):
            raise OSError("once")

    ds = grain.MapDataset.source(Source(40, fail)).map(lambda i: {"id": np.int32(i)}).batch(8)
    ds = ds.shard_to(data_mesh(2), num_threads=2, on_bad_record="mask")
    with iter(ds) as batches:
        list(batches)
        batches.seek(0)
        list(batches)
        stats = batches.stats()
    assert stats.read_threads == 2
    assert [bad.record for bad in stats.faults.listed] == [13, 13]
    assert stats.faults[:2] == (stats.total.retries, stats.total.bad_records) == (1, 2)
    assert stats.faults.records == 80
    assert "1 reads tried again, 2 records masked as bad" in str(stats.total)


@pytest.mark.parametrize(
    ("kind", "num_workers", "seen"),
    [
        ("random access", 0, {"read", "map", "batch", "pad", "place"}),
        ("custom batch", 0, {"read", "batch", "pad", "place"}),
        ("stream", 0, {"read", "pad", "place"}),
        ("feeds", 0, {"read", "batch", "place"}),
        pytest.param("random access", 1, {"place"}, marks=pytest.mark.slow),
    ],
)
def test_what_each_kind_of_pipeline_tells(kind, num_workers, seen):
    read_ahead = {"feeds": lambda make: shared_out(six(make, 0), 4, 4, grain.ReadOptions())}
    ds = (KINDS | read_ahead)[kind](lambda i: {"id": np.int32(i), "x": np.zeros(3, np.float32)})
    with iter(ds.shard_to(data_mesh(4), num_workers=num_workers)) as batches:
        assert [batches.stats().total.batches for _ in batches] == [1, 2]
        end = batches.stats()
    assert end.total.records == 6
    # 4 ids, 4 rows of three floats, and 4 booleans.
    assert end.total.bytes == 2 * 4 * (4 + 12 + 1)
    stages = {"read", "map", "batch", "pad", "place"}
    assert {stage for stage in stages if getattr(end.total, f"{stage}_s")} == seen
    reads_in_threads = kind in ("random access", "custom batch") and not num_workers
    assert (end.read_threads is not None) == reads_in_threads
    assert (end.total.retries, end.total.bad_records) == (0, 0)


@pytest.mark.filterwarnings("ignore:a batch has rows of padding")
@pytest.mark.parametrize(
    ("batches", "options", "records"),
    [
        (numbered(20, 8), {}, 20),
        (numbered(20, 8), {"mask_key": "real"}, 20),
        (numbered(20, 8), {"mask_key": None}, 24),  # nothing tells which rows are padding
        (numbered(20, 8), {"remainder": "drop"}, 16),
        (grain.MapDataset.range(20).batch(8), {"mask_key": None}, 24),  # leaves without names
    ],
)
def test_records_are_the_rows_that_are_no_padding(mesh, batches, options, records):
    with iter(batches.shard_to(mesh, **options)) as iterator:
        list(iterator)
        assert iterator.stats().total.records == records


def test_batches_of_any_shape_are_counted_by_their_rows():
    with grain_shard.prefetch_to_device(iter([np.float32(1.0), np.ones((3, 2))])) as batches:
        list(batches)
        assert batches.stats().total.records == 1 + 3


def test_an_iterator_that_goes_elsewhere_counts_on(mesh):
    with iter(numbered(40, 8).shard_to(mesh)) as batches:
        next(batches)
        batches.seek(3)
        assert ids(batches) == [list(range(24, 32)), list(range(32, 40))]
        assert batches.stats().total.batches == 3


def test_epochs_count_all_of_theirs(mesh):
    with numbered(20, 8).shard_to(mesh).epochs(3) as epochs:
        next(next(epochs))  # the rest of it is skipped
        for batches in epochs:
            list(batches)
        assert epochs.stats().total.batches == 1 + 2 * 3


def test_two_iterators_at_once_are_counted_apart(mesh):
    ds = numbered(40, 8).shard_to(mesh)
    with iter(ds) as one, iter(ds) as other:
        for _ in range(3):
            next(one)
        next(other)
        assert [i.stats().total.batches for i in (one, other)] == [3, 1]
        list(one)
        # Each has read for itself alone.
        assert one.stats().total.place_s
        assert other.stats().total["placed"] <= 1 + 3


def test_stats_can_be_had_before_the_first_batch_and_after_the_end(mesh):
    batches = iter(numbered(20, 8).shard_to(mesh))
    total = batches.stats().total
    assert (total.seconds, total.batches, total.wait_share, total.wait_s) == (0, 0, 0, 0)
    assert total.read_s is total.place_s is total.busiest is None
    assert "not seen" in str(total)
    list(batches)
    batches.close()
    assert batches.stats().total.batches == 3
    assert "since the beginning: 3 batches, 20 records" in str(batches.stats())


def test_as_dict_is_flat_and_has_numbers_alone_as_wandb_and_tensorboard_want(mesh):
    with iter(numbered(20, 8).shard_to(mesh)) as batches:
        list(batches)
        stats = batches.stats()
    flat = stats.as_dict()
    assert json.loads(json.dumps(flat)) == flat
    assert all(isinstance(value, int | float) for value in flat.values())
    assert flat["data/batches"] == 3
    assert flat["data/wait_share"] == stats.recent.wait_share
    assert "data/agree_s" not in flat  # on one host nobody is asked
    assert {name.split("/")[0] for name in stats.as_dict("eval")} == {"eval"}


# A loop that waits long for its data.

LONG_WAITS = [
    # For some seconds, the stages and the waits of steps of a second; what the log then says.
    (600, [("read", 0.5)], 0.25, [(25, ", mostly for 'read'")] * 9),
    (70, [], 0.11, [(11, "")]),  # worker processes are not measured
    (70, [("place", 0.9)], 1.0, [(100, ", mostly for 'place'")]),
    (600, [("read", 0.5)], 0.09, []),  # less than a tenth
    (600, [("read", 0.5), ("agree", 0.25)], 0.25, []),  # other hosts were waited for
    (50, [("read", 0.5)], 0.9, []),  # the loop has only begun
]


@pytest.mark.parametrize(("seconds", "stages", "wait_s", "logged"), LONG_WAITS)
def test_a_loop_that_waits_long_for_its_data_says_so_once_a_minute(
    loop, caplog, seconds, stages, wait_s, logged
):
    loop.take(wait_s=1000.0)  # the first batch, for which everything begins
    for _ in range(seconds):
        loop.take(wait_s=wait_s, step_s=1 - wait_s, stages=stages)
    assert caplog.messages == [
        f"grain_shard: the training loop of host 0 waited for this host's data {share} % of the"
        f" last 60 s{stage}.\n  remedy: grain_shard.profile(ds, step) says what would help."
        for share, stage in logged
    ]
