"""Records as trees, of any class that JAX knows, and what is no leaf; None, and text, as leaves."""

import collections
import dataclasses
import datetime
import decimal
import enum
import functools
import pathlib
import types
from typing import NamedTuple

import grain
import jax
import ml_dtypes
import numpy as np
import pytest
from absl import logging
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import ShardingError
from tests.conftest import data_mesh, refused, to_numpy
from tests.pipelines import KINDS
from tests.programs import run


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
    "random access": "batch['x']: two rows have different structures: batch['x'] only in record 5",
    "feeds": "batch['x']: two rows have different structures: batch['x'] only in a row of feed",
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
        (np.float64, 1e300, "holds 1e+300, which does not fit into float32"),
        (np.complex128, -1e300j, "holds (-0-1e+300j), which does not fit into complex64"),
    ],
)
@pipelines
def test_a_number_that_32_bits_cannot_hold_is_an_error(pipeline, dtype, value, message):
    ds = pipeline(lambda i: {"x": np.full(2, value if i == 5 else i, dtype)}).shard_to(data_mesh(2))
    with pytest.raises(ShardingError) as refusal:
        list(ds)
    assert str(refusal.value).startswith(f"batch['x']: row 1 of the batch {message}")
    assert "mesh: data=2" in str(refusal.value)
    assert 'remedy: call jax.config.update("jax_enable_x64", True)' in str(refusal.value)


@pipelines
def test_numbers_that_32_bits_hold_are_placed(pipeline):
    x, y = np.array([-(2**31), 2**31 - 1]), np.array([0, 2**32 - 1], np.uint64)
    z = np.array([np.inf, np.nan, -(2.0**127), 1e-300])
    c = z.astype(complex)
    first, *_ = pipeline(lambda i: {"x": x, "y": y, "z": z, "c": c}).shard_to(data_mesh(2))
    assert first["x"].tolist()[0] == x.tolist()
    assert first["y"].tolist()[0] == y.tolist()
    np.testing.assert_array_equal(np.asarray(first["z"])[0], z.astype(np.float32))
    np.testing.assert_array_equal(np.asarray(first["c"])[0], c.astype(np.complex64))


@pipelines
def test_with_x64_any_integer_is_placed(pipeline):
    with jax.enable_x64(True):
        batches = iter(pipeline(lambda i: {"x": 2**40 + i}).shard_to(data_mesh(2)))
    with batches:  # which are placed as the setting was at iter
        first = next(batches)
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


# What is a leaf, what is a tree, and what is neither.


class Encoding(collections.UserDict):
    """Stands for a tokenizer's result, such as transformers' BatchEncoding."""


class Settings:
    """Stands for a mapping that does not say so, such as ml_collections' ConfigDict."""

    def keys(self):
        return ["x"]

    def __getitem__(self, key):
        return ROW


class Bunch(dict):
    """Stands for a user's dict, whose items are attributes, too."""


@dataclasses.dataclass
class Unregistered:
    x: np.ndarray


class Series(Settings):
    """Stands for a row of a table, such as a Series of pandas."""

    iloc = ()

    def __array__(self, dtype=None, copy=None):
        return ROW


ROW = np.arange(3, dtype=np.int32)
STACKED = {"random access", "stream", "feeds"}  # kinds in which this package or Grain stacks rows
TREES = {
    "OrderedDict": lambda: collections.OrderedDict(b=ROW, a=ROW + 1),
    "defaultdict": lambda: collections.defaultdict(list, a=ROW),
    "NamedTuple": lambda: Point(ROW, ROW + 1),
    "a registered class": lambda: Input(ROW),
    "a tuple of numbers": lambda: (1, 2.5),
    "a list of arrays": lambda: [ROW, ROW + 1],
    "an empty list": list,
}
ARRAYS = {
    "range": lambda: range(3),
    "deque": lambda: collections.deque([1, 2]),
    "memoryview": lambda: memoryview(ROW),
}
LIST = "there is a list of numbers or strings", "np.array(list)"
NO_LEAVES = {
    "UserDict": (lambda: Encoding(x=ROW), "the mapping Encoding", ".map(dict)"),
    "keys that are numbers": (lambda: Encoding({0: ROW}), "the mapping Encoding", ".map(dict)"),
    "dict subclass": (lambda: Bunch(x=ROW), "the mapping Bunch", ".map(dict)"),
    "Counter": (lambda: collections.Counter("ab"), "the mapping Counter", ".map(dict)"),
    "ChainMap": (lambda: collections.ChainMap({"x": 1}), "the mapping ChainMap", ".map(dict)"),
    "proxy": (lambda: types.MappingProxyType({}), "the mapping mappingproxy", ".map(dict)"),
    "a mapping by its methods": (Settings, "the mapping Settings", ".map(dict)"),
    "row of a table": (Series, "the values of a Series without their labels", ".to_dict()"),
    "dataclass": (lambda: Unregistered(ROW), "the class Unregistered", "vars(leaf)"),
    "set": (lambda: {1, 2}, "the class set", "np.array(sorted(leaf))"),
    "datetime": (lambda: datetime.datetime(2020, 1, 1), "the class datetime", "str(leaf)"),
    "Decimal": (lambda: decimal.Decimal(1), "the class Decimal", "str(leaf)"),
    "Path": (lambda: pathlib.PurePosixPath("a"), "the class PurePosixPath", "str(leaf)"),
    "list of ints": (lambda: [1, 2], *LIST),
    "list of NumPy's integers": (lambda: list(ROW), *LIST),
    "list of one number": (lambda: [1.5], *LIST),
    "list of text": (lambda: ["a", "b"], *LIST),
    "list of 0-d arrays": (lambda: [np.array(1), jax.numpy.array(2)], *LIST),
    "list of lists": (lambda: [[1, 2], [3, np.int8(4)]], *LIST),
    "list of tuples": (lambda: [(1, 2), (3, 4)], *LIST),
    "bytes of an unknown dtype": (
        lambda: np.zeros(2, ml_dtypes.bfloat16).view("V2"),
        "a dtype that JAX lacks: |V2",
        ".view(ml_dtypes.bfloat16)",
    ),
    "fields": (lambda: np.zeros(2, "i4,f4"), "a dtype that JAX lacks", "for name in x.dtype.names"),
    "long complex": (lambda: np.zeros(2, "G"), "a dtype that JAX lacks", ".astype(np.complex64)"),
    "times": (lambda: np.zeros(2, "M8[ns]"), "a dtype that JAX lacks", '.astype("M8[s]").astype('),
}


@pytest.mark.parametrize("make", {**TREES, **ARRAYS}.values(), ids={**TREES, **ARRAYS})
@pytest.mark.parametrize("kind", sorted(STACKED))
def test_a_tree_of_jax_is_a_tree_of_every_kind(kind, make):
    batch = next(iter(KINDS[kind](lambda i: {"id": i, "x": make()}).shard_to(data_mesh(2))))
    row = make() if make in TREES.values() else np.array(make())
    assert jax.tree.structure(batch["x"]) == jax.tree.structure(row)
    for leaf, like in zip(jax.tree.leaves(batch["x"]), jax.tree.leaves(row), strict=True):
        np.testing.assert_array_equal(leaf, np.stack([like] * 4))


@pytest.mark.parametrize(("make", "problem", "remedy"), NO_LEAVES.values(), ids=NO_LEAVES)
@pytest.mark.parametrize("kind", sorted(STACKED))
def test_what_is_neither_a_tree_nor_a_leaf_is_refused_by_its_name(kind, make, problem, remedy):
    for record, path in (
        (lambda i: {"id": i, "x": make()}, "batch['x']"),
        (lambda i: make(), "batch"),
    ):
        with refused(f"{path}: ") as refusal:
            next(iter(KINDS[kind](record).shard_to(data_mesh(2), mask_key=None, remainder="drop")))
        assert problem in str(refusal.value)
        assert remedy in str(refusal.value).split("remedy: ")[1]


@pytest.mark.parametrize(
    "name",
    ["UserDict", "keys that are numbers", "ChainMap", "dict subclass", "proxy", "set", "Decimal"],
)
@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_no_leaf_is_refused_by_its_name_before_a_map_of_batches_too(is_stream, name):
    make, problem, remedy = NO_LEAVES[name]
    records = grain.MapDataset.range(8).map(lambda i: {"id": i, "x": make()})
    ds = (records.to_iter_dataset() if is_stream else records).batch(4).map(dict)
    with refused("batch['x']: ") as refusal:
        next(iter(ds.shard_to(data_mesh(2))))
    assert problem in str(refusal.value)
    assert remedy in str(refusal.value)


@pytest.mark.parametrize("name", ["UserDict", "dict subclass", "dataclass", "set", "Decimal"])
def test_whole_trees_are_checked_as_well(name):
    make, problem, remedy = NO_LEAVES[name]
    batches = grain_shard.from_iterable([{"id": np.arange(4), "x": make()}])
    for use in (
        lambda: grain_shard.DevicePlacement().place_on_device({"x": make()}),
        lambda: next(iter(batches.shard_to(data_mesh(2)))),
        lambda: grain_shard.ArraySource({"x": make()}),
    ):
        with refused(problem) as refusal:
            use()
        assert remedy in str(refusal.value)


def test_the_first_batch_with_text_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(logging, "_log_counter_per_token", {})  # as in a new process
    ds = grain.MapDataset.range(8).map(lambda i: {"id": i, "name": str(i)}).batch(4)
    for _ in range(2):
        list(ds.shard_to(data_mesh(2)))
    (line,) = caplog.messages
    assert line.startswith("grain_shard: batch['name'] holds text, which stays on the host")


def test_a_batch_with_a_list_of_numbers_is_refused():
    batches = grain_shard.from_iterable([{"id": np.arange(4), "x": [1, 2, 3, 4]}])
    with refused("batch['x']: there is a list of numbers"):
        next(iter(batches.shard_to(data_mesh(2))))


SCRIPT = """
import concurrent.futures, dataclasses, multiprocessing, typing
import grain, jax, numpy as np, grain_shard

class Point(typing.NamedTuple):
    x: object

@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Row:
    x: object

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, context) as executor:
        for cls in (Point, Row):
            of_map = grain.MapDataset.range(80).map(lambda i: {"r": cls(np.int32(i))})
            of_arrays = grain.MapDataset.source(grain_shard.ArraySource({"r": cls(np.arange(80))}))
            for records in (of_map, of_arrays):
                for where in ({}, {"num_workers": 1}, {"executor": executor}):
                    try:
                        with iter(records.batch(4).shard_to(jax.devices()[0], **where)) as batches:
                            batch = next(batches)
                        print(type(batch["r"]) is cls and batch["r"].x.tolist())
                    except grain_shard.ShardingError as error:
                        print(error.problem)
"""


@pytest.mark.slow
def test_a_class_of_the_main_script_is_itself_elsewhere_or_refused_by_name(tmp_path):
    _, out, err = run(SCRIPT, tmp_path / "script.py")
    rows, unknown = str([0, 1, 2, 3]), "JAX knows no tree of the class Row in this process."
    assert out.split("\n")[:-1] == [rows] * 6 + [rows, unknown, unknown] * 2, err
