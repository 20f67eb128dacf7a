"""Batches as trees: None is a tree without leaves, as for JAX, and text keeps every character."""

import dataclasses
import enum
import functools
from typing import NamedTuple

import grain
import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import ShardingError
from tests.conftest import data_mesh, refused, to_numpy
from tests.pipelines import KINDS


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["tokens", "images"], meta_fields=[]
)
@dataclasses.dataclass
class Input:
    tokens: np.ndarray
    images: np.ndarray | None = None


class Point(NamedTuple):
    x: np.ndarray
    y: np.ndarray | None


def record(i):
    return {
        "id": np.int32(i),
        "none": None,
        "input": Input(np.full(3, i, np.int32)),
        "list": [None, np.float32(i)],
        "tuple": (np.float32(i), None),
        "point": Point(np.full(2, i), None),
    }


pipelines = pytest.mark.parametrize("pipeline", KINDS.values(), ids=KINDS)
SPECS = dict.fromkeys(["id", "none", "input", "list", "tuple", "point"], P("data"))
OPTIONS = {
    "defaults": {},
    "specs over None": {"spec": SPECS},
    "a dataclass of specs": {"spec": {**SPECS, "input": Input(P("data"), P("data"))}},
    "padding over None": {"pad_value": {"none": 1, "input": 0}},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pipelines
def test_none_in_every_record_is_none_in_the_batch(pipeline, options):
    ds = pipeline(record).shard_to(data_mesh(2), **options)
    batches = [to_numpy(batch) for batch in ds]
    valid = [batch["id"][batch["valid_mask"]] for batch in batches]
    assert sorted(np.concatenate(valid).tolist()) == list(range(6))
    for batch in (*batches, ds.abstract_batch()):
        assert batch["none"] is batch["input"].images is batch["list"][0] is batch["tuple"][1]
        assert batch["none"] is batch["point"].y is None
        kinds = [type(batch[key]) for key in ("input", "list", "tuple", "point")]
        assert kinds == [Input, list, tuple, Point]
    for batch in batches:
        np.testing.assert_array_equal(batch["input"].tokens[..., 0], batch["id"])
        np.testing.assert_array_equal(batch["list"][1], batch["id"])


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [KINDS["random access"], KINDS["feeds"]])
def test_none_and_text_come_out_of_worker_processes_too(pipeline):
    def make(i):
        return {**record(i), "name": b"%d\0" % i}

    ds = pipeline(make).shard_to(data_mesh(2), num_workers=1)
    for batch in map(to_numpy, ds):
        assert batch["none"] is None
        mask = batch["valid_mask"]
        assert batch["name"][mask].tolist() == [b"%d\0" % i for i in batch["id"][mask]]


DIFFERING = {
    "random access": "batch['x']: record 5 has another structure than record 0: only record 5 has",
    "feeds": "batch['x']: a row of feed 1 has another structure than a row of feed 0: only a row",
    "stream": "batch['x']: the batch has another tree structure than the first batch",
}


@pytest.mark.parametrize(("name", "message"), DIFFERING.items())
def test_none_in_some_records_alone_is_an_error_that_names_two(name, message):
    def make(i):
        none = i < 4 if name == "stream" else i != 5  # in one batch Grain itself refuses it
        return {"id": i, "x": None if none else i}

    with refused(message):
        list(KINDS[name](make).shard_to(data_mesh(2), num_threads=1))


@pytest.mark.parametrize("nul", ["\0", b"\0"])
@pytest.mark.parametrize("name", ["random access", "feeds"])  # in a stream Grain batches
def test_text_keeps_the_nuls_at_its_end(name, nul):
    ds = KINDS[name](lambda i: {"id": i, "name": i * nul}).shard_to(data_mesh(4))
    for batch in map(to_numpy, ds):
        mask = batch["valid_mask"]
        assert batch["name"][mask].tolist() == [i * nul for i in batch["id"][mask]]
        assert not any(batch["name"][~mask])
        assert batch["name"].shape == mask.shape


def test_text_without_nuls_at_its_end_stays_on_the_host_as_an_array_of_its_characters():
    kinds = ["\0ab", enum.Enum("Kind", {"B": "ab"}, type=str).B]  # the value of an enum is its text
    ds = KINDS["random access"](lambda i: {"id": i, "name": kinds[i % 2]})
    first, _ = ds.shard_to(data_mesh(2))
    assert (type(first["name"]), first["name"].dtype) == (np.ndarray, np.dtype("<U3"))
    assert first["name"].tolist() == ["\0ab", "ab"] * 2


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [
        (np.int64, 3_000_000_000, "holds 3000000000, which does not fit into int32"),
        (np.int64, -(2**31) - 1, "holds -2147483649, which does not fit into int32"),
        (np.uint64, 2**32, "holds 4294967296, which does not fit into uint32"),
    ],
)
@pipelines
def test_an_integer_that_32_bits_cannot_hold_is_an_error(pipeline, dtype, value, message):
    ds = pipeline(lambda i: {"x": np.full(2, value if i == 5 else i, dtype)}).shard_to(data_mesh(2))
    with pytest.raises(ShardingError) as refusal:
        list(ds)
    assert str(refusal.value).startswith(f"batch['x']: row 1 of the batch {message}")
    assert "mesh: data=2" in str(refusal.value)
    assert 'remedy: call jax.config.update("jax_enable_x64", True)' in str(refusal.value)


@pipelines
def test_integers_that_32_bits_hold_are_placed(pipeline):
    x, y = np.array([-(2**31), 2**31 - 1]), np.array([0, 2**32 - 1], np.uint64)
    first, *_ = pipeline(lambda i: {"x": x, "y": y}).shard_to(data_mesh(2))
    assert first["x"].tolist()[0] == x.tolist()
    assert first["y"].tolist()[0] == y.tolist()


@pipelines
def test_with_x64_any_integer_is_placed(pipeline):
    with jax.enable_x64(True):
        first, *_ = pipeline(lambda i: {"x": 2**40 + i}).shard_to(data_mesh(2))
        assert first["x"].dtype == np.int64
        assert first["x"].tolist()[0] == 2**40


def test_whole_arrays_are_checked_as_well():
    with pytest.raises(ShardingError, match="the leaf holds 4294967296"):
        grain_shard.DevicePlacement().distribute_batch({"x": 2**32}, jax.devices()[0])


def test_none_among_arrays_in_memory_is_none_in_the_batch():
    arrays = {"id": np.arange(6), "input": Input(np.zeros((6, 3))), "none": None}
    ds = grain.MapDataset.source(grain_shard.ArraySource(arrays)).batch(4).shard_to(data_mesh(2))
    for batch in ds:
        assert batch["none"] is batch["input"].images is None
