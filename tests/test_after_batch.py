"""What stands between `.batch` and `.shard_to`, and what a batch looks like in the end."""

import functools

import grain
import numpy as np
import pytest

from grain_shard import PadToDivisible, ShardingError
from tests.conftest import data_mesh

# Grain's padding of the last batch.

PAD = functools.partial(grain.experimental.batch_and_pad, batch_size=8, pad_value=-1)
PADDED_BY_GRAIN = {
    "random access": lambda ds: ds.batch(8, batch_fn=PAD),
    "to_iter_dataset()": lambda ds: ds.batch(8, batch_fn=PAD).to_iter_dataset(),
    "a map after it": lambda ds: ds.batch(8, batch_fn=PAD).map(lambda batch: batch),
    "a stream": lambda ds: ds.to_iter_dataset().batch(8, batch_fn=PAD),
    "a stream, and a map": lambda ds: ds.to_iter_dataset().batch(8, batch_fn=PAD).map(dict),
    "a mixture": lambda ds: grain.MapDataset.mix([ds.batch(8), ds.batch(8, batch_fn=PAD)]),
}


@pytest.mark.parametrize("batched", PADDED_BY_GRAIN.values(), ids=PADDED_BY_GRAIN)
@pytest.mark.parametrize("end", [lambda ds: ds.shard_to(data_mesh(2)), PadToDivisible(2)])
def test_grains_padding_is_refused_when_it_is_built(batched, end):
    records = grain.MapDataset.range(20).map(lambda i: {"x": i})
    with pytest.raises(ShardingError) as refusal:
        end(batched(records))
    assert refusal.value.problem == (
        "batch_fn=grain.experimental.batch_and_pad pads the last batch, so its padding looks like"
        " records."
    )
    assert refusal.value.remedy == (
        "leave batch_fn out: .shard_to pads the last batch itself, with zeros or pad_value, and"
        " adds a mask."
    )


def test_what_the_remedy_says_gives_the_same_rows_and_a_mask():
    records = grain.MapDataset.range(20).map(lambda i: {"x": i})
    ours = records.batch(8).shard_to(data_mesh(2), pad_value=-1)
    for batch, grains in zip(ours, records.batch(8, batch_fn=PAD), strict=True):
        np.testing.assert_array_equal(batch["x"], grains["x"])
        np.testing.assert_array_equal(batch["valid_mask"], grains["x"] >= 0)


def test_it_may_make_records_of_what_is_batched_again():
    """Groups of three, the last one padded: these are the records."""
    group = functools.partial(grain.experimental.batch_and_pad, batch_size=3)
    groups = grain.MapDataset.range(10).map(lambda i: {"x": i + 1}).batch(3, batch_fn=group)
    (batch,) = groups.batch(4).shard_to(data_mesh(2))
    assert batch["x"].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 0, 0]]
