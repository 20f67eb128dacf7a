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
from tests.counting_source import Source
from tests.on_hosts import assembled_batches, own_parts
from tests.test_hosts_same_batches import padded
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
        "grain_shard.sharding.slices.slice_of", lambda device: slice_of_host(device.process_index)
    ):
        return {name: run_case(case) for name, case in cases.items()}


def run_case(case):
    source = Source(RECORDS)
    mesh = case.mesh(np.array(jax.devices()))
    in_use = mesh.axis_types[0] == AxisType.Explicit
    ds = grain.MapDataset.source(source).seed(3).shuffle().map(record).batch(ROWS)
    got = []
    with jax.set_mesh(mesh) if in_use else contextlib.nullcontext():
        sharded = ds.shard_to(mesh, case.spec, microbatches=case.microbatches, timeout_s=20)
        source.requests.clear()
        with iter(sharded) as batches:
            for batch in batches:
                # Waited for: JAX's CPU backend deadlocks on many collectives in flight.
                jax.block_until_ready(batch)
                got.append(own_parts(batch))
    return {"batches": got, "read": source.read_for_batches()}


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
        batch = padded(batch, ROWS)
        if case.microbatches is not None:
            for name, x in batch.items():
                batch[name] = x.reshape(case.microbatches, -1, *x.shape[1:])
        yield batch


@pytest.mark.parametrize("name", CASES)
def test_every_shard_is_that_of_plain_grain(runs, name):
    batches = assembled_batches([of_host[name]["batches"] for of_host in runs])
    for batch, plain in zip(batches, plain_batches(CASES[name]), strict=True):
        assert set(batch) == set(plain)
        for leaf, array in batch.items():
            np.testing.assert_array_equal(array, plain[leaf], leaf)


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_read_once_in_each_slice_that_needs_it_as_the_plan_says(runs, name):
    case, reads = CASES[name], [Counter(of_host[name]["read"]) for of_host in runs]
    for first in range(0, HOSTS, HOSTS_PER_SLICE):
        of_slice = sum(reads[first : first + HOSTS_PER_SLICE], Counter())
        # A host whose rows of a batch are all padding looks at one record, once.
        assert (of_slice - Counter(of_slice.keys())).total() <= HOSTS_PER_SLICE
    assert set().union(*reads) == set(range(RECORDS))
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
    assert (planned.read, planned.reads.amplification) == ("once", case.amplification)
    rows = [host.rows_per_epoch for host in planned.reads.hosts]
    assert sum(rows) == case.amplification * RECORDS
    assert max(rows) <= case.amplification * 3 * ROWS // HOSTS
    for read, planned_rows in zip(reads, rows, strict=True):
        assert 0 <= read.total() - planned_rows <= 1
