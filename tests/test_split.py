"""`split`: parts of records that stay apart, and the warning about slices that do not.

On several hosts: test_hosts_changing_runs.py.
"""

import collections
import pickle
import warnings

import grain
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import given, settings
from hypothesis import strategies as st

import grain_shard
from grain_shard import StateError, split
from grain_shard.grain_inside.index_shuffle import loses_a_record, permuted, permuted_index
from tests.conftest import data_mesh, ids, refused
from tests.counting_source import BatchedSource, bad
from tests.pipelines import flat, going_on

WINDOW = grain.experimental.WindowShuffleMapDataset
NUM_RECORDS = 100


def as_record(i):
    return {"id": np.int32(i)}


def records(num_records=NUM_RECORDS):
    return grain.MapDataset.range(num_records).map(as_record)


def sharded(ds, **options):
    return ds.batch(16).shard_to(data_mesh(8), **options)


# The order.


def test_the_order_of_a_split_never_changes():
    """Also not with another version of Grain or NumPy: what was held out stays held out."""
    train, test = split(range(10), [8, 2], seed=0)
    assert (list(train), list(test)) == ([0, 4, 6, 7, 8, 3, 1, 9], [5, 2])
    assert list(split(range(10), [10], seed=1)[0]) == [5, 7, 6, 0, 4, 8, 9, 2, 1, 3]
    (large,) = split(range(1_000_000), [1_000_000], seed=7)
    assert [large[i] for i in range(4)] == [866271, 800351, 992510, 927102]


@pytest.mark.parametrize(
    "length", [1, 5, 2**16, 2**16 + 1, 2**17 + 1, 2**18 + 1, 2**21 + 1, 2**22 + 1]
)
def test_the_order_has_each_record_once(length):
    order = permuted(np.arange(length), length, seed=3)
    assert np.array_equal(np.sort(order), np.arange(length))
    some = np.unique(np.linspace(0, length - 1, 50, dtype=int)).tolist()
    assert [permuted_index(i, length, seed=3) for i in some] == order[some].tolist()


@pytest.mark.parametrize(
    ("length", "loses"),
    [(2**16, False), (2**16 + 1, True), (2**17 + 1, False), (2**18 + 1, True), (2**18 + 2, False)],
)
def test_grain_s_shuffle_of_some_lengths_has_one_record_twice(length, loses):
    """If this fails, Grain has mended it, and `permuted` need not differ from its shuffle."""
    ds = grain.MapDataset.range(length).shuffle(seed=0)
    assert loses_a_record(length) == loses
    assert (ds[0] == ds[length - 1]) == loses


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=5), st.integers(0, 20), st.integers(0, 9))
def test_each_record_is_in_one_part_at_most(sizes, rest, seed):
    num_records = sum(sizes) + rest
    parts = split(range(num_records), sizes, seed)
    assert [len(part) for part in parts] == sizes
    found = [record for part in parts for record in part]
    assert len(set(found)) == len(found) == sum(sizes)


@pytest.mark.parametrize(
    ("parts", "sizes"),
    [
        ([0.8, 0.2], [80, 20]),
        ([0.7, 0.2, 0.1], [70, 20, 10]),  # as floats, their sum is below 1
        ([1 / 3] * 3, [33, 34, 33]),
        ([0.5], [50]),
        ([1.0], [100]),
        (np.array([0.9, 0.1], np.float32), [90, 10]),
        ((np.int64(60), 30), [60, 30]),
    ],
)
def test_parts_are_counts_or_exact_fractions(parts, sizes):
    assert [len(part) for part in split(records(), parts, seed=0)] == sizes


@pytest.mark.parametrize(
    "parts",
    [
        *([], [0.8, 0.3], [0.8, 0.20001], [60, 41], [-1, 50], [1.5, -0.5], [50, 0], [0.001] * 3),
        *(0.8, "ab", [float("nan")], [float("inf")], [None], [1] * 101, {0.8: 1}),
    ],
    ids=str,
)
def test_parts_that_are_empty_or_too_large_are_refused(parts):
    with refused("100 records cannot be split into parts="):
        split(records(), parts, seed=0)


@pytest.mark.parametrize(
    ("source", "seed", "message"),
    [
        (records().repeat(2), 0, "is repeated, so a record could be in several parts"),
        (grain.MapDataset.mix([records(), records().repeat()]), 0, "is repeated"),
        (WINDOW(records(), window_size=30, seed=0), 0, "an order that may have a record twice"),
        (records(2**16 + 1).shuffle(seed=0), 0, "an order that may have a record twice"),
        (records().to_iter_dataset(), 0, "whose records have no index"),
        (5, 0, "an object of type int, whose records have no index"),
        ({"x": [1, 2], "y": [3, 4]}, 0, "a dict with the keys 'x', 'y'"),
        (records(), -1, "seed=-1 is not an integer of at least 0"),
        (records(), 2**32, "seed=4294967296 is too large"),
        (records(), 1.0, "seed=1.0 is not an integer"),
    ],
)
def test_what_cannot_be_split_is_refused(source, seed, message):
    with refused(message):
        split(source, [0.5, 0.5], seed)


# In pipelines.


def mixed(part):
    half = len(part) // 2
    return grain.MapDataset.concatenate([part[:half].seed(1).shuffle(), part[half:]])


# Each makes the records of three epochs from the training part.
PIPELINES = {
    "epochs": lambda part: sharded(part.seed(1).shuffle()).epochs(3),
    "repeat": lambda part: [iter(sharded(part.seed(1).shuffle().repeat(3)))],
    "repeat of batches": lambda part: [
        iter(part.seed(1).shuffle().batch(16).repeat(3).shard_to(data_mesh(8)))
    ],
    "mix of slices": lambda part: sharded(mixed(part)).epochs(3),
    "window": lambda part: sharded(WINDOW(part, window_size=8, seed=0)).epochs(3),
    "stream": lambda part: [
        iter(
            part.seed(1)
            .shuffle()
            .repeat(3)
            .to_iter_dataset()
            .filter(lambda record: True)
            .batch(16)
            .shard_to(data_mesh(8))
        )
    ],
    "feeds": lambda part: [
        iter(
            grain_shard.feeds(
                lambda f: (
                    part.seed(1)
                    .shuffle()[f.shard_index :: f.shard_count]
                    .repeat(3)
                    .to_iter_dataset()
                ),
                num_feeds=4,
            )
            .batch(16)
            .shard_to(data_mesh(8))
        )
    ],
}
SOURCES = {
    "records": records,
    "shuffled before": lambda: records().seed(5).shuffle(),
    "sliced before": lambda: records(300).seed(5).shuffle()[:NUM_RECORDS],
    "mixed before": lambda: grain.MapDataset.mix([records(80), records(200)[80:]])[:NUM_RECORDS],
    "split before": lambda: split(records(150), [NUM_RECORDS], seed=1)[0],
    "many in a call": lambda: grain.MapDataset.source(BatchedSource(NUM_RECORDS)).map(as_record),
}


@pytest.mark.parametrize(
    ("source", "pipeline"),
    [("many in a call", pipeline) for pipeline in PIPELINES]
    + [(source, "epochs") for source in list(SOURCES)[:-1]],
)
def test_no_held_out_record_is_trained_on_in_any_epoch(source, pipeline, hints):
    train, test = split(SOURCES[source](), [0.8, 0.2], seed=0)
    held_out = {record["id"] for record in test}
    seen = collections.Counter()
    for batches in PIPELINES[pipeline](train):
        seen.update(flat(ids(batches)))
    assert len(held_out) == 20
    assert not held_out & seen.keys()
    assert sorted(seen.values()) == [3] * 80


@pytest.mark.slow
def test_workers_and_a_run_that_goes_on_in_the_second_epoch_read_the_same_part():
    train, test = split(records(), [0.8, 0.2], seed=0)
    ds = train.seed(1).shuffle().batch(16).repeat(3)
    alone = [batch["id"].tolist() for batch in ds]
    with iter(ds.shard_to(data_mesh(8), num_workers=2)) as batches:
        begun = ids([next(batches) for _ in range(7)])  # an epoch has 5 batches
        state = batches.get_state()
    assert begun + going_on(ds.shard_to(data_mesh(8), num_workers=1), state) == alone
    assert not {record["id"] for record in test} & set(flat(alone))


def test_a_part_reads_many_records_in_one_call():
    source = BatchedSource(NUM_RECORDS)
    train, _ = split(source, [0.8, 0.2], seed=0)
    flat(ids(iter(sharded(train.map(as_record)))))
    assert max(map(len, source.calls)) >= 16


def test_random_maps_of_a_part_differ_in_each_epoch():
    def noise(record, rng):
        return {"id": record["id"], "noise": rng.random()}

    (part,) = split(records(8), [8], seed=0)
    ds = part.seed(3).random_map(noise).repeat(2)
    epochs = [{ds[i]["id"].item(): ds[i]["noise"] for i in range(e, e + 8)} for e in (0, 8)]
    assert all(epochs[0][i] != epochs[1][i] for i in range(8))


def test_a_bad_record_is_named_by_its_index_in_the_source():
    train, _ = split(BatchedSource(NUM_RECORDS, bad(7)), [99, 1], seed=0)
    with pytest.raises(ValueError, match="record 7 is corrupt") as raised:
        list(sharded(train.map(as_record)))
    assert any("record 7 of the source BatchedSource" in note for note in raised.value.__notes__)


def test_a_state_has_the_names_of_files_and_refuses_another_split(tmp_path):
    for name in ("a", "b"):
        writer = ArrayRecordWriter(str(tmp_path / name), "group_size:1")
        for i in range(20):
            writer.write(bytes([i]))
        writer.close()

    def batches(parts=(30, 10), seed=0, part=0, files=("a", "b")):
        source = grain_shard.ArrayRecordSource([tmp_path / name for name in files])
        ds = split(source, list(parts), seed)[part]
        return iter(sharded(ds.map(lambda record: {"id": np.int32(record[0])})))

    with batches() as saved:
        first = ids([next(saved)])
        state = saved.get_state()
        rest = ids(saved)
    with batches(parts=(30, 5)) as same:  # the training part has the same records
        same.set_state(state)
        assert ids(same) == rest
    assert sorted(flat(first + rest)).count(3) <= 2
    for other, names in [
        ({"seed": 1}, "transforms"),
        ({"parts": (10, 30), "part": 1}, "transforms"),
        ({"parts": (29, 11)}, "records"),
        ({"files": ("b", "a")}, "source"),
    ]:
        with batches(**other) as changed, pytest.raises(StateError, match=names):
            changed.set_state(state)


def test_a_part_can_be_pickled_sliced_and_read_past_its_end():
    (part,) = split(range(10), [6], seed=0)
    records_of_part = list(part)
    assert list(pickle.loads(pickle.dumps(part))) == records_of_part
    assert list(part[1:4]) == records_of_part[1:4]
    assert [part[6 + i] for i in range(6)] == records_of_part  # of the next epoch
    assert part[-1] == records_of_part[-1]
    assert str(part) == "split(0:6 of 10, seed=0)"


# Slices that are no split.


def shuffled(num_records=NUM_RECORDS, seed=1):
    return records(num_records).shuffle(seed=seed)


def feeds_of(ds):
    make = lambda f: ds[f.shard_index :: f.shard_count].repeat(2).to_iter_dataset()  # noqa: E731
    return next(iter(grain_shard.feeds(make, num_feeds=4).batch(8).shard_to(data_mesh(8))))


LEAKING = {
    "slice": lambda: sharded(shuffled()[:80].repeat(3)),
    "endless": lambda: sharded(shuffled()[:80].repeat()),
    "every second record": lambda: sharded(shuffled()[::2].repeat(3)),
    "epochs": lambda: sharded(shuffled()[:80]).epochs(3),
    "mix of two slices": lambda: sharded(
        grain.MapDataset.mix([shuffled()[:30], shuffled(seed=2)[30:60]]).repeat(2)
    ),
    "before batch, repeated after": lambda: (
        shuffled()[:80].batch(8).repeat(2).shard_to(data_mesh(8))
    ),
    "after batch": lambda: shuffled().batch(8)[:5].repeat(2).shard_to(data_mesh(8)),
    "shuffled batches": lambda: (
        records().batch(8).shuffle(seed=1)[:5].shard_to(data_mesh(8)).epochs(2)
    ),
    "window": lambda: sharded(WINDOW(records(), window_size=10, seed=0)[:80].repeat(2)),
    "mix": lambda: sharded(grain_shard.mix([records(), records(40)], {0: [1, 1]})[:50].repeat(2)),
    "concatenation": lambda: sharded(
        grain.MapDataset.concatenate([shuffled(), records(40)])[:50].repeat(2)
    ),
    "stream": lambda: sharded(shuffled()[:80].repeat(2).to_iter_dataset().filter(bool)),
    "interleaved streams": lambda: sharded(
        grain.experimental.InterleaveIterDataset(
            [shuffled()[:80].repeat(2).to_iter_dataset()], cycle_length=1
        )
    ),
    "feeds": lambda: feeds_of(shuffled()[:80]),
}
HOLDING = {
    "one epoch": lambda: sharded(shuffled()[:80]),
    "epochs(1)": lambda: sharded(shuffled()[:80]).epochs(1),
    "repeat(1)": lambda: sharded(shuffled()[:80].repeat(1)),
    "slice below the shuffle": lambda: sharded(records()[:80].shuffle(seed=1).repeat(2)),
    "fixed order": lambda: sharded(shuffled()[:80].repeat(2, reseed_each_epoch=False)),
    "all records": lambda: sharded(shuffled()[:].repeat(2)),
    "split": lambda: sharded(split(shuffled(), [80], 0)[0][:40].shuffle(seed=1).repeat(2)),
    "slice of a part": lambda: sharded(split(shuffled(), [80], seed=0)[0][:40].repeat(2)),
    "mix that uses all": lambda: sharded(
        grain.MapDataset.mix([records(), records()])[:50].repeat(2)
    ),
    "concatenation": lambda: sharded(
        grain.MapDataset.concatenate([records(), records(40)])[:50].repeat(2)
    ),
    "feeds of all records": lambda: feeds_of(shuffled()),
}


@pytest.mark.parametrize("make", LEAKING.values(), ids=LEAKING)
def test_a_slice_of_what_is_shuffled_in_each_epoch_gets_one_warning(make):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = make()
    (warning,) = caught
    assert "grain_shard.split(source" in str(warning.message)
    assert "reseed_each_epoch=False" in str(warning.message)
    getattr(made, "close", lambda: None)()


@pytest.mark.parametrize("make", HOLDING.values(), ids=HOLDING)
def test_a_slice_that_holds_the_same_records_in_each_epoch_gets_none(make):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        getattr(make(), "close", lambda: None)()
