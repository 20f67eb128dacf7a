"""Four processes as two slices: batches are exact, and a row is read once in each slice.

CPU devices are in no slice. Here every process takes its devices for those of a slice by the number
of their host, which is all that the package asks of them. What the network between slices carries,
the compiler of TPUs tells in `test_slices`.
"""

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable
from unittest import mock

import grain
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import rehearse
from tests.conftest import CountingSource, read_for_batches
from tests.test_slices import Device

pytestmark = pytest.mark.slow

HOSTS, DEVICES_PER_HOST, HOSTS_PER_SLICE = 4, 2, 2
SLICES = HOSTS // HOSTS_PER_SLICE
RECORDS, ROWS = 44, 16


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: Callable[[np.ndarray], Mesh]
    spec: object = P("data")
    microbatches: int | None = None
    amplification: int = SLICES


CASES = {
    "replicas over slices": Case(lambda d: Mesh(d.reshape(2, 2, 2), ("replica", "model", "data"))),
    "replicas over slices, Explicit": Case(
        lambda d: Mesh(
            d.reshape(2, 2, 2), ("replica", "model", "data"), axis_types=(AxisType.Explicit,) * 3
        )
    ),
    "model over slices and hosts": Case(lambda d: Mesh(d.reshape(4, 2), ("model", "data"))),
    "data over slices, model over hosts": Case(
        lambda d: Mesh(d.reshape(2, 2, 2).swapaxes(1, 2).reshape(4, 2), ("data", "model")),
        amplification=1,
    ),
    "tokens over slices and hosts": Case(
        lambda d: Mesh(d.reshape(4, 2), ("seq", "data")), {"id": P("data"), "x": P("data", "seq")}
    ),
    "tokens over slices and hosts, Explicit": Case(
        lambda d: Mesh(d.reshape(4, 2), ("seq", "data"), axis_types=(AxisType.Explicit,) * 2),
        {"id": P("data"), "x": P("data", "seq")},
    ),
    "a leaf that all have": Case(
        lambda d: Mesh(d.reshape(4, 2), ("data", "model")), {"id": P("data"), "x": P()}
    ),
    "microbatches": Case(
        lambda d: Mesh(d.reshape(2, 2, 2), ("replica", "model", "data")), microbatches=2
    ),
}


def slice_of_host(host):
    return host // HOSTS_PER_SLICE


def run_cases(cases):
    """On one host: of each case, its shards of an epoch's batches, and which records it read."""
    with mock.patch(
        "grain_shard.sharding.slices.slice_of",
        lambda device: slice_of_host(device.process_index),
    ):
        return {name: run_case(case) for name, case in cases.items()}


def run_case(case):
    source = CountingSource(RECORDS)
    mesh = case.mesh(np.array(jax.devices()))
    in_use = mesh.axis_types[0] == AxisType.Explicit
    ds = grain.MapDataset.source(source).seed(3).shuffle().map(record).batch(ROWS)
    got = []
    with jax.set_mesh(mesh) if in_use else contextlib.nullcontext():
        sharded = ds.shard_to(mesh, case.spec, microbatches=case.microbatches, timeout_s=20)
        source.read.clear()
        with iter(sharded) as batches:
            for batch in batches:
                # Waited for: JAX's CPU backend deadlocks on many collectives in flight.
                jax.block_until_ready(batch)
                shards = {
                    name: [(shard.index, np.asarray(shard.data)) for shard in x.addressable_shards]
                    for name, x in batch.items()
                }
                got.append(shards)
    return {"batches": got, "read": read_for_batches(source.read, RECORDS)}


def record(i):
    return {"id": i, "x": np.arange(8, dtype=np.float32) + 10 * i}


@pytest.fixture(scope="module")
def runs():
    return rehearse.run(
        run_cases, CASES, hosts=HOSTS, devices_per_host=DEVICES_PER_HOST, timeout_s=200
    )


def plain_batches(case):
    """The batches of plain Grain, padded, and in microbatches."""
    ds = grain.MapDataset.range(RECORDS).seed(3).shuffle().map(lambda i: record(np.int32(i)))
    for batch in ds.batch(ROWS):
        count = len(batch["id"])
        batch["valid_mask"] = np.ones(count, np.bool_)
        yield {name: in_microbatches(padded(x), case) for name, x in batch.items()}


def padded(x):
    return np.concatenate([x, np.zeros((ROWS - len(x), *x.shape[1:]), x.dtype)])


def in_microbatches(x, case):
    return x if case.microbatches is None else x.reshape(case.microbatches, -1, *x.shape[1:])


@pytest.mark.parametrize("name", CASES)
def test_every_shard_is_that_of_plain_grain(runs, name):
    expected = list(plain_batches(CASES[name]))
    for of_host in runs:
        batches = of_host[name]["batches"]
        assert len(batches) == len(expected)
        for batch, plain in zip(batches, expected, strict=True):
            assert set(batch) == set(plain)
            for leaf, shards in batch.items():
                for index, data in shards:
                    np.testing.assert_array_equal(data, plain[leaf][index], leaf)


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_read_once_in_each_slice_that_needs_it(runs, name):
    case = CASES[name]
    of_slices = [Counter() for _ in range(SLICES)]
    for host, of_host in enumerate(runs):
        of_slices[slice_of_host(host)].update(of_host[name]["read"])
    for read in of_slices:
        # A host whose rows of a batch are all padding looks at one record, once.
        once = Counter(read.keys())
        assert (read - once).total() <= HOSTS_PER_SLICE
    assert set().union(*of_slices) == set(range(RECORDS))
    assert sum(len(read) for read in of_slices) in range(
        case.amplification * RECORDS, case.amplification * RECORDS + HOSTS + 1
    )
    shares = [len(of_host[name]["read"]) for of_host in runs]
    assert max(shares) <= case.amplification * 3 * ROWS // HOSTS


@pytest.mark.parametrize("name", CASES)
def test_the_plan_says_so(runs, name):
    case = CASES[name]
    devices = [
        Device(i, i // DEVICES_PER_HOST, slice_of_host(i // DEVICES_PER_HOST))
        for i in range(HOSTS * DEVICES_PER_HOST)
    ]
    planned = grain_shard.plan(
        case.mesh(np.array(devices)),
        case.spec,
        global_batch_size=ROWS,
        num_records=RECORDS,
        microbatches=case.microbatches,
    )
    assert planned.read == "once"
    assert planned.reads.amplification == case.amplification
    for host, of_host in zip(planned.reads.hosts, runs, strict=True):
        assert 0 <= len(of_host[name]["read"]) - host.rows_per_epoch <= 1
