"""`check(train, apart_from=test)`: no record is in both pipelines, in any of three epochs."""

import re
import warnings

import grain
import numpy as np
import pytest

import grain_shard
from grain_shard import ShardingError, check, split
from grain_shard.tools.checking.apart import Unknown, apart, records_read
from tests.conftest import data_mesh
from tests.counting_source import InFiles, Source, bad

SOURCE = [{"id": np.int32(i)} for i in range(40)]


def as_record(i):
    return {"id": np.int32(i)}


def records():
    return grain.MapDataset.source(SOURCE)


def sharded(ds):
    return ds.batch(8).shard_to(data_mesh(8))


def feeds(ds):
    def make_feed(feed):
        own = ds[feed.shard_index :: feed.shard_count]
        return own.seed(1).shuffle().repeat(2).to_iter_dataset()

    return grain_shard.feeds(make_feed, num_feeds=4).batch(8).shard_to(data_mesh(8))


def stream(ds):
    return sharded(ds.seed(1).shuffle().to_iter_dataset().map(lambda record: record))


LATER = float("inf")


train, test = split(records(), [0.75, 0.25], seed=0)
shuffled = records().shuffle(seed=1)
windows = grain.experimental.WindowShuffleMapDataset(records(), window_size=20, seed=0)

APART = {
    "parts of a split": (sharded(train.seed(1).shuffle()), test),
    "both after shard_to": (sharded(train.seed(1).shuffle()), sharded(test)),
    "endless": (sharded(train.seed(1).shuffle().repeat()), test),
    "slices below the shuffle": (sharded(records()[:30].shuffle(seed=1)), records()[30:]),
    "slices of batches": (
        records().batch(8)[:3].shard_to(data_mesh(8)),
        records().batch(8)[3:].shard_to(data_mesh(8)),
    ),
    "feeds": (feeds(train), test),
    "stream": (stream(train), test),
    "schedule": (train.pipe(grain_shard.BatchSchedule({0: 8, 2: 16})).shard_to(data_mesh(8)), test),
}


@pytest.mark.parametrize("pair", APART.values(), ids=APART)
def test_pipelines_without_a_common_record_are_apart(pair):
    here, there, error = apart(*pair, LATER)
    assert error is None
    assert here + there == 40


@pytest.mark.slow
def test_check_has_a_line_for_it():
    lines = check(sharded(train), seconds=5, apart_from=test).lines
    assert [(line.compared, line.found) for line in lines if line.name == "apart"] == [
        ("30 and 10 records", "ok")
    ]
    with pytest.raises(ShardingError, match="both pipelines read 10 records"):
        check(sharded(records()), apart_from=test)


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of the slice of what is shuffled in each epoch
    SHARING = {
        "slices of a shuffle": (sharded(shuffled[:30]), shuffled[30:]),
        "batches of a shuffle": (
            shuffled.batch(8)[:3].shard_to(data_mesh(8)),
            shuffled.batch(8)[3:],
        ),
        "a mixture with the test records": (
            sharded(grain.MapDataset.mix([train, test])),
            test,
        ),
        "feeds": (feeds(records()), test),
        "stream": (stream(records()), test),
        "a window shuffle": (sharded(windows[:30]), windows[30:]),
        "another source with equal records": (
            sharded(grain.MapDataset.source([dict(record) for record in SOURCE])),
            test,
        ),
        "sources of the same files": (
            sharded(grain.MapDataset.source(InFiles(20)).map(as_record)),
            grain.MapDataset.source(InFiles(20)),
        ),
    }


@pytest.mark.parametrize("pair", SHARING.values(), ids=SHARING)
def test_a_record_in_both_pipelines_is_named(pair):
    _, _, error = apart(*pair, LATER)
    assert re.search(r"both pipelines read \d+ records within 3 epochs: record \d", str(error))
    assert "grain_shard.split(" in error.remedy


def test_the_records_that_a_pipeline_reads_are_found_without_reading_them():
    ds = sharded(train.seed(1).shuffle().random_map(lambda record, rng: record))
    (read,) = records_read(ds, LATER)
    assert read.source is SOURCE
    assert read.indices == sorted(int(record["id"]) for record in train)


class Reversed(grain.MapDataset):
    """A dataset of the user: element i is the last but i of its parent."""

    def __len__(self):
        return len(self.parents[0])

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self.parents[0][len(self) - 1 - index]


def numbers(first, stop):
    return sharded(grain.MapDataset.range(first, stop).map(as_record))


odd, even = (records().filter(lambda r, rest=rest: r["id"] % 2 == rest) for rest in (1, 0))
UNKNOWN = {
    "have no index": (grain_shard.from_iterable(SOURCE).shard_to(data_mesh(8)), test),
    "it is unknown which records": (sharded(Reversed(records())[:20]), records()[20:]),
    "numbers of its own": (numbers(0, 20), numbers(10, 30)),
    "which a filter or a dropped remainder may leave out": (
        odd.to_iter_dataset().batch(8).shard_to(data_mesh(8)),
        even,
    ),
    "dropped remainder": (
        records().batch(16).shard_to(data_mesh(8), remainder="drop"),
        records()[32:],
    ),
    "in a zip": (
        sharded(
            grain.experimental.ZipMapDataset(
                [records(), grain.MapDataset.source([np.int32(i % 3) for i in range(40)])]
            ).map(lambda pair: {"id": pair[0]["id"], "label": pair[1]})
        ),
        grain.MapDataset.source([np.int32(i % 3) for i in range(40)]),
    ),
    "cannot be compared": (
        sharded(records()),
        grain.MapDataset.source(Source(40, bad(7))),
    ),
}


@pytest.mark.parametrize(("why", "pair"), UNKNOWN.items(), ids=UNKNOWN)
def test_what_is_unknown_is_said_and_is_no_verdict(why, pair):
    with pytest.raises(Unknown, match=why):
        apart(*pair, LATER)


def test_after_its_time_it_is_unknown():
    with pytest.raises(Unknown, match="the time ran out"):
        apart(sharded(train), test, until=0)


def test_an_endless_pipeline_of_few_records_is_followed_for_three_epochs_only():
    (read,) = records_read(feeds(train.repeat()), LATER)
    assert len(read.indices) == len(train)
