"""`check(train, apart_from=test)`: no record is in both pipelines, in any of three epochs."""

import re
import warnings

import grain
import numpy as np
import pytest

import grain_shard
from grain_shard import ShardingError, check, split
from grain_shard.tools.checking.apart import records_read
from tests.conftest import data_mesh
from tests.counting_source import InFiles

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
    return sharded(ds.seed(1).shuffle().to_iter_dataset().filter(lambda record: True))


def line(train, test):
    return next(line for line in check(train, apart_from=test).lines if line.name == "apart")


train, test = split(records(), [0.75, 0.25], seed=0)
shuffled = records().shuffle(seed=1)

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


@pytest.mark.slow
@pytest.mark.parametrize("pair", APART.values(), ids=APART)
def test_pipelines_without_a_common_record_are_apart(pair):
    found = line(*pair)
    assert found.found == "ok"
    assert (
        found.compared == f"{len(train)} and {len(test)} records" or "24 and 16" in found.compared
    )


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
        "another source with equal records": (
            sharded(grain.MapDataset.source([dict(record) for record in SOURCE])),
            test,
        ),
        "sources of the same files": (
            sharded(grain.MapDataset.source(InFiles(20)).map(as_record)),
            grain.MapDataset.source(InFiles(20)),
        ),
    }


@pytest.mark.slow
@pytest.mark.parametrize("pair", SHARING.values(), ids=SHARING)
def test_a_record_in_both_pipelines_is_named(pair):
    with pytest.raises(ShardingError, match="both pipelines read") as raised:
        check(pair[0], apart_from=pair[1])
    assert re.search(r"records within 3 epochs: (record \d|\('file-)", str(raised.value))
    assert "grain_shard.split(" in raised.value.remedy


def test_the_records_that_a_pipeline_reads_are_found_without_reading_them():
    (read,) = records_read(sharded(train.seed(1).shuffle().random_map(lambda r, rng: r)))
    assert read.source is SOURCE
    assert np.flatnonzero(read.is_read).tolist() == sorted(int(r["id"]) for r in train)


def test_pipelines_whose_records_have_no_index_are_refused():
    with pytest.raises(ShardingError, match="have no index"):
        records_read(grain_shard.from_iterable(SOURCE).shard_to(data_mesh(8)))
