"""A few records of the first batch are read again, and must be the same for every reader (C13)."""

import collections
import concurrent.futures
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import threading
import time

import grain
import numpy as np
import pytest

from grain_shard import Retries, ShardingError, feeds
from grain_shard.reading import rereads, sample
from grain_shard.streams import feed_sample
from tests.conftest import data_mesh, ids
from tests.counting_source import Source


class OneFile:
    """A source that seeks and reads in one open file, so several threads disturb each other."""

    def __init__(self, path, num_records=2000):
        self.path, self.num_records = path, num_records
        # A read that follows another one at the end of the records finds a whole record, too.
        np.repeat(np.arange(num_records + 64, dtype=np.int32), 1024).tofile(path)
        self.file = os.open(path, os.O_RDONLY)

    def __len__(self):
        return self.num_records

    def __getitem__(self, index):
        os.lseek(self.file, 4096 * index, os.SEEK_SET)
        return {"id": index, "x": np.frombuffer(os.read(self.file, 4096), np.int32)}

    def __getstate__(self):
        return {**self.__dict__, "file": None}

    def __setstate__(self, state):
        self.__dict__ = state
        self.file = os.open(self.path, os.O_RDONLY)


def flat(lists):
    return [x for one in lists for x in one]


def as_feed(source):
    def make_feed(feed):
        records = grain.MapDataset.source(source)[feed.shard_index :: feed.shard_count]
        return records.to_iter_dataset().filter(lambda record: True)

    return feeds(make_feed, num_feeds=2).batch(64)


def interleaved(streams):
    return grain.experimental.InterleaveIterDataset(streams, cycle_length=2)


def as_interleave(source):
    records = grain.MapDataset.source(source)
    return interleaved([records[part::2].to_iter_dataset() for part in range(2)]).batch(64)


KINDS = {
    "random access": lambda source: grain.MapDataset.source(source).seed(1).shuffle().batch(64),
    "whole batches": lambda source: grain.MapDataset.source(source).batch(64).map(lambda b: b),
    "stream": lambda source: grain.MapDataset.source(source).to_iter_dataset().batch(64),
    "interleave": as_interleave,
    "feeds": as_feed,
}


def refusal(kind, source, **options):
    """Returns the error in place of the second batch. Ten runs do not all miss a race."""
    for _ in range(10):
        with iter(KINDS.get(kind, kind)(source).shard_to(data_mesh(4), **options)) as batches:
            next(batches)
            try:
                next(batches, None)
            except ShardingError as error:
                return str(error)
    return pytest.fail("not refused in ten runs")


@pytest.mark.parametrize("kind", KINDS)
def test_a_source_that_threads_read_wrongly_is_refused_before_the_second_batch(kind, tmp_path):
    text = refusal(kind, OneFile(tmp_path / "records"))
    readers = "one of several threads that read at the same time", "a reading thread"
    assert text.startswith(tuple(f"batch['x']: {reader} got [" for reader in readers))
    assert "of the source OneFile, which is record " in text
    for way_out in ("threading.Lock()", "os.pread", "threading.local()", "num_threads=1"):
        assert way_out in text


@pytest.mark.parametrize("kind", KINDS)
def test_an_epoch_of_one_batch_is_no_exception(kind, tmp_path):
    assert "one thread that reads alone" in refusal(kind, OneFile(tmp_path / "records", 64))


IN_A_WORKER = pytest.param({"num_workers": 1}, marks=pytest.mark.slow)


@pytest.mark.parametrize("options", [{"num_threads": 1}, IN_A_WORKER], ids=str)
def test_the_ways_out_are_ways_out(options, tmp_path):
    source = OneFile(tmp_path / "records", 200)
    ds = KINDS["random access"](source).shard_to(data_mesh(4), **options)
    assert sorted(flat(ids(ds))) == list(range(200))


def numbered(i):
    return {"id": i, "x": np.full(1024, i, np.int32)}


@pytest.mark.parametrize("joined", [grain.IterDataset.mix, interleaved], ids=["mix", "interleave"])
def test_a_source_beside_a_safe_one_is_read_again_too(joined, tmp_path):
    def beside_a_safe_one(source):
        sources = grain.MapDataset.range(2000).map(numbered), grain.MapDataset.source(source)
        return joined([records.to_iter_dataset() for records in sources]).batch(64)

    text = refusal(beside_a_safe_one, OneFile(tmp_path / "records"))
    assert "of the source OneFile, which is record " in text


def one_reader(source):
    return source.to_iter_dataset(grain.ReadOptions(num_threads=1))


@pytest.mark.parametrize("num_threads", [None, 8])
def test_a_part_of_a_stream_has_the_threads_of_its_read_options(num_threads, tmp_path):
    source = grain.MapDataset.source(OneFile(tmp_path / "records", 400))
    others = grain.MapDataset.range(400).map(numbered)
    mixed = grain.IterDataset.mix([one_reader(source), others.to_iter_dataset()])
    for ds in (one_reader(source), mixed):
        with iter(ds.batch(8).shard_to(data_mesh(4), num_threads=num_threads)) as batches:
            for batch in batches:
                np.testing.assert_array_equal(batch["x"][:, 0], batch["id"])


def test_feeds_share_threads_whatever_their_read_options(tmp_path):
    source = OneFile(tmp_path / "records")

    def as_feeds(source):
        def make_feed(feed):
            return one_reader(grain.MapDataset.source(source)[feed.shard_index :: feed.shard_count])

        return feeds(make_feed, num_feeds=2).batch(64)

    assert "one thread that reads alone" in refusal(as_feeds, source)


def test_a_thread_pool_as_executor_reads_in_threads(tmp_path):
    source = OneFile(tmp_path / "records", 200)
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        text = refusal("random access", source, executor=executor)
    assert "one thread that reads alone" in text


def pid(i):
    return {"x": os.getpid()}


def hashed(i):
    return {"x": hash(str(i)) % 1000}


HERE = threading.local()


def scaled(i):
    return {"x": i * getattr(HERE, "scale", 1)}


def noisy(i):
    return {**scaled(i), "noise": random.random()}


def with_more(i):
    return {"id": i} | ({"more": i} if getattr(HERE, "scale", 1) > 1 else {})


def in_a_tuple(i):
    return {"p": (i, i) if getattr(HERE, "scale", 1) > 1 else [i, i]}


def only_there(i):
    if i > 2 and getattr(HERE, "scale", 1) == 1:
        raise ValueError("too large")
    return {"x": i}


def only_here(i):
    if i > 2 and getattr(HERE, "scale", 1) > 1:
        raise ValueError("too large")
    return {"x": i}


def of_4_mb(i):
    return {"x": np.full(2**20, scaled(i)["x"], np.float32)}


def longer(i):
    return {"x": np.zeros(32 * getattr(HERE, "scale", 1), np.int32)}


def unlike_texts(i):
    texts = np.full(40, "a", object)
    texts[30] = "ab"[getattr(HERE, "scale", 1) - 1]
    return {"x": texts}


def unlike_nans(i):
    return {"x": np.array([0x7FC00000 + getattr(HERE, "scale", 1)], np.uint32).view(np.float32)}


def unlike_within(i):
    x = np.zeros((4, 8), np.float32)
    x[2, 5] = getattr(HERE, "scale", 1)
    return {"x": x}


def after_batch(function):
    ds = grain.MapDataset.range(64).batch(8)
    return ds.map(lambda batch: {"x": np.array([function(i)["x"] for i in batch])})


def of_feeds(function, passes=lambda record: True):
    def make_feed(feed):
        records = grain.MapDataset.range(64)[feed.shard_index :: feed.shard_count].repeat()
        return records.map(function).to_iter_dataset().filter(passes)

    return feeds(make_feed, num_feeds=4).batch(8)


MADE_IN_WORKERS = {
    "records": lambda function: grain.MapDataset.range(64).map(function).batch(8),
    "whole batches": after_batch,
    "feeds": of_feeds,
}


@pytest.mark.slow
@pytest.mark.parametrize("function", [pid, hashed])
@pytest.mark.parametrize("kind", MADE_IN_WORKERS)
def test_a_worker_process_that_gives_other_rows_is_named(function, kind):
    ds = MADE_IN_WORKERS[kind](function).shard_to(data_mesh(4), num_workers=1)
    with iter(ds) as batches:
        next(batches)
        with pytest.raises(ShardingError, match=r"a worker process got .* reads alone gets") as no:
            next(batches)
    assert "hash() of a str" in str(no.value)
    where = {"feeds": r"row \d of feed \d", "records": r"record \d+ of the dataset before \.batch"}
    no.match(f"from {where.get(kind, 'record 0 of the dataset of batches')}, and one thread")


def passes_in_workers(record):
    return multiprocessing.parent_process() is not None


@pytest.mark.slow
@pytest.mark.parametrize("longest_s", [0.1, 1e9])
def test_feeds_of_which_the_main_process_gets_no_row_do_not_hang(longest_s, monkeypatch):
    monkeypatch.setattr(feed_sample, "_LONGEST_S", longest_s)
    ds = of_feeds(lambda i: {"id": i}, passes_in_workers)
    with iter(ds.shard_to(data_mesh(4), num_workers=1)) as batches:
        first = next(batches)
        rest = list(itertools.islice(batches, 3)) if longest_s < 1 else []
    assert sorted(flat(ids([first, *rest]))) == list(range(8 + 8 * len(rest)))


class Elsewhere(concurrent.futures.Executor):
    """Runs tasks in a world of another scale, as if in another process."""

    def __init__(self, scale=2):
        self.scale = scale

    def submit(self, function, *arguments):
        HERE.scale = self.scale
        try:
            made = pickle.loads(pickle.dumps(function(*arguments)))
        finally:
            HERE.scale = 1
        done = concurrent.futures.Future()
        done.set_result(made)
        return done


FOUND = {
    scaled: ("['x']", 2, 1, 1),
    noisy: ("['x']", 2, 1, 1),
    with_more: ("['more']", 0, 0, "no such leaf"),
    in_a_tuple: ("['p']", "a tuple", 0, "a list"),
    only_there: ("", "a dict", 3, "ValueError: too large"),
    only_here: ("", "no row", 3, "a dict"),
    of_4_mb: ("['x']", "[2., 2., ..., 2., 2.]", 1, "[1., 1., ..., 1., 1.]"),
    longer: ("['x']", "int32[64]", 0, "int32[32]"),
    unlike_texts: ("['x']", "b at [30]", 0, "a at [30]"),
    unlike_nans: ("['x']", r"b'\x02\x00\xc0\x7f' at [0]", 0, r"b'\x01\x00\xc0\x7f' at [0]"),
    unlike_within: ("['x']", "2.0 at [2, 5]", 0, "1.0 at [2, 5]"),
}


@pytest.fixture(name="all_in_time")
def with_all_in_time(monkeypatch):
    """Lets no record be left out because the machine is slow."""
    monkeypatch.setattr(sample, "_ALONE_S", 60.0)


@pytest.mark.usefixtures("all_in_time")
@pytest.mark.parametrize("function", FOUND)
def test_a_process_of_an_executor_that_gives_other_rows_is_named(function):
    (path, got, record, alone), ds = FOUND[function], grain.MapDataset.range(64).map(function)
    ds = ds.batch(5 if function is of_4_mb else 8).shard_to(
        data_mesh(4), executor=Elsewhere(), on_bad_record="mask", max_bad_records=1.0
    )
    with iter(ds) as batches:
        next(batches)
        with pytest.raises(ShardingError) as no:
            next(batches)
    assert str(no.value).startswith(
        f"batch{path}: the executor Elsewhere got {got} from record {record} of the dataset before"
        f" .batch, and one thread that reads alone gets {alone}, each time."
    )


@pytest.mark.usefixtures("all_in_time")
def test_each_run_of_an_executor_is_compared():
    executor = Elsewhere(scale=1)
    ds = grain.MapDataset.range(64).map(scaled).batch(8).shard_to(data_mesh(4), executor=executor)
    with iter(ds) as batches:
        list(itertools.islice(batches, 3))
        state = batches.get_state()
        executor.scale = 2
        batches.set_state(state)
        next(batches)
        with pytest.raises(ShardingError, match="Elsewhere got 48 from record 24"):
            next(batches)


class NoisyFile(OneFile):
    def __getitem__(self, index):
        return {**super().__getitem__(index), "noise": random.random()}


@pytest.mark.parametrize("kind", ["random access", "feeds"])
def test_a_random_leaf_hides_no_other_one(kind, tmp_path):
    text = refusal(kind, NoisyFile(tmp_path / "records"))
    assert text.startswith("batch['x']: ")


NUMBERS = itertools.count()
RANDOM = {
    "random numbers": lambda i: random.random(),
    "a rare change": lambda i: i + (random.random() < 0.02),
    "the time": lambda i: time.time(),
    "whole seconds": lambda i: int(time.time()),
    "a counter": lambda i: next(NUMBERS),
}
RIGHT = {
    "seeded": lambda i: np.random.default_rng(i).random(3),
    "NaN": lambda i: np.float32(np.nan),
    "text": lambda i: "a" * i,
    "bytes that end in a zero": lambda i: b"a\0",
    "no number": lambda i: None,
}


@pytest.mark.parametrize("name", [*RANDOM, *RIGHT])
@pytest.mark.parametrize("kind", KINDS)
def test_a_random_or_right_source_is_no_error(kind, name, caplog):
    function = {**RANDOM, **RIGHT}[name]
    source = grain.MapDataset.range(128).map(lambda i: {"id": i, "x": function(i)})
    with caplog.at_level(logging.WARNING):
        given = ids(KINDS[kind](source).shard_to(data_mesh(4)))
    assert sorted(flat(given)) == list(range(128))
    assert len([line for line in caplog.messages if "gave another value" in line]) <= 1
    if name in RIGHT:  # a process tells once that text stays on the host; see test_trees.py
        assert not [line for line in caplog.messages if "holds text" not in line]


def test_an_error_of_a_later_batch_comes_after_the_batches_before_it():
    """The random leaf makes the comparison wait until the readers have stopped, at that error."""

    def record(i):
        if i == 28:
            raise OSError("gone")
        return {"id": i, "x": random.random()}

    batches = iter(grain.MapDataset.range(800).map(record).batch(8).shard_to(data_mesh(4)))
    assert ids(itertools.islice(batches, 3)) == [[*range(8)], [*range(8, 16)], [*range(16, 24)]]
    with pytest.raises(OSError, match="gone"):
        next(batches)


def test_records_of_a_random_source_are_named_once(caplog):
    ds = grain.MapDataset.range(64).map(lambda i: {"id": i, "x": random.random()}).batch(8)
    ds = ds.shard_to(data_mesh(4))
    for _ in range(2):
        ids(ds)
    (line,) = [line for line in caplog.messages if "gave another value" in line]
    assert "batch['x']: another read of record" in line
    assert "use .seed(s) and .random_map" in line


@pytest.mark.parametrize("on_bad_record", ["mask", "error"])
def test_a_record_that_cannot_be_read_again_is_left_out(on_bad_record):
    def fails_the_second_time(index, number):
        if number > 1 or (index == 3 and on_bad_record == "mask"):
            raise ValueError("read once")

    ds = grain.MapDataset.source(Source(32, fails_the_second_time)).map(lambda i: {"id": i})
    ds = ds.batch(8).shard_to(data_mesh(4), on_bad_record=on_bad_record)
    assert len(flat(ids(ds))) == 32 - (on_bad_record == "mask")


def test_a_record_that_was_masked_and_can_be_read_again_is_left_out():
    def fails_for_the_batch(index, number):
        if index == 3 and threading.current_thread().name.startswith("grain-shard-host"):
            raise ValueError("not yet")

    ds = grain.MapDataset.source(Source(32, fails_for_the_batch)).map(lambda i: {"id": i})
    assert len(flat(ids(ds.batch(8).shard_to(data_mesh(4), on_bad_record="mask")))) == 31


def busy_there(i):
    if i == 3 and getattr(HERE, "scale", 1) > 1:
        raise OSError("busy")
    return {"id": i}


@pytest.mark.usefixtures("all_in_time")
def test_a_record_of_an_executor_that_was_masked_after_several_tries_is_no_other_world():
    ds = grain.MapDataset.range(32).map(busy_there).batch(8)
    retries = Retries(1, on=OSError)
    ds = ds.shard_to(data_mesh(4), executor=Elsewhere(), retries=retries, on_bad_record="mask")
    assert len(flat(ids(ds))) == 31


def test_a_random_source_of_which_no_record_can_be_read_a_third_time_is_no_error():
    def breaks_down(index, number):
        if number > 2 and not threading.current_thread().name.startswith("grain-shard-host"):
            raise OSError("down")

    ds = grain.MapDataset.source(Source(128, breaks_down))
    ds = ds.map(lambda i: {"id": i, "x": random.random()}).batch(64).shard_to(data_mesh(4))
    assert len(flat(ids(ds))) == 128


def test_few_records_of_this_host_are_read_again_and_only_once_for_a_dataset():
    source = Source(1000)
    ds = grain.MapDataset.source(source).map(lambda i: {"id": i}).batch(100).shard_to(data_mesh(4))
    ids(ds)
    again = collections.Counter(source.read_for_batches()) - collections.Counter(range(1000))
    assert 16 <= len(again) <= 17, "the middle record is read to compare contents, too"
    assert set(again) - {500} <= set(range(100)), "they are those of the first batch"
    reads = sum(source.requests.values())
    ids(ds)
    assert sum(source.requests.values()) == reads + 1000


def test_an_iterator_that_is_closed_after_its_first_batch_does_not_wait_for_slow_reads(monkeypatch):
    monkeypatch.setattr(rereads, "_DOUBT_S", 1e9)  # the reads would never end by themselves
    ds = grain.MapDataset.range(64).map(lambda i: {"x": os.environ.get("LATE", "0") + str(i)})
    ds = ds.batch(8).shard_to(data_mesh(4))
    with iter(ds) as batches:
        next(batches)
        os.environ["LATE"] = "1"
    del os.environ["LATE"]
