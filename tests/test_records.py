"""Records many at a time are Grain's own, one by one: indices, random numbers, epochs, errors."""

import grain
import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grain_shard import mix
from grain_shard.grain_inside import index_shuffle
from grain_shard.grain_inside.index_shuffle import shuffled
from tests.conftest import data_mesh
from tests.counting_source import BatchedSource, Source
from tests.pipelines import assert_same_batches, read_together

LENGTHS = (
    *(1, 2, 3, 5, 255, 256, 257, 1000, 16383, 16384, 16385, 65535, 65536, 65537, 65538),
    *(10**6, 2**32, 2**32 + 1, 2**40),
)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("seed", [0, 7, 2**31, 2**32 - 1])
def test_the_shuffle_of_many_indices_is_grains_of_each(length, seed):
    class Counting:  # a range of this length without its elements
        def __len__(self):
            return length

        def __getitem__(self, index):
            return index

    some = np.random.default_rng(1).integers(0, length, 200).tolist()
    indices = np.unique([0, *some, length - 1])
    by_grain = grain.MapDataset.source(Counting()).shuffle(seed=seed)
    assert shuffled(indices, length, seed).tolist() == [by_grain[i] for i in indices.tolist()]


@pytest.mark.parametrize("length", LENGTHS)
def test_no_index_of_few_or_many_walks_far(length, monkeypatch):
    """The cipher permutes 2**16 numbers at least; walking to one of 5 alone takes 13,000 steps."""
    encrypted, steps = index_shuffle._encrypted, []

    def counting(*args):
        steps.append(args)
        return encrypted(*args)

    monkeypatch.setattr(index_shuffle, "_encrypted", counting)
    shuffled(np.arange(min(length, 1000)), length, seed=11)
    assert len(steps) < 100


def noisy(x, rng):
    return x + rng.integers(0, 1000, dtype=np.int64) * 10**6


base, other = grain.MapDataset.range(50, 90), grain.MapDataset.range(1000, 1040)
PIPELINES = {
    "source": base,
    "shuffle": base.shuffle(seed=3),
    "shuffle of a seed": base.seed(9).shuffle(),
    "shuffle, map, random map, index": base.seed(1)
    .shuffle()
    .map(lambda x: x * 2)
    .random_map(noisy)
    .map_with_index(lambda i, x: x + i * 10**10),
    "map below shuffle": base.seed(1).random_map(noisy).shuffle().map(lambda x: x + 1),
    "two shuffles": base.shuffle(seed=1).shuffle(seed=2),
    "window shuffle": base.pipe(
        lambda ds: grain.experimental.WindowShuffleMapDataset(ds, window_size=7, seed=1)
    ),
    "slice of a shuffle": base.shuffle(seed=1)[5:35:3],
    "slice of endless records": base.repeat()[3:38],
    "repeat": base.seed(4).shuffle().repeat(3),
    "repeat the same order": base.seed(4).shuffle().repeat(3, reseed_each_epoch=False),
    "mix": grain.MapDataset.mix([base, base.map(lambda x: -x)], [0.7, 0.3]).seed(1).shuffle(),
    "concatenate": grain.MapDataset.concatenate([base, base.shuffle(seed=2)]),
    "zip": grain.experimental.ZipMapDataset([base, base.shuffle(seed=5)]),
    "weights that change": mix([base, other, other[::2]], {0: [3, 1, 1], 20: [1, 0, 1]}),
    "weights that change, over shuffles, below a random map": mix(
        [ds.seed(4).shuffle().map(lambda x: x + 1) for ds in (base, other)], {0: [3, 1]}
    )
    .seed(1)
    .random_map(noisy),
    "weights that change, between slices": mix([base[1::2], other[1::2]], {0: [1, 2], 7: [2, 1]})[
        3:25:2
    ],
    "a mixture in a mixture, with the index": mix(
        [mix([base, other], {0: [1, 1]}), other], {0: [1, 2], 25: [1, 0]}
    ).map_with_index(lambda i, x: (i, x)),
    "weights that change, shuffled": mix([base, other], {0: [3, 1]}).shuffle(seed=2),
}


@pytest.mark.parametrize("name", PIPELINES)
@given(seed=st.integers(0, 100), size=st.integers(1, 30), k=st.integers(0, 2))
@settings(max_examples=20, deadline=None)
def test_many_records_are_what_grain_gives_one_by_one(name, seed, size, k):
    records = PIPELINES[name].repeat(9).shuffle(seed=seed)
    batch = read_together(records, size)[k]
    one_by_one = [records[i] for i in range(k * size, (k + 1) * size)]
    assert_same_batches([batch], [jax.tree.map(lambda *rows: np.stack(rows), *one_by_one)])


def test_a_grain_that_shuffles_otherwise_has_the_last_word(monkeypatch):
    ds = base.shuffle(seed=3)
    monkeypatch.setattr(type(ds), "_shuffled_index", lambda self, index: 39 - index)
    assert read_together(ds, 40)[0].tolist() == list(range(89, 49, -1))


def test_a_source_is_asked_once_for_its_length_to_read_a_record():
    """A source may compute its length in a slow call."""

    class SlowlyCounted(Source):
        asked = 0

        def __len__(self):
            self.asked += 1
            return super().__len__()

    source = SlowlyCounted(400)
    records = read_together(grain.MapDataset.source(source), 1)
    source.asked = 0
    assert records[7].tolist() == [7]
    assert source.asked == 1


@pytest.mark.parametrize("count", [3, 5])
def test_a_batched_read_of_another_length_is_an_error(count):
    class Source(BatchedSource):
        def __getitems__(self, indices):
            return iter([np.int32(0)] * count) if len(indices) == 4 else [np.int32(0)]

    ds = grain.MapDataset.source(Source(32)).map(lambda i: {"id": i}).batch(4)
    with pytest.raises(ValueError, match=f"returned a list_iterator of length {count} for 4"):
        next(iter(ds.shard_to(data_mesh(2))))
