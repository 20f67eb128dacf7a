"""Helpers that make feeds of a function or of records, and collect batches with their states."""

import contextlib
import itertools
import json

import grain
import jax
import numpy as np

import grain_shard
from grain_shard import BatchLayout, ShardBatch
from tests.conftest import ids, to_numpy

IN_TURN = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # Grain does not read ahead


def read_together(records, global_batch_size):
    """Returns batches of all records, the records of each read in one go by this package."""
    return records.batch(global_batch_size).pipe(ShardBatch(BatchLayout(1, (0,))))


class Odd(BaseException):
    """An error that is neither an `Exception` nor one of Python's own `BaseException`s."""


def feeds_of(row, num_feeds, global_batch_size, *, length=1000, options=IN_TURN):
    """Returns batches of feeds. Each feed gives the rows ``row(feed, 0)``, ``row(feed, 1)``, ...

    Args:
        row: Function that takes the index of the feed and the number of the row.
        num_feeds: Number of feeds.
        global_batch_size: Rows of a batch, of all feeds together.
        length: Number of rows of each feed.
        options: Grain's read options for each feed.
    """

    def make_feed(feed):
        records = grain.MapDataset.range(length).map(lambda i: row(feed.shard_index, i))
        return records.to_iter_dataset(options)

    return grain_shard.feeds(make_feed, num_feeds=num_feeds).batch(global_batch_size)


def shared_out(records, num_feeds, global_batch_size, options=IN_TURN):
    """Returns batches of feeds. Record r belongs to feed r modulo `num_feeds`."""

    def make_feed(feed):
        return records[feed.shard_index :: feed.shard_count].to_iter_dataset(options)

    return grain_shard.feeds(make_feed, num_feeds=num_feeds).batch(global_batch_size)


def with_states(ds, state=None, count=None):
    """Returns pairs of a batch, as numpy arrays, and the state after it.

    Args:
        ds: The dataset after `.shard_to`.
        state: A state to restore first; None to begin at the start.
        count: Number of batches; None for all.
    """
    found = []
    with contextlib.closing(iter(ds)) as batches:
        if state is not None:
            batches.set_state(state)
        for batch in itertools.islice(batches, count):
            found.append((to_numpy(batch), json.loads(json.dumps(batches.get_state()))))
    return found


def assert_same(found, expected):
    """Checks that two results of `with_states` are equal, with dtypes and the order of feeds."""
    assert_same_batches([batch for batch, _ in found], [batch for batch, _ in expected])
    for (_, state), (_, expected_state) in zip(found, expected, strict=True):
        assert state == expected_state
        assert list(state["feeds"]) == list(expected_state["feeds"])


def assert_same_batches(found, expected):
    """Checks that batches, as arrays of JAX or numpy, are equal, with structures and dtypes."""
    for batch, like in zip(found, expected, strict=True):
        assert jax.tree.structure(batch) == jax.tree.structure(like)
        for leaf, like_leaf in zip(jax.tree.leaves(batch), jax.tree.leaves(like), strict=True):
            assert leaf.dtype == like_leaf.dtype
            np.testing.assert_array_equal(np.asarray(leaf), np.asarray(like_leaf))


def after(ds, num_batches, state=None):
    """Returns the ids of the next batches, and the state after them, read back from JSON.

    Args:
        ds: The dataset after `.shard_to`.
        num_batches: Number of batches.
        state: A state to restore first; None to begin at the start.
    """
    with iter(ds) as iterator:
        if state is not None:
            iterator.set_state(state)
        seen = ids([next(iterator) for _ in range(num_batches)])
        return seen, json.loads(json.dumps(iterator.get_state()))


def going_on(ds, state):
    """Returns the ids of each batch after a state."""
    with iter(ds) as iterator:
        iterator.set_state(state)
        return ids(iterator)


def flat(batches):
    """Returns the ids of all batches as one list."""
    return list(itertools.chain.from_iterable(batches))


def six(make, start):
    return grain.MapDataset.range(start, start + 6).map(make)


# For each kind of pipeline, a function that returns batches of 4. They have the six records
# ``make(start)`` to ``make(start + 5)``.
KINDS = {
    "random access": lambda make, start=0: six(make, start).batch(4),
    "custom batch": lambda make, start=0: six(make, start).batch(4).map(lambda batch: batch),
    "stream": lambda make, start=0: six(make, start).to_iter_dataset().batch(4),
    "feeds": lambda make, start=0: shared_out(six(make, start), 4, 4),
}
