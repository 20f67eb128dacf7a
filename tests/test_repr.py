"""What people see of an object in a notebook or a debugger: what it is, and where it stands."""

import grain
import pytest

import grain_shard
from tests.conftest import data_mesh, numbered


def stream():
    return numbered(20, 8).to_iter_dataset().filter(lambda batch: True)


def make_feed(options):
    return grain.MapDataset.range(20).to_iter_dataset()


PAD = "PadToDivisible(divisor=4, remainder='pad', mask_key='valid_mask', "


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda mesh: numbered(20, 8).shard_to(mesh),
            "<ShardedDataset of random access, mesh (data=2), 3 batches>",
        ),
        (
            lambda mesh: stream().shard_to(mesh),
            "<ShardedDataset of stream, mesh (data=2)>",
        ),
        (
            lambda mesh: iter(stream().shard_to(mesh)),
            "<ShardedIterator of stream, mesh (data=2), not begun>",
        ),
        (
            lambda mesh: numbered(20, 8).shard_to(mesh).epochs(3),
            "<Epochs: 3 of <ShardedIterator of random access, mesh (data=2), not begun>>",
        ),
        (
            lambda mesh: next(numbered(20, 8).shard_to(mesh).epochs(3)),
            "<EpochBatches: epoch 0, 3 of 3 batches left>",
        ),
        (
            lambda mesh: grain_shard.prefetch_to_device(iter([1])),
            "<ShardedIterator of stream, not begun>",
        ),
        (
            lambda mesh: grain_shard.feeds(make_feed, num_feeds=4).batch(8),
            "FeedBatches(4 feeds, 8 rows)",
        ),
        (lambda mesh: grain_shard.ShardingTree.of(mesh), "ShardingTree(mesh=(data=2), P('data',))"),
        (
            lambda mesh: grain_shard.ShardingTree.of(mesh).layout(),
            "BatchLayout(divisor=2, shards=(0, 1), mesh=(data=2), num_hosts=1, amplification=1)",
        ),
        (
            lambda mesh: grain_shard.ShardByMesh(mesh),
            "ShardByMesh(shard_index=0, shard_count=1, drop_remainder=False)",
        ),
        (
            lambda mesh: grain_shard.from_iterable([], rows="global"),
            "<from_iterable(list, rows='global')>",
        ),
        (
            lambda mesh: grain_shard.mix([grain.MapDataset.range(8)] * 2, {0: [3, 1]}),
            "<mix({0: [3, 1]})>",
        ),
        (lambda mesh: grain_shard.BatchSchedule({0: 4}), "BatchSchedule(sizes={0: 4})"),
        (lambda mesh: grain_shard.DevicePlacement(), "DevicePlacement(default_device=None)"),
        (
            lambda mesh: numbered(20, 8).pipe(grain_shard.PadToDivisible(4)),
            f"<{PAD}global_batch_size=None, pad_value=0)>",
        ),
        (
            lambda mesh: stream().pipe(grain_shard.PadToDivisible(4)),
            f"<{PAD}global_batch_size=None, pad_value=0)>",
        ),
    ],
)
def test_an_object_says_what_it_is(make, text):
    assert repr(make(data_mesh(2))) == text


@pytest.mark.parametrize("ds", [numbered(20, 8), stream()], ids=["random access", "stream"])
def test_a_dataset_prints_its_repr(ds):
    sharded = ds.shard_to(data_mesh(2))
    assert str(sharded) == repr(sharded)


def test_an_iterator_says_where_it_stands():
    batches = iter(numbered(8, 8).shard_to(data_mesh(2)))
    seen = [repr(batches)]
    next(batches)
    seen.append(repr(batches))
    batches.close()
    seen.append(repr(batches))
    where = ["not begun", "under way", "closed"]
    assert seen == [f"<ShardedIterator of random access, mesh (data=2), {w}>" for w in where]


def test_an_epoch_says_how_much_of_it_is_left():
    with numbered(20, 8).shard_to(data_mesh(2)).epochs(2) as epochs:
        next(epochs)
        epoch = next(epochs)
        next(epoch)
        assert repr(epoch) == "<EpochBatches: epoch 1, 2 of 3 batches left>"


def test_a_profile_counts_the_batches_that_it_measured():
    ds = numbered(40, 8).shard_to(data_mesh(2))
    profiled = grain_shard.profile(ds, lambda batch: batch["id"], num_batches=2, warmup=1)
    assert repr(profiled).startswith("batches measured: 2 (after 1 of warm-up)\n")
    few = grain_shard.profile(ds, lambda batch: batch["id"], num_batches=5, warmup=4)
    asked = "batches measured: 1 of 5, then the dataset ended (after 4 of warm-up)\n"
    assert repr(few).startswith(asked)
