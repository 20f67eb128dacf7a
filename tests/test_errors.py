"""Bad input is refused by name, at build time if it can be: C7.

Every message has four parts: the leaf's path, its shape and dtype, the mesh, the remedy.
"""
# ruff: noqa: E501 - a part of a message is one line, as long as it is

import copy
import gc
import pickle
import types

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import DevicePut, PadToDivisible, ShardingError, ShardingTree, hosts_mesh
from grain_shard.checkpoint import CheckpointSave
from grain_shard.errors import describe_error
from grain_shard.hosts.host_group import HostGroup
from grain_shard.iteration import random_access
from tests.conftest import data_mesh, ids, numbered


class DataParallel:
    """As of Keras."""

    device_mesh = types.SimpleNamespace(backend_mesh=None)


def records(record):
    """Eight records, each a function of its index, in batches of 4."""
    return grain.MapDataset.range(8).map(record).batch(4)


def dicts(*leaves):
    """Records with these leaves, each a function of the index."""
    return records(lambda i: {f"leaf{j}": leaf(i) for j, leaf in enumerate(leaves)})


def stacked_in_a_stream(record, **changed):
    """Records of a stream that Grain's own ``.batch`` stacks. Record 2 is changed."""
    ds = grain.MapDataset.range(8).to_iter_dataset()
    return ds.map(lambda i: record if i != 2 else {**record, **changed}).batch(4)


def stream(ds):
    """The same elements as a stream: `.shard_to` does not look through this map."""
    return ds.to_iter_dataset().map(dict)


def seq_mesh():
    return jax.make_mesh((2, 4), ("data", "seq"))


def of_host_1():
    return Mesh(hosts_mesh({"data": 4}, hosts=2, devices_per_host=2).devices[2:], ("data",))


class MapStyle:
    """A PyTorch Dataset in the style of a map, whose items are records. It has no `__iter__`."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return {"tokens": np.arange(65, dtype=np.int32)}


OF_COLUMNS = "if its values are arrays with a row for each record, wrap it: grain.MapDataset.source(grain_shard.ArraySource(x)), where x is this object."


def from_columns(columns):
    return grain.MapDataset.source(columns).batch(2).shard_to(data_mesh(1))


# Each problem, the ways to it, what is known of the leaf and the mesh, and the remedy.
AT_BUILD = {
    "cannot shard a MapStyle.": (
        lambda: grain_shard.shard_to(MapStyle(), data_mesh(4)),
        "mesh:   data=4",
        "if its items are single records, batch them: grain.MapDataset.source(x).batch(B).shard_to(mesh), where x is this object.",
    ),
    "cannot shard a list.": (
        lambda: grain_shard.shard_to([{"id": 0}], data_mesh(4)),
        "mesh:   data=4",
        "if its items are single records, batch them: grain.MapDataset.source(x).batch(B).shard_to(mesh), where x is this object. If its items are whole batches: grain_shard.from_iterable(x, rows=...).shard_to(mesh).",
    ),
    "cannot shard a generator.": (
        lambda: grain_shard.shard_to((batch for batch in ()), data_mesh(4)),
        "mesh:   data=4",
        "pass a grain.MapDataset or grain.IterDataset of batches, not its iterator. Turn a DataLoader or any other iterable of batches into a dataset by grain_shard.from_iterable(loader, rows=...).",
    ),
    "from_iterable got a MapStyle, which has __len__ and __getitem__ but no __iter__, so its items are taken for single records, not for batches.": (
        lambda: grain_shard.from_iterable(MapStyle(), rows="global"),
        lambda: grain_shard.from_iterable(MapStyle),  # a class, which would be called
        lambda: iter(grain_shard.from_iterable(lambda: MapStyle())),
        "call grain.MapDataset.source(ds).batch(B).shard_to(mesh), where ds is this object. If its items are whole batches, pass a function that yields them.",
    ),
    "the source is a dict with the keys 'x', 'y', of which Grain takes each value for a record.": (
        lambda: from_columns({"x": np.zeros((4, 2)), "y": np.arange(4)}),
        "mesh:   data=1",
        OF_COLUMNS,
    ),
    "the source is a tuple of 2 arrays with 4 rows each, of which Grain takes each value for a record.": (
        lambda: from_columns((np.zeros((4, 2)), np.arange(4))),
        "mesh:   data=1",
        OF_COLUMNS,
    ),
    "the spec names the mesh axis 'batch', which does not exist.": (
        lambda: numbered(8, 8).shard_to(data_mesh(4), P("batch")),
        "spec:   P('batch')   mesh: data=4",
        "name an axis of the mesh ('data'), or leave 'batch' out.",
    ),
    "the spec names the mesh axis 'data' twice.": (
        lambda: numbered(8, 8).shard_to(data_mesh(4), P("data", "data")),
        "spec:   P('data', 'data')   mesh: data=4",
        "use each mesh axis at most once in the spec.",
    ),
    "no spec is given, and none of the mesh axes 'dp', 'tp' is called 'data'.": (
        lambda: numbered(8, 8).shard_to(jax.make_mesh((4, 2), ("dp", "tp"))),
        "mesh:   dp=4, tp=2",
        "pass a spec that names the axis of the rows, e.g. PartitionSpec('dp').",
    ),
    "the spec 'tp' is not a PartitionSpec.": (
        lambda: numbered(8, 8).shard_to(jax.make_mesh((4, 2), ("dp", "tp")), "tp"),
        "mesh:   dp=4, tp=2",
        "pass jax.sharding.PartitionSpec('tp'), or a tree of PartitionSpecs.",
    ),
    "{} holds no sharding for any leaf of a batch.": (
        lambda: numbered(8, 8).shard_to(data_mesh(4), {}),
        "pass a Mesh alone, or a sharding or spec for each leaf.",
    ),
    "8 does not say on which devices to place batches.": (
        lambda: numbered(8, 8).shard_to({"data": 8}),
        'pass a Mesh, such as jax.make_mesh((8,), ("data",)), a NamedSharding over a Mesh of devices, a SingleDeviceSharding, a device, or a tree of these.',
    ),
    "DataParallel is a Keras object, not a JAX mesh.": (
        lambda: numbered(8, 8).shard_to(DataParallel()),
        lambda: numbered(8, 8).shard_to(DataParallel(), P("batch")),
        "pass keras.distribution.distribution().device_mesh.backend_mesh, the mesh that Keras uses.",
    ),
    "a list of devices has no mesh axis along which rows could be split.": (
        lambda: numbered(8, 8).shard_to(jax.devices()[:4], P("data")),
        'pass jax.make_mesh((4,), ("data",), devices=devices).',
    ),
    "a batch of 6 rows does not split into 4 shards.": (
        lambda: numbered(12, 6).shard_to(data_mesh(4), remainder="error"),
        lambda: numbered(12, 6).shard_to(data_mesh(4), remainder="drop"),
        "mesh:   data=4",
        'use a batch size of 8, or pass remainder="pad".',
    ),
    "the records do not fill the last batch of 4 rows.": (
        lambda: numbered(9, 4).shard_to(data_mesh(4), remainder="error"),
        "mesh:   data=4",
        'pass remainder="pad" (adds zeros and a mask) or remainder="drop".',
    ),
    "the dataset has no batch: it is empty, or it drops the remainder and has fewer records than one batch.": (
        lambda: numbered(3, 8, drop_remainder=True).shard_to(data_mesh(4)),
        lambda: grain.MapDataset.source([]).batch(8).shard_to(data_mesh(4)),
        "mesh:   data=4",
        'check that the source has records. Or keep a short batch, with .batch(B, drop_remainder=False) and remainder="pad".',
    ),
    'remainder="drop" leaves no batch: there are fewer records than one batch of 8 rows.': (
        lambda: numbered(3, 8).shard_to(data_mesh(4), remainder="drop"),
        "mesh:   data=4",
        'pass remainder="pad", or use a smaller batch size.',
    ),
    "remainder='drop' must know which batches are short, and a slice or a shuffle of the batches hides that.": (
        lambda: numbered(9, 4)[1:].shard_to(data_mesh(4), remainder="drop"),
        lambda: numbered(9, 4).shuffle(seed=1).shard_to(data_mesh(4), remainder="drop"),
        "mesh:   data=4",
        "use .batch(B, drop_remainder=True), or slice and shuffle the records before .batch.",
    ),
    "remainder='wrap' is not one of pad, drop, error.": (
        lambda: numbered(8, 8).shard_to(data_mesh(4), remainder="wrap"),
        "mesh:   data=4",
        "pass one of the listed words as remainder.",
    ),
    "remainder=array(['pad', 'drop'], dtype='<U4') is not one of pad, drop, error.": (
        lambda: numbered(8, 8).shard_to(data_mesh(4), remainder=np.array(["pad", "drop"])),
        "mesh:   data=4",
        "pass one of the listed words as remainder.",
    ),
    **{
        f"{call} cannot follow .shard_to, which ends the pipeline of all hosts.": (
            lambda then=then: then(numbered(8, 4).shard_to(data_mesh(4))),
            "mesh:   data=4",
            f"{instead} before .shard_to.",
        )
        for call, then, instead in [
            (".batch", lambda ds: ds.batch(2), "call .batch(global_batch_size), once,"),
            (".seed", lambda ds: ds.seed(5), "call .seed(s).shuffle()"),
            (".filter", lambda ds: ds.filter(bool), "filter the records in grain_shard.feeds"),
            (".shuffle", lambda ds: ds.shuffle(seed=1), "call .seed(s).shuffle()"),
            (".repeat", lambda ds: ds.repeat(3), "loop over ds.epochs(n), or call .repeat(n)"),
            ("[...]", lambda ds: ds[1:], "call seek(step) of an iterator, or slice the dataset"),
        ]
    },
    "seek needs random access. Streams and feeds cannot jump to a step or a record.": (
        lambda: iter(stream(numbered(8, 4)).shard_to(data_mesh(4))).seek(0),
        "call set_state(saved) to go on from a saved state. To use seek, keep the pipeline a grain.MapDataset as far as .batch.",
    ),
    "a stream has no batch at an index, and no slices.": (
        lambda: PadToDivisible(4)(stream(numbered(8, 4)))[1:],
        "keep the pipeline a grain.MapDataset as far as .batch. A stream goes on from the state of its iterator.",
    ),
    "the dataset is sharded already.": (
        lambda: numbered(8, 4).shard_to(data_mesh(2)).shard_to(data_mesh(2)),
        "mesh:   data=2",
        "call .shard_to once, at the end.",
    ),
    "mask_key=3 is not a string.": (
        lambda: numbered(8, 4).shard_to(data_mesh(2), mask_key=3),
        "pass mask_key as a string, or None for no mask.",
    ),
    "a .filter drops elements, so the number of a batch does not determine its records.": (  # before .batch Grain refuses it itself
        lambda: numbered(16, 4).filter(lambda b: b["id"][0] != 8).shard_to(data_mesh(4)),
        "filter a stream: .to_iter_dataset().filter(...).batch(B). On several hosts, cut that stream into grain_shard.feeds, or pass rows= to .shard_to.",
    ),
    "the feeds have no .batch, and .shard_to(mesh) places batches.": (
        lambda: grain_shard.feeds(lambda feed: numbered(8, 4), num_feeds=2).shard_to(data_mesh(4)),
        "call .batch(global_batch_size) on the feeds before .shard_to: feeds(...).batch(B).shard_to(mesh).",
    ),
    "CheckpointSave got an object of type ShardedDataset, not an iterator of a dataset that ends with .shard_to(mesh).": (
        lambda: CheckpointSave(numbered(8, 4).shard_to(data_mesh(4))),
        "call batches = iter(ds), or epochs = ds.epochs(n), once before the loop, and pass that object to CheckpointSave.",
    ),
    "host 0 has no device in the mesh. All its devices are of host 1.": (
        lambda: grain_shard.ShardByMesh(of_host_1()),
        "mesh:   data=2",
        "make the mesh of all jax.devices(), whose number is jax.device_count(), or run the pipeline on hosts that have a device in it.",
    ),
    ".mp_prefetch cannot follow .shard_to: a worker process must not hold a device.": (
        lambda: numbered(8, 8).shard_to(data_mesh(4)).mp_prefetch(),
        "mesh:   data=4",
        "pass num_workers to .shard_to instead of calling .mp_prefetch after .shard_to.",
    ),
    "batch_size=4.0 of .batch is not an integer.": (
        lambda: grain.MapDataset.range(8).batch(4.0).shard_to(data_mesh(4)),
        "mesh:   data=4",
        "divide by // instead of /.",
    ),
    **{
        f"{name}={value!r} is not an integer of at least {minimum}.": (
            lambda name=name, value=value: numbered(8, 8).shard_to(data_mesh(4), **{name: value}),
            f"pass {name} as a whole number, {minimum} or more.",
        )
        for name, value, minimum in [
            ("cpu_buffer_size", 0, 1),
            ("cpu_buffer_size", 2.5, 1),
            ("device_buffer_size", -1, 1),
            ("num_threads", 0, 1),
            ("num_workers", -2, 0),
            ("num_workers", True, 0),
        ]
    },
}

AT_FIRST_BATCH = {
    "batch['leaf0']: dim 1 has size 10, which is not divisible by mesh axis 'seq' (size 4).": (
        lambda: dicts(lambda i: np.zeros(10, np.int32)).shard_to(seq_mesh(), P("data", "seq")),
        "leaf:   int32[4, 10]   spec: P('data', 'seq')   mesh: data=2, seq=4",
        "pad dim 1 to 12 before .batch, or drop 'seq' from this leaf's spec.",
    ),
    "batch['leaf1']: the spec has entries for 2 dims, but the leaf has rank 1.": (
        lambda: dicts(lambda i: np.zeros(4), lambda i: i).shard_to(
            seq_mesh(), {"leaf0": P("data", "seq"), "leaf1": P("data", "seq")}
        ),
        "leaf:   int64[4]   spec: P('data', 'seq')   mesh: data=2, seq=4",
        "shorten the spec to length 1. The first entry is for the rows.",
    ),
    "batch['leaf0']: the spec has entries for 2 dims, but the leaf has rank 1.": (
        lambda: dicts(lambda i: i).shard_to(seq_mesh(), P("data", "seq")),
        "leaf:   int64[4]   spec: P('data', 'seq')   mesh: data=2, seq=4",
        "shorten the spec to length 1. The first entry is for the rows.",
    ),
    "batch['leaf1']: the leaf has no spec.": (
        lambda: dicts(lambda i: i, lambda i: i).shard_to(
            data_mesh(4), {"leaf0": P("data"), "leaf": P("data"), "b": P()}
        ),
        "leaf:   int64[4]   mesh: data=4",
        "in the specs, rename batch['leaf'] to batch['leaf1'].",
    ),
    "batch['leaf0']: the leaf has no spec.": (
        lambda: dicts(lambda i: i).shard_to(data_mesh(4), {"a": P("data"), "b": P("data")}),
        "leaf:   int64[4]   mesh: data=4",
        "add this leaf to the specs. The batch does not have batch['a'], batch['b'].",
    ),
    "batch['leaf2']: the leaf has no spec.": (
        lambda: dicts(lambda i: i, lambda i: i, lambda i: i).shard_to(
            data_mesh(4), {"leaf0": P("data"), "leaf1": P("data")}
        ),
        "leaf:   int64[4]   mesh: data=4",
        "add this leaf to the specs.",
    ),
    "batch['leaf1']: the specs have a tree for this leaf, but the leaf is a single array.": (
        lambda: dicts(lambda i: i, lambda i: i).shard_to(
            data_mesh(4), {"leaf0": P("data"), "leaf1": {}}
        ),
        "leaf:   int64[4]   mesh: data=4",
        "give this leaf a single PartitionSpec.",
    ),
    "batch['lable']: the tree of specs names a leaf that the batch does not have.": (
        lambda: dicts(lambda i: i).shard_to(data_mesh(4), {"leaf0": P("data"), "lable": P("data")}),
        lambda: dicts(lambda i: i).shard_to(data_mesh(4), {"leaf0": P("data"), "lable": {}}),
        "mesh:   data=4",
        "remove this leaf from the specs, or correct its name.",
    ),
    "batch['label']: the leading axis has 3 rows, but batch['image'] has 4 rows.": (
        lambda: numbered(
            8, 4, batch_fn=lambda rows: {"image": np.zeros((4, 2)), "label": np.zeros(3, np.int32)}
        ).shard_to(data_mesh(4)),
        "leaf:   int32[3]   mesh: data=4",
        "give every leaf one row per record. Only a scalar may belong to the whole batch.",
    ),
    "batch['tokens']: the leaf holds Python objects, such as None or rows of different lengths.": (
        lambda: numbered(
            8, 4, batch_fn=lambda rows: {"tokens": np.array([np.zeros(4), None], object)}
        ).shard_to(data_mesh(4)),
        "leaf:   object[2]   mesh: data=4",
        "pad rows to one shape and replace None by a number in .map, or drop the leaf.",
    ),
    "batch['leaf0']: the leaf holds typed PRNG keys of JAX, which NumPy cannot hold.": (
        lambda: dicts(lambda i: jax.random.key(i)).shard_to(data_mesh(4)),
        lambda: stacked_in_a_stream({"leaf0": jax.random.key(0)}).shard_to(data_mesh(4)),
        "leaf:   key<fry>[]   mesh: data=4",
        "turn the keys into numbers in .map, with jax.random.key_data, and back into keys in the training step, with jax.random.wrap_key_data.",
    ),
    "batch['leaf0']: in record 1 of the dataset before .batch, the leaf is float64[4], but float64[3] in other rows.": (
        lambda: dicts(lambda i: np.zeros(3 + i % 2)).shard_to(data_mesh(4)),
        "leaf:   float64[4]   mesh: data=4",
        "pad or cast the leaf in .map before .batch, so that all rows have one shape and dtype. In feeds, texts of different lengths can be packed.",
    ),
    "batch['leaf0']: in record 3 of the dataset before .batch, the leaf is int64[], but float32[] in other rows.": (
        lambda: dicts(lambda i: np.float32(i) if i < 3 else i).shard_to(data_mesh(4)),
        "leaf:   int64[]   mesh: data=4",
        "pad or cast the leaf in .map before .batch, so that all rows have one shape and dtype. In feeds, texts of different lengths can be packed.",
    ),
    "batch['leaf0']: in record 3 of the dataset before .batch, the leaf is |S2[], but <U1[] in other rows.": (
        lambda: dicts(lambda i: "a" if i < 3 else "é".encode()).shard_to(data_mesh(4)),
        "leaf:   |S2[]   mesh: data=4",
        "pad or cast the leaf in .map before .batch, so that all rows have one shape and dtype. In feeds, texts of different lengths can be packed.",
    ),
    "batch['leaf0']: in record 3 of the dataset before .batch, the leaf holds Python objects, such as None or rows of different lengths.": (
        lambda: dicts(lambda i: np.array(["a", b"b" if i == 3 else "b"], object)).shard_to(
            data_mesh(4)
        ),
        "leaf:   object[2]   mesh: data=4",
        "pad rows to one shape and replace None by a number in .map, or drop the leaf.",
    ),
    "batch['leaf0']: in row 2 of the batch, the leaf holds typed PRNG keys of JAX, which NumPy cannot hold.": (
        lambda: stacked_in_a_stream({"leaf0": np.uint32(0)}, leaf0=jax.random.key(0)).shard_to(
            data_mesh(4), rows="local"
        ),
        "leaf:   key<fry>[]   mesh: data=4",
        "turn the keys into numbers in .map, with jax.random.key_data, and back into keys in the training step, with jax.random.wrap_key_data.",
    ),
    "batch['leaf0']: in row 2 of the batch, the leaf is float64[3], but float64[4] in other rows.": (
        lambda: stacked_in_a_stream({"leaf0": np.zeros(4)}, leaf0=np.zeros(3)).shard_to(
            data_mesh(4)
        ),
        "leaf:   float64[3]   mesh: data=4",
        "pad or cast the leaf in .map before .batch, so that all rows have one shape and dtype. In feeds, texts of different lengths can be packed.",
    ),
    "batch['leaf1']: two rows have different structures: batch['leaf1'] only in row 2 of the batch, not in row 0 of the batch.": (
        lambda: stacked_in_a_stream({"leaf0": 0}, leaf1=0).shard_to(data_mesh(4), rows="local"),
        lambda: stacked_in_a_stream({"leaf0": 0}, leaf1=0).shard_to(data_mesh(4), rows="global"),
        # Functions may change the batch after it is stacked, but it has to be stacked.
        lambda: stacked_in_a_stream({"leaf0": 0}, leaf1=0).map(dict).shard_to(data_mesh(4)),
        "mesh:   data=4",
        "return the same tree for every row from .map. A leaf that is None in one row must be None in all rows.",
    ),
    "batch['leaf0']: two rows have different structures: batch['leaf0'] only in record 0 of the dataset before .batch, not in record 2 of the dataset before .batch.": (
        lambda: dicts(lambda i: None if i == 2 else i).shard_to(data_mesh(4)),
        "mesh:   data=4",
        "return the same tree for every row from .map. A leaf that is None in one row must be None in all rows.",
    ),
    "batch['leaf0']['ids']: there is a list of numbers or strings, of length 3. JAX takes each item for a leaf, so the batch would hold an array for each item.": (
        lambda: dicts(lambda i: {"ids": [1, 2, i]}).shard_to(data_mesh(4)),
        "leaf:   list   mesh: data=4",
        'turn the list into an array: call .with_format("numpy") on a Hugging Face dataset, or np.array(list) in .map before .batch. If each item is a field of its own, use a tuple.',
    ),
    "batch: there is a list of numbers or strings, of length 3. JAX takes each item for a leaf, so the batch would hold an array for each item.": (
        lambda: records(lambda i: [1, 2, i]).shard_to(data_mesh(4)),
        "leaf:   list   mesh: data=4",
        'return a dict of arrays from .map before .batch, such as {"x": np.array(list)}, because only a dict can hold the mask.',
    ),
    "batch['leaf0']: the leaf has a dtype that JAX lacks: [('float0', 'V')].": (
        lambda: dicts(lambda i: np.zeros(2, jax.dtypes.float0)).shard_to(data_mesh(4)),
        "leaf:   [('float0', 'V')][2]   mesh: data=4",
        "drop the leaf: it holds no values.",
    ),
    "batch['leaf0']: the keys 'a', 1 cannot be sorted, and JAX sorts the leaves of a dict by key.": (
        lambda: dicts(lambda i: {"a": i, 1: i}).shard_to(data_mesh(4)),
        lambda: stacked_in_a_stream({"leaf0": {"a": 0, 1: 0}}).shard_to(data_mesh(4)),
        "leaf:   dict   mesh: data=4",
        "use keys of one type, such as strings.",
    ),
    "batch['leaf0']: in record 2 of the dataset before .batch, the keys 'a', 1 cannot be sorted, and JAX sorts the leaves of a dict by key.": (
        lambda: dicts(lambda i: {"a": i, 1: i} if i == 2 else {"a": i}).shard_to(data_mesh(4)),
        "leaf:   dict   mesh: data=4",
        "use keys of one type, such as strings.",
    ),
    "batch['leaf0']: in row 2 of the batch, the keys 'a', 1 cannot be sorted, and JAX sorts the leaves of a dict by key.": (
        lambda: stacked_in_a_stream({"leaf0": {"a": 0}}, leaf0={"a": 0, 1: 0}).shard_to(
            data_mesh(4)
        ),
        "leaf:   dict   mesh: data=4",
        "use keys of one type, such as strings.",
    ),
    "batch: the keys 'a', 1 cannot be sorted, and JAX sorts the leaves of a dict by key.": (
        lambda: grain_shard.from_iterable(
            [{"a": np.arange(4), 1: np.arange(4)}], rows="global"
        ).shard_to(data_mesh(4)),
        "leaf:   dict   mesh: data=4",
        "use keys of one type, such as strings.",
    ),
    "batch['leaf0']: the leaf has a dtype that JAX lacks: StringDType().": (
        lambda: dicts(lambda i: np.array(["a"], np.dtypes.StringDType())).shard_to(data_mesh(4)),
        "leaf:   StringDType()[1]   mesh: data=4",
        "convert numbers in .map by .astype(np.float32), and text by .astype(str).",
    ),
    "batch['leaf0']: the leaf has a dtype that JAX lacks: >i4.": (
        lambda: dicts(lambda i: np.array(i, ">i4")).shard_to(data_mesh(4)),
        "leaf:   >i4[]   mesh: data=4",
        'convert the byte order in .map: .astype(x.dtype.newbyteorder("=")).',
    ),
    "batch['leaf0']: in record 2 of the dataset before .batch, the leaf is a masked array, whose mask would be lost on the devices.": (
        lambda: dicts(lambda i: np.ma.array([1.5], mask=i == 2)[0]).shard_to(data_mesh(4)),
        "leaf:   float64[]   mesh: data=4",
        "return np.ma.filled(leaf, 0) from .map, and np.ma.getmaskarray(leaf) as another leaf.",
    ),
    "batch['x']: batch 0 has 4 rows, but is made of 8 records: a transformation after .batch changes the number of rows.": (
        lambda: numbered(16, 8).map(lambda b: {"x": b["id"][::2]}).shard_to(data_mesh(4)),
        "leaf:   int32[4]   mesh: data=4",
        "change the number of rows before .batch, or in a stream: .to_iter_dataset().batch(B).map(...). The first batch of a stream sets the batch size.",
    ),
    "batch: each record is text or bytes, but only a dict of arrays can hold the mask.": (
        lambda: grain.MapDataset.source([b"ab", b"cd"] * 4).batch(4).shard_to(data_mesh(4)),
        "leaf:   |S2[4]   mesh: data=4",
        "decode the records into dicts by .map(decode) before .batch.",
    ),
    "batch: the batch is a ndarray, but only a dict can hold the mask.": (
        lambda: grain.MapDataset.range(8).batch(4).shard_to(data_mesh(4)),
        "leaf:   int64[4]   mesh: data=4",
        'turn records into dicts with .map before .batch, or pass mask_key=None with remainder="drop" to .shard_to and PadToDivisible. (Without a mask, padding would count in every mean.)',
    ),
    "batch[1]: the keys of the batch are not strings, so JAX cannot sort the mask's key among them.": (
        lambda: records(lambda i: {1: i}).shard_to(data_mesh(4)),
        "leaf:   int64[4]   mesh: data=4",
        'give records string keys in .map, or pass mask_key=None with remainder="drop" to .shard_to and PadToDivisible. (Without a mask, padding would count in every mean.)',
    ),
    "batch['valid_mask']: the batch already has a leaf 'valid_mask', and mask_key gives the mask this name.": (
        lambda: records(lambda i: {"valid_mask": i}).shard_to(data_mesh(4)),
        "leaf:   int64[4]   mesh: data=4",
        'pass another mask_key, or pass mask_key=None with remainder="drop" to .shard_to and PadToDivisible. (Without a mask, padding would count in every mean.)',
    ),
    "batch: the batch has no leaf with a leading axis.": (
        lambda: stream(grain.MapDataset.range(8).map(lambda i: {"x": i})).shard_to(data_mesh(4)),
        "mesh:   data=4",
        "call .batch(global_batch_size) before .shard_to. A function of .map after .batch must return arrays with a row per record.",
    ),
    "a batch of 4 rows does not split into 8 shards.": (
        lambda: stream(numbered(8, 4)).shard_to(data_mesh(8), remainder="error"),
        "mesh:   data=8",
        'use a batch size of 8, or pass remainder="pad".',
    ),
}


def cases(problems):
    for problem, parts in problems.items():
        *facts, remedy = [part for part in parts if isinstance(part, str)]
        message = "\n  ".join([problem, *facts, f"remedy: {remedy}"])
        yield from (pytest.param(way, message, id=problem) for way in parts if callable(way))


@pytest.mark.parametrize(("build", "message"), list(cases(AT_BUILD)))
def test_refused_when_built(build, message):
    with pytest.raises(ShardingError) as caught:
        build()
    assert str(caught.value) == message


@pytest.mark.parametrize(("build", "message"), list(cases(AT_FIRST_BATCH)))
def test_refused_at_the_first_batch(build, message, monkeypatch):
    # One thread, because either of two threads might find its record unlike the other one's.
    monkeypatch.setattr(random_access, "MOST_THREADS", 1)
    iterator = iter(build())
    for _ in range(2):  # and ever after: C8
        with pytest.raises(ShardingError) as caught:
            next(iterator)
        assert str(caught.value) == message


def test_a_later_batch_unlike_the_first_is_refused(mesh):
    def half(k, batch):
        return {**batch, "image": batch["image"].astype(f"float{32 >> k}")}

    iterator = iter(numbered(16, 8).to_iter_dataset().map_with_index(half).shard_to(mesh))
    next(iterator)
    with pytest.raises(ShardingError) as caught:
        next(iterator)
    assert str(caught.value) == (
        "batch['image']: the leaf was float32[8, 2, 3] in the first batch of this host, and has changed.\n"
        "  leaf:   float16[8, 2, 3]   mesh: data=8\n"
        "  remedy: give all batches the same tree, and each leaf the same shape and dtype in every batch, so that a training step compiles once."
    )


@pytest.mark.parametrize("remainder", ["drop", "error"])
def test_a_short_batch_where_none_may_be_is_no_batch_of_zeros(remainder):
    ds = grain.MapDataset.concatenate([numbered(12, 8), numbered(8, 8)])
    iterator = iter(ds.shard_to(data_mesh(4), remainder=remainder))
    next(iterator)
    with pytest.raises(ShardingError, match="a batch in the middle of an epoch is short"):
        next(iterator)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_is_on_devices_does_not_travel_and_has_no_copy(how):
    ds = numbered(8, 8).shard_to(data_mesh(4))
    with pytest.raises(ShardingError, match="cannot be copied or sent to another process"):
        how(ds)
    with iter(ds) as iterator:
        with pytest.raises(TypeError, match="cannot be copied or sent to another process"):
            how(iterator)
        gc.collect()  # a copy would stop the threads of the original when it goes
        assert ids(iterator) == [list(range(8))]


def test_every_error_is_one_of_ours_and_a_builtin_too():
    assert issubclass(grain_shard.ShardingError, ValueError)
    assert issubclass(grain_shard.StateError, ValueError)
    assert issubclass(grain_shard.AgreementError, RuntimeError)
    assert issubclass(grain_shard.HostTimeoutError, TimeoutError)
    for name in ("ShardingError", "StateError", "AgreementError", "HostTimeoutError"):
        assert issubclass(getattr(grain_shard, name), grain_shard.GrainShardError)


@pytest.mark.parametrize("value", [0, -4, 2.0, "8", None, True])
def test_the_stages_refuse_sizes_that_are_none(value):
    for build in (
        lambda: PadToDivisible(value),
        lambda: grain_shard.ValidateBatchSize(value),
        lambda: DevicePut(ShardingTree.of(data_mesh(1)), device_buffer_size=value),
    ):
        with pytest.raises(ShardingError, match="is not an integer of at least 1"):
            build()


def test_an_error_whose_text_cannot_be_had_is_still_told_to_other_hosts():
    class Unspeakable(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    assert describe_error(ValueError("bad")) == "ValueError: bad"
    noted = Unspeakable()
    noted.__notes__ = [noted, "grain_shard: in feed 3", "of the user"]
    text = "Unspeakable: (the text of this error cannot be read) (in feed 3)"
    assert describe_error(noted) == text


def test_keys_that_cannot_be_sorted_may_go_before_the_batch_of_a_stream():
    ds = grain.MapDataset.range(8).map(lambda i: {"id": i, 1: i}).to_iter_dataset()
    ds = ds.map(lambda record: {"id": record["id"]}).batch(4)
    assert ids(ds.shard_to(data_mesh(4))) == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_what_a_filter_drops_is_skipped_in_a_stream():
    ds = numbered(16, 4).filter(lambda b: b["id"][0] != 8).to_iter_dataset()
    assert ids(ds.shard_to(data_mesh(4))) == [[0, 1, 2, 3], [4, 5, 6, 7], [12, 13, 14, 15]]


def test_the_other_hosts_are_told_the_mesh_of_an_error(monkeypatch):
    told = []
    monkeypatch.setattr(HostGroup, "failed", lambda group, error: told.append(str(error)))
    ragged = grain.MapDataset.range(8).map(lambda i: {"x": np.zeros(1 + i % 2)}).batch(8)
    with pytest.raises(ShardingError) as raised:
        next(iter(ragged.shard_to(data_mesh(4))))
    assert told == [str(raised.value)]
    assert "mesh: data=4" in told[0]
