"""Feeds made of a function, and the batches and states of a run that stops and goes on."""

import contextlib
import itertools
import json

import grain
import jax
import numpy as np

import grain_shard
from tests.conftest import ids, to_numpy

IN_TURN = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)  # no read ahead


class Odd(BaseException):
    """Neither an Exception nor one of Python's own."""


def feeds_of(row, num_feeds, global_batch_size, *, length=1000, options=IN_TURN):
    """Batches of feeds, each of which gives ``row(feed, 0)``, ``row(feed, 1)``, ..."""

    def make_feed(feed):
        records = grain.MapDataset.range(length).map(lambda i: row(feed.shard_index, i))
        return records.to_iter_dataset(options)

    return grain_shard.feeds(make_feed, num_feeds=num_feeds).batch(global_batch_size)


def shared_out(records, num_feeds, global_batch_size, options=IN_TURN):
    """Batches of feeds, among which records are shared out in turn."""

    def make_feed(feed):
        return records[feed.shard_index :: feed.shard_count].to_iter_dataset(options)

    return grain_shard.feeds(make_feed, num_feeds=num_feeds).batch(global_batch_size)


def with_states(ds, state=None, count=None):
    """The next batches, each with the state after it."""
    found = []
    with contextlib.closing(iter(ds)) as batches:
        if state is not None:
            batches.set_state(state)
        for batch in itertools.islice(batches, count):
            found.append((to_numpy(batch), json.loads(json.dumps(batches.get_state()))))
    return found


def assert_same(found, expected):
    """Batches with states are equal: leaf by leaf, dtypes and the order of feeds included."""
    for (batch, state), (expected_batch, expected_state) in zip(found, expected, strict=True):
        assert jax.tree.structure(batch) == jax.tree.structure(expected_batch)
        for leaf, expected_leaf in zip(
            jax.tree.leaves(batch), jax.tree.leaves(expected_batch), strict=True
        ):
            assert leaf.dtype == expected_leaf.dtype
            np.testing.assert_array_equal(leaf, expected_leaf)
        assert state == expected_state
        assert list(state["feeds"]) == list(expected_state["feeds"])


def after(ds, num_batches, state=None):
    """The ids of the next batches, and the state after them, as JSON gives it back."""
    with iter(ds) as iterator:
        if state is not None:
            iterator.set_state(state)
        seen = ids([next(iterator) for _ in range(num_batches)])
        return seen, json.loads(json.dumps(iterator.get_state()))


def going_on(ds, state):
    """The ids of all batches after a state."""
    with iter(ds) as iterator:
        iterator.set_state(state)
        return ids(iterator)


def flat(batches):
    """The ids of all batches in one list."""
    return list(itertools.chain.from_iterable(batches))


def six(make, start):
    return grain.MapDataset.range(start, start + 6).map(make)


# Batches of 4 of the records ``make(start)``, ``make(start + 1)``, ...: six of them.
KINDS = {
    "random access": lambda make, start=0: six(make, start).batch(4),
    "custom batch": lambda make, start=0: six(make, start).batch(4).map(lambda batch: batch),
    "stream": lambda make, start=0: six(make, start).to_iter_dataset().batch(4),
    "feeds": lambda make, start=0: shared_out(six(make, start), 4, 4),
}
