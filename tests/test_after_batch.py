"""What stands between `.batch` and `.shard_to`, and what a batch looks like in the end."""

import dataclasses
import functools

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from grain_shard import PadToDivisible, ShardingError, ShardingTree
from tests.conftest import data_mesh, ids, numbered

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


# How a batch looks.


@pytest.mark.parametrize("remainder", ["pad", "drop", "error"])
def test_once_is_refused_where_it_would_take_more_padding(remainder):
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    with pytest.raises(ShardingError) as refusal:
        numbered(24, 12).shard_to(mesh, read="once", remainder=remainder)
    assert str(refusal.value) == (
        'read="once" splits each batch over all devices, but 12 rows do not split into 8 shards.\n'
        "  mesh:   data=4, model=2\n"
        '  remedy: use a batch size of 16, or pass read="auto", which uses "once" only if the batch'
        " size allows it."
    )
    ds = numbered(32, 16).shard_to(mesh, read="once", remainder=remainder)
    assert ids(ds) == [list(range(16)), list(range(16, 32))]


def test_a_single_device_has_nothing_to_read_once_for():
    assert ids(numbered(8, 4).shard_to(jax.devices()[0], read="once")) == [
        [*range(4)],
        [4, 5, 6, 7],
    ]


@dataclasses.dataclass(frozen=True)
class Device:
    """What a mesh and a layout look at, of a device of some slice."""

    id: int
    platform: str
    slice_index: int
    device_kind: str = "some chip"

    @property
    def process_index(self):
        return self.id // 2


@pytest.mark.parametrize(
    ("platform", "slices", "auto"),
    [
        ("tpu", [0] * 8, "once"),
        ("tpu", [3] * 8, "once"),
        ("tpu", [0] * 4 + [1] * 4, "needed"),
        ("tpu", [0, 1] * 4, "needed"),
        ("gpu", [0, 0, 1, 1, 2, 2, 3, 3], "once"),  # a GPU's slice is of NVLink
    ],
)
def test_rows_are_read_once_in_a_single_slice_only(platform, slices, auto):
    devices = [Device(i, platform, slice_index) for i, slice_index in enumerate(slices)]
    mesh = Mesh(np.array(devices).reshape(2, 4), ("model", "data"))
    assert ShardingTree.of(mesh).way_to_read("auto", 16) == auto
    if auto == "once":
        numbered(32, 16).shard_to(mesh, read="once")
        return
    with pytest.raises(ShardingError) as refusal:
        numbered(32, 16).shard_to(mesh, read="once")
    assert str(refusal.value) == (
        'read="once" moves rows between all devices in each step, but the mesh spans several TPU'
        " slices, and the network between slices is slow.\n"
        "  mesh:   model=2, data=4\n"
        '  remedy: pass read="auto" or read="needed". To read fewer rows, shard the batch over each'
        " axis that spans slices: name the axis in the first entry of the spec."
    )
