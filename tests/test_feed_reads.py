"""The random-access parts of streams and feeds: the rows and the states are those of Grain."""

import collections
import contextlib
import gc
import itertools
import os
import threading
import time
import weakref

import grain
import numpy as np
import pytest

import grain_shard
from grain_shard.grain_inside import routes
from grain_shard.grain_inside.read_ahead import replace_read_ahead
from grain_shard.reading import record_reads
from grain_shard.reading.faults import FAIL_AT_ONCE, Faults
from grain_shard.reading.record_reads import RecordReads, record_stream
from tests import text
from tests.conftest import (
    assert_ended,
    background_threads,
    data_mesh,
    eventually,
    hide_private_names,
    ids,
    wait,
)
from tests.counting_source import BatchedSource, bad
from tests.pipelines import IN_TURN, assert_same, feeds_of, shared_out, with_states
from tests.test_feeds import PACKERS

READ_OPTIONS = {
    "no threads": IN_TURN,
    "threads": grain.ReadOptions(num_threads=2, prefetch_buffer_size=4),
    "default": grain.ReadOptions(),
}


def documents(feed, options, name="documentation"):
    """As in `tests.text`, with other read options."""
    (read_ahead,) = text.stream(name, feed).parents
    (records,) = read_ahead.parents
    return records.to_iter_dataset(options).filter(lambda row: len(row["tokens"]) >= 8)


def mixed(feed, options):
    streams = {name: documents(feed, options, name) for name in ("documentation", "licenses")}
    return grain.IterDataset.mix(streams, weights={"documentation": 2, "licenses": 1})


class Lengths(grain.IterDataset):
    """A node of a user's own."""

    def __init__(self, parent):
        super().__init__(parent)
        self.parent, self.found = parent, ([], {})

    def __iter__(self):
        return iter(self.parent.map(length))


def length(row):
    return {"length": np.int32(len(row["tokens"]))}


def noisy(row, rng):
    return {"length": np.int32(len(row["tokens"])), "noise": np.int64(rng.integers(1 << 40))}


PIPELINES = {
    **{name: lambda f, o, packer=packer: packer(mixed(f, o)) for name, packer in PACKERS.items()},
    "map": lambda f, o: documents(f, o).map(length),
    "random map": lambda f, o: documents(f, o).seed(5).random_map(noisy),
    "window shuffle of documents": lambda f, o: grain.experimental.WindowShuffleIterDataset(
        documents(f, o).map(length), window_size=7, seed=3
    ),
    "a node of a user's own": lambda f, o: Lengths(documents(f, o)),
    "the records alone": lambda f, o: grain.MapDataset.range(300)[
        f.shard_index :: f.shard_count
    ].to_iter_dataset(o),
    "a mix of random access": lambda f, o: grain.MapDataset.mix(
        [grain.MapDataset.range(90), grain.MapDataset.range(1000, 1090)]
    ).to_iter_dataset(o),
    "some are None": lambda f, o: (
        grain.MapDataset.range(300).map(lambda i: i if i % 3 else None).to_iter_dataset(o)
    ),
    "a filter among the records": lambda f, o: (
        grain.MapDataset.range(300).filter(lambda i: i % 3).to_iter_dataset(o)
    ),
    "the same stream twice": lambda f, o: grain.IterDataset.mix(
        [ds := documents(f, o).map(length), ds]
    ),
}


@pytest.mark.parametrize("options", READ_OPTIONS.values(), ids=READ_OPTIONS)
@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
def test_batches_and_states_are_those_of_grain(pipeline, options, monkeypatch):
    ds = grain_shard.feeds(lambda feed: pipeline(feed, options), num_feeds=3).batch(6)
    ours = with_states(ds, count=12)
    resumed = with_states(ds, state=ours[5][1], count=6)
    hide_private_names(monkeypatch)  # then Grain reads, by whatever options
    expected = with_states(ds, count=12)
    assert len(ours) == 12
    assert_same(ours, expected)
    assert_same(resumed, expected[6:])


def reads_of(ds):
    """The nodes of ours in a pipeline, the records of each."""
    if isinstance(ds, RecordReads):
        return [ds]
    return [found for parent in ds.parents for found in reads_of(parent)]


@pytest.fixture
def replaced():
    """A function that replaces the random-access parts of a pipeline."""

    def stream(records, options):
        return record_stream(records, options, Faults(FAIL_AT_ONCE), threads=16, ahead=8, feed=0)

    return lambda ds: replace_read_ahead(ds, stream)


def test_every_random_access_part_is_replaced_and_nothing_of_the_users_is_changed(replaced):
    ds = PACKERS["first fit"](mixed(grain.sharding.ShardOptions(0, 2), grain.ReadOptions()))
    (mix,) = ds.parents
    before = [dict(vars(node)) for node in (ds, mix, *mix.parents)]
    assert len(reads_of(replaced(ds))) == 2
    assert [dict(vars(node)) for node in (ds, mix, *mix.parents)] == before


def test_a_node_of_a_users_own_keeps_all_that_it_has_but_its_parents(replaced):
    ds = Lengths(documents(grain.sharding.ShardOptions(0, 2), grain.ReadOptions()))
    ours = replaced(ds)
    assert ours.found is ds.found
    assert ours.parent is ours.parents[0]
    assert ours.parent is not ds.parent


@pytest.mark.parametrize("are_made_one_by_one", [False, True])
def test_the_streams_of_an_interleave_are_read_ahead_together(are_made_one_by_one):
    made = []

    def record(i):
        made.append(i)
        return {"id": np.int32(i)}

    def stream(k):
        return grain.MapDataset.range(k, 2000, 4).map(record).to_iter_dataset()

    numbers = grain.MapDataset.range(4)
    streams = numbers.map(stream) if are_made_one_by_one else list(map(stream, range(4)))
    ds = grain.experimental.InterleaveIterDataset(streams, cycle_length=3).batch(4)
    expected = [batch["id"].tolist() for batch in ds]
    made.clear()
    got, ahead = [], []
    with iter(ds.shard_to(data_mesh(1))) as batches:
        for batch in batches:
            got += ids([batch])
            ahead.append(len(made) - 4 * len(got))
    assert got == expected
    assert max(ahead) <= 100  # of Grain alone it would be up to 500 of each stream


@pytest.mark.parametrize(
    ("options", "threads"),
    [({}, None), ({"num_threads": 0}, 1), ({"num_threads": 1}, 1), ({"num_threads": 32}, 32)],
)
@pytest.mark.parametrize("is_filtered", [False, True])
def test_a_stream_is_ahead_by_a_few_batches_whatever_its_threads(options, threads, is_filtered):
    made, alone, inside = [], [], threading.Lock()

    def record(i):
        alone.append(inside.acquire(blocking=False))
        made.append(i)
        if alone[-1]:
            time.sleep(2e-5)
            inside.release()
        return {"id": np.int32(i)}

    records = grain.MapDataset.range(1000).map(record)
    records = records.filter(lambda r: True) if is_filtered else records
    ds = records.to_iter_dataset(grain.ReadOptions(**options)).filter(lambda r: True).batch(4)
    expected, ahead = [batch["id"].tolist() for batch in ds], []
    made.clear()
    alone.clear()
    with iter(ds.shard_to(data_mesh(1))) as batches:
        for number, batch in enumerate(batches):
            assert batch["id"].tolist() == expected[number]
            ahead.append(len(made) - 4 * number)
    assert max(ahead) <= 100  # of Grain alone it would be up to 500
    assert threads != 1 or all(alone)


def test_the_reads_of_an_interleave_are_tried_again():
    tries = collections.Counter()

    def record(i):
        tries[i] += 1
        if tries[i] == 1 and i % 5 == 0:
            raise LookupError
        return {"id": np.int32(i)}

    streams = [grain.MapDataset.range(k, 40, 4).map(record).to_iter_dataset() for k in range(4)]
    ds = grain.experimental.InterleaveIterDataset(streams, cycle_length=4).batch(8)
    batches = ds.shard_to(data_mesh(1), retries=grain_shard.Retries(on=LookupError))
    assert sorted(itertools.chain(*ids(batches))) == [*range(40)]


def of_source(source, options):
    """Batches of two records, in their order, of one feed."""

    records = grain.MapDataset.source(source).map(lambda i: {"id": np.int32(i)})
    return shared_out(records, 1, 2, options)


@pytest.mark.parametrize("options", READ_OPTIONS.values(), ids=READ_OPTIONS)
def test_a_call_that_fails_names_the_record_and_the_records_before_it_come(options):
    source = BatchedSource(1000, bad(301, error=OSError))
    with contextlib.closing(iter(of_source(source, options))) as rows:
        assert [next(rows)["id"].tolist() for _ in range(150)] == [
            [2 * i, 2 * i + 1] for i in range(150)
        ]
        with pytest.raises(OSError, match="record 301 is corrupt") as raised:
            next(rows)
    # Grain may have added a note of its own.
    assert [note for note in raised.value.__notes__ if note.startswith("grain_shard: ")] == [
        "grain_shard: the read was tried 5 times",
        "grain_shard: while evaluating record 301 of the source BatchedSource, which is record 301"
        " of the dataset before .to_iter_dataset",
        "grain_shard: in feed 0 of 1",
    ]


def test_all_feeds_together_have_a_bounded_number_of_threads_and_of_records_ahead():
    evaluated, lock = [], threading.Lock()

    def row(feed, i):
        time.sleep(1e-3)
        with lock:
            evaluated.append(i)
        return {"id": np.int32(i)}

    rows = iter(feeds_of(row, 100, 200, length=10**6, options=grain.ReadOptions()))
    with contextlib.closing(rows):
        for taken in range(1, 6):
            next(rows)
            with lock:
                # A part of each feed is in use, besides what is ahead.
                assert len(evaluated) <= 200 * taken + 2 * 2048
            assert len(background_threads()) <= 64


class Alive:
    """Records of a size; `peaks` has, by process, how many of them were alive at once."""

    lock = threading.RLock()  # a record may go in a thread that holds it

    def __init__(self, num_bytes, seconds, peaks):
        self.num_bytes, self.seconds, self.peaks = num_bytes, seconds, peaks
        self.alive = self.peak = self.read = 0

    def __len__(self):
        return 10**6

    def __getitem__(self, index):
        time.sleep(self.seconds)
        record = np.zeros(self.num_bytes, np.uint8)
        with self.lock:
            self.read, self.alive = self.read + 1, self.alive + 1
            self.peak = max(self.peak, self.alive)
            (self.peaks / str(os.getpid())).write_text(f"{self.read} {self.peak}")
        weakref.finalize(record, self.let_go)
        return {"x": record}

    def let_go(self):
        with self.lock:
            self.alive -= 1


class AliveInCalls(Alive):
    def __getitems__(self, indices):
        return [self[index] for index in indices]


@pytest.mark.parametrize(
    ("kind", "options", "num_workers"),
    [
        (Alive, IN_TURN, 0),
        (Alive, grain.ReadOptions(), 0),
        (AliveInCalls, IN_TURN, 0),
        (AliveInCalls, grain.ReadOptions(), 0),
        pytest.param(AliveInCalls, grain.ReadOptions(), 2, marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize(
    ("num_bytes", "num_feeds", "batch_size"), [(2**21, 2, 8), (2**18, 4, 8), (3000, 4, 8)]
)
def test_no_more_records_are_read_ahead_than_the_batches_that_may_wait(
    num_bytes, num_feeds, batch_size, kind, options, num_workers, tmp_path
):
    records = grain.MapDataset.source(kind(num_bytes, 100e-6, tmp_path))
    ds = shared_out(records, num_feeds, batch_size, options)
    with iter(ds.shard_to(data_mesh(1), num_workers=num_workers, cpu_buffer_size=2)) as batches:
        for _ in range(9):
            next(batches)
    workers, files = max(1, num_workers), set(tmp_path.iterdir())
    if num_workers:  # this process only reads the first record, to compare it with other hosts
        files.discard(tmp_path / str(os.getpid()))
    assert len(files) == workers
    for file in files:
        eventually(lambda file=file: file.read_text())  # else a thread is just writing it
        read, peak = map(int, file.read_text().split())
        assert read >= 9 * batch_size / workers
        # Two batches wait; one is being made; Grain reads one ahead; a feed has its last two.
        assert peak <= 4 * batch_size + 2 * num_feeds


@pytest.mark.parametrize("batches_of", ["stream", "feeds"])
def test_without_read_ahead_a_source_is_called_for_many_records_at_a_time(batches_of):
    source = BatchedSource(80)
    records = grain.MapDataset.source(source).map(lambda i: {"id": np.int32(i)})
    if batches_of == "stream":
        ds = records.to_iter_dataset(IN_TURN).batch(8)
    else:
        ds = shared_out(records, 1, 8, IN_TURN)
    batches = ids(ds.shard_to(data_mesh(1), cpu_buffer_size=1))
    assert batches == np.arange(80).reshape(10, 8).tolist()
    assert [len(call) for call in source.calls if len(call) > 1] == [8] * 10


def test_the_indices_of_many_records_are_computed_together(monkeypatch):
    def counted(records, indices):
        computed.append(len(indices))
        return routes.route(records, indices)

    computed, records = [], grain.MapDataset.range(600).shuffle(seed=1)
    monkeypatch.setattr(record_reads, "route", counted)
    reads = RecordReads(records, Faults(FAIL_AT_ONCE), None, None)
    assert [reads[i] for i in range(600)] == list(records)
    assert computed == [0, 256, 256, 88]  # the first asks if the source reads many


def test_a_record_that_failed_is_evaluated_again_when_it_is_asked_for_again():
    failures = [OSError("once"), OSError("twice")]

    def row(i):
        if i == 3 and failures:
            raise failures.pop(0)
        return i

    reads = RecordReads(grain.MapDataset.range(5).map(row), Faults(FAIL_AT_ONCE), 0, None)
    for match in ("once", "twice"):
        with pytest.raises(OSError, match=match):
            _ = reads[3]
    assert [reads[i] for i in range(5)] == [0, 1, 2, 3, 4]


@pytest.fixture
def waiting():
    """Feeds in whose records a read waits: they, an event that it is there, and its release."""
    inside, release = threading.Event(), threading.Event()

    def row(feed, i):
        inside.set()
        wait(release)
        return {"id": np.int32(i)}

    return feeds_of(row, 4, 8, length=50, options=grain.ReadOptions()), inside, release


@pytest.mark.parametrize("how", ["close", "collect"])
def test_no_reader_outlives_feeds_that_wait_for_it(how, waiting):
    ds, inside, release = waiting
    batches = iter(ds.shard_to(data_mesh(4)))
    batches.start_prefetch()
    wait(inside)
    threading.Timer(0.1, release.set).start()
    if how == "close":
        batches.close()
    del batches
    gc.collect()
    eventually(lambda: not background_threads())


def test_closed_while_it_waits_all_threads_end_but_those_that_are_inside_a_read(
    waiting, no_patience
):
    ds, inside, release = waiting
    batches = iter(ds.shard_to(data_mesh(4)))
    batches.start_prefetch()
    wait(inside)
    threads = background_threads()
    batches.close()
    assert_ended(thread for thread in threads if "-host" not in thread.name)
    assert any(thread.is_alive() for thread in threads)
    release.set()


@pytest.mark.parametrize("options", [grain.ReadOptions(0, 0), grain.ReadOptions()])
def test_an_error_in_one_of_several_sources_comes_after_all_the_records_before_it(options):
    good = grain.MapDataset.source(BatchedSource(60))
    failing = grain.MapDataset.source(BatchedSource(60, bad(20, error=OSError)))
    mixture = grain_shard.mix([good, failing.map(lambda i: 100 + i)], {0: [1, 1]})
    seen, batches = [], iter(shared_out(mixture, 1, 1, options))
    with pytest.raises(OSError, match="record 20 is corrupt") as raised:
        seen.extend(batch.item() for batch in batches)
    assert sum(i >= 100 for i in seen) == 20
    assert 19 <= sum(i < 100 for i in seen) <= 21
    assert any(f"record {len(seen)} of the dataset" in note for note in raised.value.__notes__)
