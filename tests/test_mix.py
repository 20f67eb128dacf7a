"""`mix`: weights that change at given records. On several hosts: test_hosts_changing_runs.py."""

import contextlib
import itertools
import json
import pickle
import sys

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import grain_shard
from grain_shard import StateError, mix
from tests.conftest import data_mesh, ids, refused
from tests.counting_source import BatchedSource, Source, nothing
from tests.pipelines import IN_TURN, after, flat, going_on, shared_out


def component(number, length=10_000):
    """Records that say where they come from: component 2 has 2_000_000, 2_000_001, ..."""
    first = number * 1_000_000
    return grain.MapDataset.range(first, first + length)


def components(count, length=10_000):
    return [component(number, length) for number in range(count)]


def counts(ds, num_records, num_components):
    """How many records of each component are among the first k: int[num_records + 1, components].

    Checks on the way that each component comes in its own order, without a gap.
    """
    values = np.array([ds[i] for i in range(num_records)])
    taken = np.zeros((num_records + 1, num_components), int)
    for number in range(num_components):
        of_it = values[values // 1_000_000 == number]
        assert of_it.tolist() == list(range(number * 1_000_000, of_it.size + number * 1_000_000))
        taken[1:, number] = np.cumsum(values // 1_000_000 == number)
    return taken


@pytest.mark.parametrize(
    ("num_components", "weights", "expected"),
    [
        # A record of the second dataset is 100 more than its place there, and so on.
        (2, {0: [3, 1]}, [0, 1, 100, 2, 3, 4, 101, 5]),
        (
            2,
            {0: [3, 1], 8: [1, 1], 12: [0, 1]},
            [0, 1, 100, 2, 3, 4, 101, 5, 6, 102, 7, 103, 104, 105, 106],
        ),
        (3, {0: [2, 1, 1]}, [0, 100, 1, 200, 2, 101, 3, 201]),
    ],
)
def test_each_dataset_comes_in_its_own_order_by_weights_that_change(
    num_components, weights, expected
):
    datasets = [grain.MapDataset.range(100 * k, 100 * k + 100) for k in range(num_components)]
    ds = mix(datasets, weights)
    assert [ds[i] for i in range(len(expected))] == expected


def add_noise(x, rng):
    return x + rng.random()


weights_of = st.lists(st.integers(0, 12), min_size=4, max_size=4).filter(any)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.integers(1, 60), max_size=3), data=st.data())
def test_no_dataset_is_ever_a_whole_record_from_its_share_since_the_last_change(steps, data):
    starts = [0, *itertools.accumulate(steps)]
    weights = {start: data.draw(weights_of) for start in starts}
    end = starts[-1] + 100
    taken = counts(mix(components(4), weights), end, 4)
    for start, stop in itertools.pairwise([*starts, end]):
        share = np.array(weights[start]) / sum(weights[start])
        since = taken[start : stop + 1] - taken[start]
        exact = np.arange(stop - start + 1)[:, None] * share
        assert np.abs(since - exact).max() < 1


@pytest.mark.parametrize(
    ("weights", "exact"),
    [
        ([0.7, 0.3], [7, 3]),
        ([1, 1 / 2], [2, 1]),
        ([np.float32(0.1), 0.9], [1, 9]),
        ([5, 0], [1, 0]),
        # Without a short pattern they are rounded to 65536 parts, but a tiny one not away.
        ([2**0.5, 1], [19195, 13573]),
        ([1, 1e-9], [65536, 1]),
    ],
)
def test_weights_are_taken_as_they_are_written(weights, exact):
    assert str(mix(components(2, 10**7), {0: weights})) == f"mix({{0: {exact}}})"
    assert abs(exact[0] / sum(exact) - weights[0] / sum(weights)) < 1 / 65536


@given(lengths=st.lists(st.integers(1, 50), min_size=3, max_size=3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_the_length_is_the_most_that_repeats_nothing(lengths, data):
    weights = {0: data.draw(weights_of)[:3], 20: data.draw(weights_of)[:3]}
    if not all(map(any, weights.values())):
        return
    ds = mix([component(i, length) for i, length in enumerate(lengths)], weights)
    taken = counts(ds, len(ds), 3)
    assert (taken[-1] <= lengths).all()
    dataset, record = divmod(ds[len(ds)], 1_000_000)
    assert taken[-1][dataset] == lengths[dataset]
    assert record == 0, "what follows is in its second epoch"


def test_what_is_repeated_goes_round_in_another_order():
    small = component(0, 3).seed(1).shuffle()
    ds = mix([small.repeat(), component(1, 30)], {0: [1, 1]})
    assert len(ds) == 61, "the last is one of those that never end"
    of_small = [ds[i] for i in range(60) if ds[i] < 1_000_000]
    epochs = [of_small[i : i + 3] for i in range(0, 30, 3)]
    assert all(sorted(epoch) == [0, 1, 2] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


def test_endless_datasets_make_an_endless_mixture():
    ds = mix([ds.repeat() for ds in components(2, 5)], {0: [3, 1], 10**12: [1, 1]})
    assert len(ds) == sys.maxsize
    web, code = (2 * 10**12 - 10**12) // 2 + 3 * 10**12 // 4, 10**12 // 2 + 10**12 // 4
    assert sorted(ds[2 * 10**12 + i] for i in range(2)) == [web % 5, 1_000_000 + code % 5]


def test_a_dataset_that_no_weight_uses_may_be_empty_and_ends_nothing():
    ds = mix([component(0, 5), component(1, 0)], {0: [1, 0]})
    assert list(ds) == [0, 1, 2, 3, 4]


def test_what_stands_above_and_below_keeps_its_meaning():
    noisy = [ds.seed(3).random_map(add_noise) for ds in components(2)]
    ds = mix(noisy, {0: [1, 1], 10: [1, 3]})
    assert [int(x) for x in ds[4:8]] == [2, 1_000_002, 3, 1_000_003]
    assert [ds[i] for i in range(20)] == [pickle.loads(pickle.dumps(ds))[i] for i in range(20)]
    assert list(ds[:20].seed(1).shuffle()) != list(ds[:20])
    assert sorted(ds[:20].seed(1).shuffle()) == sorted(ds[:20])


def test_a_batch_is_one_call_into_each_source():
    sources = [BatchedSource(100), BatchedSource(100)]
    first, second = map(grain.MapDataset.source, sources)
    ds = mix([first, second.map(lambda i: 1000 + i)], {0: [3, 1]})
    ds = ds.map(lambda i: {"id": np.int32(i)}).batch(8)
    with iter(ds.shard_to(data_mesh(2), num_threads=1, cpu_buffer_size=1)) as batches:
        assert ids([next(batches)]) == [[0, 1, 1000, 2, 3, 4, 1001, 5]]
    assert sources[0].calls[0] == [0, 1, 2, 3, 4, 5]
    assert sources[1].calls[0] == [0, 1]


# Batches, states, and other weights.


def training(weights, global_batch_size=4, **options):
    records = [
        component(number, 60).seed(number).shuffle().map(lambda i: {"id": np.int32(i)})
        for number in range(2)
    ]
    return mix(records, weights).batch(global_batch_size).shard_to(data_mesh(4), **options)


@pytest.mark.parametrize("stop_after", [0, 4, 5, 6, 12])
@pytest.mark.usefixtures("hints")
def test_a_state_goes_on_over_changes_of_weights(stop_after):
    weights = {0: [3, 1], 18: [1, 1], 30: [1, 4]}
    seen, state = after(training(weights), stop_after)
    assert len(json.dumps(state)) < 200
    assert seen + going_on(training(weights), state) == ids(training(weights))


LATER = {0: [3, 1], 20: [1, 1], 40: [0, 1]}


@pytest.mark.parametrize(
    ("before", "num_batches", "now", "size"),
    [
        *(({0: [3, 1]}, 5, LATER, size) for size in (3, 4, 8, 20, 64)),
        # Weights that would have changed later may be taken back.
        ({0: [3, 1], 20: [1, 1]}, 5, {0: [3, 1]}, 4),
        # At the beginning, all weights may change.
        ({0: [3, 1]}, 0, {0: [1, 1]}, 4),
    ],
)
def test_weights_may_change_from_the_record_on_at_which_a_run_is_restored(
    before, num_batches, now, size
):
    seen, state = after(training(before), num_batches)  # of 4 records
    found = seen + going_on(training(now, global_batch_size=size), state)
    whole, rows = ids(training(now)), flat(found)
    assert rows == flat(whole)
    assert size != 4 or found == whole
    assert len(rows) == len(set(rows)), "no record comes twice"


@pytest.mark.parametrize(
    ("weights", "options", "changed"),
    [
        ({0: [1, 3]}, {}, "weights"),
        ({0: [3, 1], 19: [1, 1]}, {}, "weights"),
        ({0: [3, 1], 4: [1, 1]}, {}, "weights"),
        ({0: [3, 1], 10: [3, 1]}, {}, "weights"),
        ({0: [3, 1]}, {"remainder": "drop"}, "remainder"),  # as ever
    ],
)
def test_weights_of_the_past_may_not_change(weights, options, changed):
    _, state = after(training({0: [3, 1]}), 5)
    with pytest.raises(StateError, match=rf"\b{changed}\b.* changed"):
        going_on(training(weights, **options), state)


@pytest.mark.parametrize(
    "above",
    [
        lambda ds: ds.seed(1).shuffle().batch(4),
        lambda ds: ds[::2].batch(4),
        lambda ds: ds.batch(4)[1:],
    ],
    ids=["shuffle", "slice", "slice of batches"],
)
def test_where_records_are_not_in_the_order_of_the_mixture_all_weights_are_fixed(above):
    def build(weights):
        ds = mix([ds.map(lambda i: {"id": np.int32(i)}) for ds in components(2, 60)], weights)
        return above(ds).shard_to(data_mesh(4))

    _, state = after(build({0: [3, 1]}), 2)
    iter(build({0: [3, 1]})).set_state(state)
    with pytest.raises(StateError, match=r"\btransforms\b.* changed"):
        iter(build({0: [3, 1], 40: [1, 1]})).set_state(state)


def test_in_a_second_epoch_all_weights_are_fixed():
    def build(weights):
        ds = mix([ds.map(lambda i: {"id": np.int32(i)}) for ds in components(2, 6)], weights)
        return ds.batch(4).repeat(2).shard_to(data_mesh(4))

    first, state = after(build({0: [1, 1]}), 2)
    assert first == [[0, 1_000_000, 1, 1_000_001], [2, 1_000_002, 3, 1_000_003]]
    iter(build({0: [1, 1], 8: [1, 3]})).set_state(state)
    _, state = after(build({0: [1, 1]}), 4)
    iter(build({0: [1, 1]})).set_state(state)
    with pytest.raises(StateError, match=r"\bweights\b.* changed"):
        iter(build({0: [1, 1], 8: [1, 3]})).set_state(state)


@pytest.mark.parametrize("remainder", ["pad", "drop"])
def test_weights_that_make_an_epoch_longer_go_on_behind_the_last_record_handed_out(remainder):
    options = {"global_batch_size": 16, "remainder": remainder}
    seen, state = after(training({0: [1, 0]}, **options), 3)
    longer = training({0: [1, 0], 48: [1, 1]}, **options)
    again = training({0: [1, 0], 48: [1, 1]}, **options)
    assert seen + going_on(longer, state) == ids(again)


def test_in_feeds_each_feed_has_its_part_of_the_mixture():
    whole = mix(components(2, 40), {0: [3, 1], 16: [1, 3]})
    ds = shared_out(whole.map(lambda i: {"id": np.int32(i)}), 2, 8).shard_to(data_mesh(4))
    everything = ids(ds)
    order = [whole[8 * batch + 2 * row + feed] for batch, feed, row in np.ndindex(3, 2, 4)]
    assert flat(everything[:3]) == order
    seen, state = after(ds, 2)
    assert seen + going_on(ds, state) == everything


# Misuse.


@pytest.mark.parametrize(
    ("datasets", "weights", "message"),
    [
        ([], {0: []}, "mix got no dataset"),
        ([[1, 2]], {0: [1]}, "mix got a list, not a grain.MapDataset"),
        ([component(0).to_iter_dataset()], {0: [1]}, "For streams use grain.IterDataset.mix"),
        ([component(0), component(1, 0)], {0: [1, 1]}, "dataset 1 of the mixture"),
        *(
            (components(2), weights, f"whose first key is 0. Got {weights!r}")
            for weights in (
                *([3, 1], {}, {5: [3, 1]}, {"0": [3, 1]}, {0.0: [3, 1]}),
                *({0: [1, 1], -3: [3, 1]}, {0: [1, 1], 9: [2, 1], 5: [3, 1]}),
            )
        ),
        (components(2), {0: [3, 1], 10: [1]}, "the weights from record 10 on are [1]"),
        (components(2), {0: 3}, "the weights from record 0 on are 3"),
        (components(2), {0: "31"}, "the weights from record 0 on are '31'"),
        (components(2), {0: [3, -1]}, "the weights from record 0 on are [3, -1]"),
        (components(2), {0: [3, float("nan")]}, "the weights from record 0 on are [3, nan]"),
        (components(2), {0: [float("inf"), 1]}, "the weights from record 0 on are [inf, 1]"),
        (components(2), {0: [3, None]}, "the weights from record 0 on are [3, None]"),
        (components(2), {0: [1, 1], 7: [0, 0]}, "the weights from record 7 on are [0, 0]"),
    ],
)
def test_misuse_is_refused_and_says_what_to_do(datasets, weights, message):
    with refused(message):
        mix(datasets, weights)


@pytest.mark.parametrize("kinds", [(Source, Source), (BatchedSource, Source), (BatchedSource,) * 2])
def test_a_feed_evaluates_a_record_when_its_row_is_asked_for(kinds):
    calls = []
    parts = [
        grain.MapDataset.source(kind(40, nothing)).map(
            lambda i: calls.append(i) or {"id": np.int32(i)}
        )
        for kind in kinds
    ]
    mixture = grain_shard.mix(parts, {0: [1, 1]})
    ds = grain_shard.feeds(lambda feed: mixture.to_iter_dataset(IN_TURN), num_feeds=1).batch(1)
    with contextlib.closing(iter(ds)) as batches:
        for rows in range(1, 31):
            next(batches)
            assert len(calls) == rows


@pytest.mark.usefixtures("one_record_at_a_time")
def test_slow_calls_below_grains_mixture_read_each_record_once():
    sources = [BatchedSource(96), BatchedSource(96)]
    mixed = grain.MapDataset.mix([grain.MapDataset.source(source) for source in sources])
    batches = list(mixed.batch(16).shard_to(data_mesh(2), num_threads=1, mask_key=None))
    assert len(batches) == 12
    for source in sources:
        assert set(source.requests.values()) == {1}
