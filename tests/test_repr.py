"""What people see of an object in a notebook or a debugger: what it is, and where it stands."""

import grain
import pytest

import grain_shard
from tests.conftest import data_mesh, numbered


def batches():
    return numbered(20, 8).shard_to(data_mesh(2))


def unsharded_stream():
    return numbered(20, 8).to_iter_dataset().filter(lambda batch: True)


def stream():
    return unsharded_stream().shard_to(data_mesh(2))


def feed_batches():
    rows = grain.MapDataset.range(20).to_iter_dataset()
    return grain_shard.feeds(lambda feed: rows, num_feeds=4).batch(8)


ITERATOR = "<ShardedIterator of random access, mesh (data=2), {}>"
PAD = (
    "<PadToDivisible(divisor=4, remainder='pad', mask_key='valid_mask', global_batch_size=None,"
    " pad_value=0)>"
)
LAYOUT = "BatchLayout(divisor=2, shards=(0, 1), mesh=(data=2), num_hosts=1, amplification=1)"
BY_MESH = "ShardByMesh(shard_index=0, shard_count=1, drop_remainder=False)"


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (batches, "<ShardedDataset of random access, mesh (data=2), 3 batches>"),
        (stream, "<ShardedDataset of stream, mesh (data=2)>"),
        (lambda: iter(stream()), "<ShardedIterator of stream, mesh (data=2), not begun>"),
        (lambda: batches().epochs(3), f"<Epochs: 3 of {ITERATOR.format('not begun')}>"),
        (lambda: next(batches().epochs(3)), "<EpochBatches: epoch 0, 3 of 3 batches left>"),
        (
            lambda: grain_shard.prefetch_to_device(iter([1])),
            "<ShardedIterator of stream, not begun>",
        ),
        (feed_batches, "FeedBatches(4 feeds, 8 rows)"),
        (
            lambda: grain_shard.ShardingTree.of(data_mesh(2)),
            "ShardingTree(mesh=(data=2), P('data',))",
        ),
        (lambda: grain_shard.ShardingTree.of(data_mesh(2)).layout(), LAYOUT),
        (lambda: grain_shard.ShardByMesh(data_mesh(2)), BY_MESH),
        (
            lambda: grain_shard.from_iterable([], rows="global"),
            "<from_iterable(list, rows='global')>",
        ),
        (
            lambda: grain_shard.mix([grain.MapDataset.range(8)] * 2, {0: [3, 1]}),
            "<mix({0: [3, 1]})>",
        ),
        (lambda: grain_shard.BatchSchedule({0: 4}), "BatchSchedule(sizes={0: 4})"),
        (grain_shard.DevicePlacement, "DevicePlacement(default_device=None)"),
        (lambda: numbered(20, 8).pipe(grain_shard.PadToDivisible(4)), PAD),
        (lambda: unsharded_stream().pipe(grain_shard.PadToDivisible(4)), PAD),
    ],
)
def test_an_object_says_what_it_is(make, text):
    assert repr(make()) == text


@pytest.mark.parametrize("make", [batches, stream])
def test_a_dataset_prints_its_repr(make):
    sharded = make()
    assert str(sharded) == repr(sharded)


def test_an_iterator_says_where_it_stands():
    iterator = iter(batches())
    assert repr(iterator) == ITERATOR.format("not begun")
    next(iterator)
    assert repr(iterator) == ITERATOR.format("under way")
    iterator.close()
    assert repr(iterator) == ITERATOR.format("closed")


def test_an_epoch_says_how_much_of_it_is_left():
    with batches().epochs(2) as epochs:
        next(epochs)
        epoch = next(epochs)
        next(epoch)
        assert repr(epoch) == "<EpochBatches: epoch 1, 2 of 3 batches left>"
