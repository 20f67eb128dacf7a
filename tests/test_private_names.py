"""Without a private name of Grain: the batches stay the same, and one line says what is lost."""

import re

import grain
import numpy as np
import pytest
from absl import logging

from grain_shard.grain_inside.private_names import PRIVATE_NAMES, log_missing_names
from tests.conftest import data_mesh, hide_private_names, to_numpy

# The names that this version of Grain has: an older one cannot slice by a list, for example.
NAMES = [name for name, use in PRIVATE_NAMES.items() if any(use.objects())]


class Twice(grain.experimental.FlatMapTransform):
    max_fan_out = 2

    def flat_map(self, element):
        return [element, element]


def records(count=24):
    return grain.MapDataset.source(range(count)).map(lambda i: {"x": np.full(4, i, np.int32)})


def augmented(record, rng):
    return {"x": record["x"] + rng.integers(100)}


def random_access():
    ds = records()[1:].seed(1).shuffle().random_map(augmented)
    return ds.map_with_index(lambda i, record: record | {"i": i}).repeat(2).batch(8)


def chosen_batches():
    pairs = grain.experimental.ZipMapDataset([records(), records()])
    return (
        pairs.map(lambda pair: pair[0]).batch(8, drop_remainder=True)[:2].shuffle(seed=2).repeat(2)
    )


def mixture():
    windows = grain.experimental.WindowShuffleMapDataset(records(), window_size=4, seed=3)
    both = grain.MapDataset.concatenate([records(5), windows])
    return grain.MapDataset.mix([both, records().shuffle(seed=4)], weights=[2, 1]).batch(8)


def stream():
    some = records().map(lambda record: record if record["x"][0] % 3 else None)
    ds = some.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=4))
    ds = ds.filter(lambda record: record["x"][0] != 4).map(lambda record: record)
    return grain.experimental.FlatMapIterDataset(ds, Twice()).batch(8, drop_remainder=True)


def stream_with_none():
    some = records(8).map(lambda record: record if record["x"][0] % 3 else None)

    def stacked(some):
        return {"x": np.array([-1 if record is None else record["x"][0] for record in some])}

    return some.to_iter_dataset(allow_nones=True).batch(8, batch_fn=stacked)


def packed():
    ds = records().to_iter_dataset().seed(5)
    packed = grain.experimental.FirstFitPackIterDataset(
        ds, length_struct={"x": 8}, num_packing_bins=4
    )
    return packed.batch(2)


def split_and_interleaved():
    ds = grain.experimental.InterleaveIterDataset(
        [records(8).to_iter_dataset(), records(8).to_iter_dataset()], cycle_length=2
    )
    split = grain.experimental.ConcatThenSplitIterDataset(ds, length_struct={"x": 8})
    return split.batch(4)


def mixed_streams():
    ds = grain.experimental.WindowShuffleIterDataset(
        records().to_iter_dataset(), window_size=4, seed=6
    )
    ds = grain.IterDataset.mix([ds, records().to_iter_dataset()], weights=[1, 1])
    return grain.experimental.RepeatIterDataset(ds, 2).batch(8, drop_remainder=True)


PIPELINES = (
    *(random_access, chosen_batches, mixture),
    *(stream, stream_with_none, packed, split_and_interleaved, mixed_streams),
)


def batches_of(make):
    return list(map(to_numpy, make().shard_to(data_mesh(2))))


@pytest.fixture(scope="module")
def expected():
    """The batches of each pipeline, and the private names that it asks for."""
    found = {}
    for make in PIPELINES:
        with pytest.MonkeyPatch.context() as patch:
            asked = hide_private_names(patch, ())
            found[make] = batches_of(make), asked
    return found


@pytest.fixture
def lines(monkeypatch):
    """The warnings of this package, which are logged at the first stage of a process."""
    found = []
    monkeypatch.setattr(logging, "warning", lambda text, *args: found.append(text % args))
    log_missing_names.cache_clear()
    yield found
    log_missing_names.cache_clear()


@pytest.mark.parametrize("name", NAMES)
def test_without_a_name_batches_are_the_same_and_one_line_says_what_is_lost(
    name, expected, lines, monkeypatch
):
    hide_private_names(monkeypatch, [name])
    askers = [make for make, (_, asked) in expected.items() if name in asked]
    for make in askers:
        np.testing.assert_equal(batches_of(make), expected[make][0], make.__name__)
    (line,) = [line for line in lines if "Batches are the same" in line]
    use = PRIVATE_NAMES[name]
    assert re.search(rf"has no \w+\.{name}\b", line)
    assert f"Slower: {use.slower}" in line or not use.slower
    assert f"No longer compared: {use.unseen}" in line or not use.unseen
    assert use.slower or use.unseen
    assert askers, "no pipeline of this test asks for the name"


def test_a_grain_with_all_names_is_not_worth_a_line(lines):
    assert batches_of(random_access)
    assert lines == []
