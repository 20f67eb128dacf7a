"""What rows of padding hold. On several hosts: test_hosts_changing_runs.py."""

import json
import re
import warnings

import ml_dtypes
import numpy as np
import pytest

import grain_shard
from grain_shard import ShardingError
from grain_shard.reading.padding import Padding
from tests.conftest import data_mesh, refused, to_numpy
from tests.pipelines import KINDS

VALUES = {"tokens": 7, "loss": {"weight": -1.5}}


def record(i):
    return {
        "tokens": np.full(2, i, np.int32),
        "loss": {"weight": np.float32(i), "count": np.uint8(i)},
        "name": f"record {i}",
    }


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def pipeline(request):
    return lambda: request.param(record, start=1)


def test_padding_holds_the_values_and_the_mask_stays_false(pipeline):
    batches = [to_numpy(b) for b in pipeline().shard_to(data_mesh(4), pad_value=VALUES)]
    first, last = batches
    assert first["tokens"][:, 0].tolist() == [1, 2, 3, 4]
    assert first["valid_mask"].all()
    assert last["valid_mask"].tolist() == [True, True, False, False]
    assert last["tokens"].tolist() == [[5, 5], [6, 6], [7, 7], [7, 7]]
    assert last["loss"]["weight"].tolist() == [5, 6, -1.5, -1.5]
    assert last["loss"]["count"].tolist() == [5, 6, 0, 0], "left out, so 0"
    assert last["name"].tolist() == ["record 5", "record 6", "", ""]


@pytest.mark.parametrize(
    ("values", "token", "loss"), [(9, 9, 9), ({"loss": 3}, 0, 3), ({"loss": {}}, 0, 0)]
)
def test_one_number_is_for_all_leaves_or_for_a_part_of_the_tree(pipeline, values, token, loss):
    ds = pipeline().shard_to(data_mesh(4), pad_value=values, mask_key="real")
    last = to_numpy([*ds][-1])
    assert last["tokens"][2:].tolist() == [[token, token]] * 2
    assert last["loss"]["weight"][2:].tolist() == last["loss"]["count"][2:].tolist() == [loss] * 2
    assert last["real"].tolist() == [True, True, False, False], "the mask is no such leaf"


def test_padding_plays_no_part_in_a_state(pipeline):
    with iter(pipeline().shard_to(data_mesh(4), pad_value=VALUES)) as iterator:
        next(iterator)
        state = json.loads(json.dumps(iterator.get_state()))
    with iter(pipeline().shard_to(data_mesh(4))) as iterator:
        iterator.set_state(state)
        assert np.asarray(next(iterator)["tokens"])[2:].tolist() == [[0, 0], [0, 0]]


def test_padding_without_a_mask_warns_once(pipeline):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(2):
            list(pipeline().shard_to(data_mesh(4), mask_key=None))
    (warning,) = caught
    assert "rows of padding and no mask" in str(warning.message)
    assert 'Pass remainder="drop"' in str(warning.message)


def test_batches_without_padding_need_no_mask(pipeline):
    assert len(list(pipeline().shard_to(data_mesh(4), mask_key=None, remainder="drop"))) == 1


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("value", "x", "mask", "padding"),
    [
        (5, [5, 5], [False, False], True),
        (5, [5, 5], [True, False], False),
        (5, [0, 0], [False, False], False),
        (NAN, [NAN, NAN], [False, False], True),
    ],
)
def test_a_batch_that_holds_nothing_else_is_padding(value, x, mask, padding):
    batch = {"x": np.array(x), "valid_mask": np.array(mask), "step": np.int32(3)}
    flat = grain_shard.trees.FlatBatch.of(batch)
    assert Padding(1, pad_value={"x": value}).are_all_of(flat) == padding


# Of each dtype: values that it holds, and values that it does not hold.
HELD = {
    "bool": ([0, True, 1.0], [2, -1, 0.5, NAN, 1j]),
    "int2": ([-2, 1, 1.0], [2, -3, 300, 0.5, NAN, INF, 1j]),
    "uint2": ([0, 3], [4, -1, 1.5]),
    "int4": ([-8, 7, np.int64(7)], [8, -9, 300, np.int64(300), 1.5, NAN]),
    "uint4": ([0, 15], [16, -1, 300]),
    "int8": ([-128, 127], [128, np.int64(300), 1.5]),
    "uint8": ([255], [-1, 256, np.int64(-1), NAN, np.complex64(1j)]),
    "int32": ([2**31 - 1], [2**31, 1e10, INF]),
    "int64": ([2**63 - 1, 1e10], [2**63, NAN]),
    "uint64": ([2**64 - 1], [2**64, -1]),
    "float4_e2m1fn": ([6, -6, 0.1], [7, 300, NAN, INF]),
    "float6_e2m3fn": ([7.5, 0.1], [8, NAN, INF]),
    "float6_e3m2fn": ([-28], [30, NAN, -INF]),
    "float8_e3m4": ([15.5, NAN, INF], [300]),
    "float8_e4m3": ([240, NAN, -INF], [300]),
    "float8_e4m3fn": ([300, 448, NAN], [500, 1e6, INF]),
    "float8_e4m3b11fnuz": ([30, NAN], [31, INF]),
    "float8_e4m3fnuz": ([240, NAN], [300, INF]),
    "float8_e5m2": ([57344, NAN, INF], [1e6]),
    "float8_e5m2fnuz": ([57344, NAN], [1e6, INF]),
    "float8_e8m0fnu": ([2, 0.1, NAN], [-1, INF]),
    "bfloat16": ([0.1, 1e38, NAN, INF, -INF], [1e39, 1j]),
    "float16": ([0.1, 65504, NAN, INF], [65520, 1e6, np.complex64(1j)]),
    "float32": ([0.1, 1e38, NAN, INF, np.float16(0.1)], [1e39, -1e39, 1j]),
    "float64": ([0.1, 1e300], [1j, 10**400]),
    "complex64": ([1j, 0.1 + 3e38j, NAN, INF], [1e39, 1e39j]),
}


@pytest.mark.parametrize("dtype", HELD)
def test_padding_holds_the_value_or_it_is_refused(dtype):
    # By the function that pads, because not every JAX can place each of these dtypes.
    rows = {"x": np.zeros(2, getattr(ml_dtypes, dtype, dtype))}
    held, not_held = HELD[dtype]
    for value in held:
        padded = Padding(1, pad_value={"x": value}).like(rows)["x"].astype(complex)
        np.testing.assert_allclose(padded, value, rtol=0.3, atol=0.15)
    for value in not_held:
        with pytest.raises(ShardingError) as refusal:
            Padding(1, pad_value={"x": value}).like(rows)
        text = str(refusal.value)
        assert f"batch['x']: the leaf's dtype cannot hold pad_value={value!r}." in text
        assert f"leaf:   {dtype}[2]" in text


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("0", "pad_value is '0', not a number"),
        (np.str_("0"), "pad_value is np.str_('0'), not a number"),
        (np.datetime64(0, "s"), "not a number"),
        (None, "pad_value is None, not a number"),
        ({"tokens": None}, "pad_value['tokens'] is None, not a number"),
        ({"tokens": [1, "2"]}, "pad_value['tokens'][1] is '2', not a number"),
    ],
)
def test_what_is_no_number_is_refused_when_it_is_built(values, message):
    with refused(message):
        KINDS["random access"](record).shard_to(data_mesh(4), pad_value=values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"token": 1}, "batch['token']: pad_value names a leaf that the batch does not have"),
        ({"token": {}}, "batch['token']: pad_value names a leaf that the batch does not have"),
        ({"tokens": {"a": 1}}, "batch['tokens']: pad_value has a tree for this leaf"),
        ({"tokens": {}}, "batch['tokens']: pad_value has a tree for this leaf"),
        (-1, "batch['loss']['count']: the leaf's dtype cannot hold pad_value=-1"),
        ({"tokens": 0.5}, "batch['tokens']: the leaf's dtype cannot hold pad_value=0.5"),
        ({"tokens": 2**31}, "batch['tokens']: the leaf's dtype cannot hold pad_value=2147483648"),
        ({"tokens": NAN}, "batch['tokens']: the leaf's dtype cannot hold pad_value=nan"),
    ],
)
def test_what_does_not_fit_the_batch_is_refused_at_the_first_one(pipeline, values, message):
    ds = pipeline().shard_to(data_mesh(4), pad_value=values)
    with iter(ds) as batches, pytest.raises(ShardingError) as refusal:
        next(batches)
    assert message in str(refusal.value)
    assert re.search(r"  mesh: +data=4\n  remedy: ", str(refusal.value))
