"""A source that returns one array for all records is refused, also if only one thread reads it."""

import grain
import numpy as np
import pytest

import grain_shard
from grain_shard import ShardingError
from tests.conftest import data_mesh, ids

TOKENS = np.arange(100)


class Source:
    """64 records, by a function of the index and of a buffer that the source keeps."""

    def __init__(self, record):
        self.record, self.buffer = record, np.zeros(3, np.int64)

    def __len__(self):
        return 64

    def __getitem__(self, index):
        return self.record(index, self.buffer)


def overwritten(index, buffer):
    buffer[:] = index
    return buffer


REUSED = {
    "the buffer": lambda i, buffer: {"id": overwritten(i, buffer)},
    "a view of it": lambda i, buffer: [{"id": overwritten(i, buffer)[1:]}],
    "the buffer of two sources in turn": lambda i, buffer: (
        {"id": overwritten(i, buffer) if i % 2 else np.full(3, i)}
    ),
}
RIGHT = {
    "a copy": lambda i, buffer: {"id": overwritten(i, buffer).copy()},
    "a constant beside it": lambda i, buffer: {"id": np.full(3, i), "constant": buffer},
    "overlapping windows of one array": lambda i, _: {"id": TOKENS[i : i + 3]},
    "a memory map and an offset": lambda i, _: {"all": TOKENS, "id": TOKENS[i : i + 1]},
    "a class of its own": lambda i, _: {1: None, "id": i},
}


def unpacked(record):
    record = record[0] if isinstance(record, list) else record
    return {"id": np.min(record["id"])}


def of_map(source, **options):
    ds = grain.MapDataset.source(source).map(unpacked).batch(16)
    return ds.shard_to(data_mesh(1), **options)


def of_feeds(source, **options):
    def make_feed(feed):
        ds = grain.MapDataset.source(source)[feed.shard_index :: feed.shard_count]
        return ds.map(unpacked).to_iter_dataset()

    ds = grain_shard.feeds(make_feed, num_feeds=1).batch(16)
    return ds.shard_to(data_mesh(1), **options)


@pytest.mark.parametrize("make", [of_map, of_feeds])
@pytest.mark.parametrize("record", REUSED.values(), ids=REUSED)
def test_a_buffer_that_the_next_read_overwrites_is_refused(record, make):
    with pytest.raises(ShardingError, match=r"one array for several records.*of SourceMapDataset"):
        list(make(Source(record), num_threads=1))


def test_the_rows_of_several_batches_that_are_read_in_one_call_are_looked_at_together():
    class Together(Source):
        def __getitems__(self, indices):
            return [self[index] for index in indices]

    source = Together(REUSED["the buffer"])
    with pytest.raises(ShardingError, match="one array for several records"):
        list(grain.MapDataset.source(source).batch(1).shard_to(data_mesh(1), num_threads=1))


@pytest.mark.parametrize("make", [of_map, of_feeds])
@pytest.mark.parametrize("record", RIGHT.values(), ids=RIGHT)
def test_memory_that_records_share_without_a_change_is_fine(record, make):
    assert ids(make(Source(record), num_threads=1)) == np.arange(64).reshape(4, 16).tolist()
