"""The same global batches on 1, 2 and 4 hosts, and what each host reads for them: C1, C2, C4, C5.

Every case runs on 8 devices, in real processes; each host returns the shards on its own devices.
Put together they have to be, bit for bit, what plain Grain makes in one process, with zero rows up
to the size of a padded batch.
"""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import grain
import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import hosts_mesh, rehearse
from tests.conftest import HOSTS_S
from tests.counting_source import Source
from tests.on_hosts import assembled, or_traceback, own_parts

pytestmark = pytest.mark.slow

HOSTS = (1, 2, 4)
NUM_DEVICES = 8


class EncodedSource(Source):
    def __getitem__(self, index):
        return (np.arange(8, dtype=np.int32) + 8 * super().__getitem__(index)).tobytes()


def decode(data):
    tokens = np.frombuffer(data, np.int32)
    record = int(tokens[0]) // 8
    return {"id": np.int32(record), "tokens": tokens, "name": f"record {record}"}


def augment(record, rng):
    return {**record, "noise": rng.normal(size=4).astype(np.float32)}


def records(source):
    return grain.MapDataset.source(source).seed(3).map(decode).random_map(augment)


def shape(sizes, names, **options):
    """Devices to a mesh of this shape; on H hosts, 8/H devices in a row are a host's."""
    return lambda devices: Mesh(devices.reshape(sizes), names, **options)


def permuted(devices):
    """No host's rows are contiguous: on 2 hosts they alternate."""
    return Mesh(devices[[7, 0, 5, 2, 3, 4, 1, 6]], ("data",))


DATA = P("data")
ONE_AXIS = shape((8,), ("data",))
MODEL_OVER_HOSTS = shape((2, 4), ("model", "data"))
EXPLICIT = shape((2, 4), ("model", "data"), axis_types=(AxisType.Explicit,) * 2)
SEQ = shape((2, 4), ("data", "seq"))
PER_LEAF = {"id": DATA, "tokens": P("data", "seq"), "noise": P(("data", "seq")), "name": DATA}
# The host of the devices with data=0 and seq=2, 3 holds the first half of the tokens, and the
# second half of the ids.
ACROSS = {"id": P("seq"), "tokens": P("data"), "noise": P(), "name": P("data")}


@dataclasses.dataclass(frozen=True)
class Case:
    mesh: Callable[[np.ndarray], Mesh] = ONE_AXIS
    spec: Any = DATA
    num_records: int = 22
    batched: Callable[[grain.MapDataset], Any] = lambda ds: ds.batch(8)
    rows: int = 8  # of a padded batch
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    reads_whole: bool = False  # whole batches, because rows cannot be read alone


CASES = {
    "1-D": Case(),
    "permuted": Case(permuted),
    "(data, model)": Case(shape((4, 2), ("data", "model"))),
    "(model, data)": Case(MODEL_OVER_HOSTS),
    "(data, model), model over hosts": Case(
        lambda devices: Mesh(devices.reshape(2, 4).T, ("data", "model"))
    ),
    "P((data, fsdp))": Case(shape((2, 4), ("data", "fsdp")), P(("data", "fsdp"))),
    "P((fsdp, data))": Case(shape((2, 4), ("data", "fsdp")), P(("fsdp", "data"))),
    "sequence axis": Case(SEQ, P("data", "seq")),
    "sequence axis alone": Case(
        shape((8,), ("seq",)), {"id": P(), "tokens": P(None, "seq"), "noise": P(), "name": P()}
    ),
    "replicated": Case(spec=P()),
    "Explicit axes": Case(EXPLICIT),
    "jax.make_mesh": Case(lambda devices: jax.make_mesh((8,), ("data",), devices=list(devices))),
    "a spec for each leaf": Case(SEQ, PER_LEAF),
    "leaves cut by different axes": Case(SEQ, {**ACROSS, "noise": P("data")}),
    "a replicated leaf": Case(SEQ, ACROSS),
    "B not divisible by the shards": Case(
        batched=lambda ds: ds.batch(6), options={"num_threads": 4}
    ),
    "N < B": Case(num_records=5, batched=lambda ds: ds.batch(16), rows=16),
    "22 records, B=4, 4 shards": Case(
        lambda devices: Mesh(devices[::2], ("data",)), batched=lambda ds: ds.batch(4), rows=4
    ),
    "shuffle, repeat": Case(batched=lambda ds: ds.shuffle(seed=7).repeat(2).batch(8)),
    "batch, repeat": Case(permuted, batched=lambda ds: ds.shuffle(seed=7).batch(8).repeat(2)),
    "drop": Case(options={"remainder": "drop"}),
    "to_iter_dataset()": Case(batched=lambda ds: ds.batch(8).to_iter_dataset()),
    "to_iter_dataset(options)": Case(
        MODEL_OVER_HOSTS,
        batched=lambda ds: ds.shuffle(seed=7).batch(8).to_iter_dataset(grain.ReadOptions(1, 2)),
    ),
    "a map after batch": Case(
        batched=lambda ds: ds.batch(8).map(lambda batch: {**batch, "tokens": 2 * batch["tokens"]}),
        reads_whole=True,
    ),
}
# On the hosts.


def run_cases(cases):
    """What this host got and read in each case; the traceback of one that failed."""
    devices = np.array(jax.devices())
    return {name: or_traceback(run_case, case, devices) for name, case in cases.items()}


def run_case(case, devices):
    source, mesh = EncodedSource(case.num_records), case.mesh(devices)
    sharded = case.batched(records(source)).shard_to(mesh, case.spec, timeout_s=60, **case.options)
    source.requests.clear()  # what was looked at when the pipeline was built
    batches, names, states = [], [], []
    with iter(sharded) as iterator:
        for batch in iterator:
            names.append(batch.pop("name").tolist())
            batches.append(own_parts(batch))
            states.append(json.dumps(iterator.get_state()))
            for leaf in set(batch) - {"valid_mask"}:
                spec, array = case.spec, batch[leaf]
                spec = spec[leaf] if isinstance(spec, Mapping) else spec
                expected = NamedSharding(mesh, P(*spec[: array.ndim]))
                assert array.sharding.is_equivalent_to(expected, array.ndim), (leaf, array.sharding)
    read = source.read_for_batches()
    return {
        "batches": batches,
        "names": names,
        "states": states,
        "read": read,
        "host_rows": list(sharded.host_rows()),
        "length": len(sharded),
    }


@pytest.fixture(scope="module")
def runs():
    """By number of hosts, what each host returned for each case."""
    return {
        hosts: rehearse.run(
            run_cases, CASES, hosts=hosts, devices_per_host=NUM_DEVICES // hosts, timeout_s=HOSTS_S
        )
        for hosts in HOSTS
    }


def of_each_host_count(runs, name):
    """(number of hosts, what each of them returned for one case)."""
    for hosts, of_hosts in runs.items():
        results = [of_host[name] for of_host in of_hosts]
        for host, result in enumerate(results):
            assert not isinstance(result, str), f"host {host} of {hosts}: {result}"
        yield hosts, results


every_case = pytest.mark.parametrize("name", CASES)


# What is expected, from plain Grain.


def expected_batches(case):
    batches = list(case.batched(records(EncodedSource(case.num_records))))
    if case.options.get("remainder") == "drop":
        batches.pop()
    return [padded(batch, case.rows) for batch in batches]


def expected_ids(case):
    return [batch["id"][batch["valid_mask"]].tolist() for batch in expected_batches(case)]


def padded(batch, rows):
    missing = rows - len(batch["id"])
    batch = {
        name: np.concatenate([leaf, np.zeros((missing, *leaf.shape[1:]), leaf.dtype)])
        for name, leaf in batch.items()
    }
    return {**batch, "valid_mask": np.arange(rows) < rows - missing}


def held_rows(batch, num_rows):
    """The rows of a batch that a host's devices hold a part of."""
    rows = [
        np.arange(num_rows)[index[0]]
        for name, leaf in batch.items()
        if name != "valid_mask"
        for index, _ in leaf[1]
    ]
    return np.unique(np.concatenate(rows))


@every_case
def test_the_global_batches_are_those_of_plain_grain_bit_for_bit(runs, name):
    expected = expected_batches(CASES[name])
    for hosts, results in of_each_host_count(runs, name):
        assert [len(result["batches"]) for result in results] == [len(expected)] * hosts
        assert [result["length"] for result in results] == [len(expected)] * hosts
        for k, batch in enumerate(expected):
            found = assembled([result["batches"][k] for result in results])
            assert {*found, "name"} == set(batch)
            for leaf, array in found.items():
                np.testing.assert_array_equal(array, batch[leaf], f"{leaf} {k}, {hosts} hosts")
                assert (array.dtype, array.tobytes()) == (batch[leaf].dtype, batch[leaf].tobytes())


@every_case
def test_a_host_reads_what_its_devices_hold(runs, name):
    case = CASES[name]
    ids = expected_ids(case)
    for _, results in of_each_host_count(runs, name):
        for result in results:
            of_host, needed, some_batch_is_padding = Counter(result["read"]), Counter(), False
            for batch, of_batch in zip(result["batches"], ids, strict=True):
                rows = np.arange(case.rows) if case.reads_whole else held_rows(batch, case.rows)
                held = [of_batch[row] for row in rows if row < len(of_batch)]
                needed.update(held)
                some_batch_is_padding |= not held
            assert of_host >= needed
            for_the_structure = of_host - needed
            assert for_the_structure in (Counter(), Counter([ids[0][0]]))
            assert some_batch_is_padding or not for_the_structure


# The other cases have their records in another order, or batches that are not those of `.batch`.
PLANNED = CASES.keys() - {
    "shuffle, repeat",
    "batch, repeat",
    "to_iter_dataset()",
    "to_iter_dataset(options)",
    "a map after batch",
}


@pytest.mark.parametrize("name", sorted(PLANNED))
def test_hosts_read_what_the_plan_says(runs, name):
    """Every record that a host reads is one that the plan says, and the reverse."""
    case = CASES[name]
    (first, *_), sizes = expected_ids(case), {"num_records": case.num_records}
    sizes["global_batch_size"] = len(first) if case.num_records > len(first) else case.rows
    options = {key: case.options[key] for key in case.options.keys() & {"remainder"}}
    for hosts, results in of_each_host_count(runs, name):
        stand_ins = hosts_mesh({"all": 8}, hosts=hosts, devices_per_host=NUM_DEVICES // hosts)
        plan = grain_shard.plan(case.mesh(stand_ins.devices), case.spec, **sizes, **options)
        for host, result in enumerate(results):
            steps = [plan.records(host, step).tolist() for step in range(plan.steps_per_epoch)]
            planned, read = Counter(itertools.chain(*steps)), Counter(result["read"])
            if not all(steps):  # a host with padding alone looks at one record, once
                assert (read - planned) in (Counter(), Counter([0]))
                read -= read - planned
            assert read == planned
            reads = plan.reads.hosts[host]
            assert (reads.host, reads.rows_per_epoch) == (host, read.total())
            assert case.num_records < case.rows or reads.rows_per_step == len(steps[0])
            assert len(result["batches"]) == plan.steps_per_epoch
            for batch in result["batches"]:
                assert {shape[0] for shape, _ in batch.values()} == {plan.reads.padded_batch_size}
                rows = [len(part) for _, parts in batch.values() for _, part in parts]
                assert min(rows) == plan.rows_per_device


@every_case
def test_the_state_is_the_same_on_every_host_of_every_run_and_small(runs, name):
    of_all = [result for _, results in of_each_host_count(runs, name) for result in results]
    (states,) = {tuple(result["states"]) for result in of_all}
    for k, state in enumerate(states):
        assert json.loads(state)["step"] == k + 1
        assert len(state) < 200


@every_case
def test_host_rows_are_the_rows_of_the_devices_of_the_host_as_numpy_arrays(runs, name):
    expected = expected_batches(CASES[name])
    for _, results in of_each_host_count(runs, name):
        for result in results:
            for k, (found, batch) in enumerate(zip(result["host_rows"], expected, strict=True)):
                rows = held_rows(result["batches"][k], CASES[name].rows)
                for leaf, array in found.items():
                    held = batch[leaf][rows]
                    assert type(array) is np.ndarray
                    is_numbers = leaf != "name"  # texts may be of another width
                    np.testing.assert_array_equal(array, held, f"{leaf} {k}", strict=is_numbers)


@every_case
def test_text_stays_on_the_host_as_the_rows_that_it_read(runs, name):
    case = CASES[name]
    expected = expected_batches(case)
    for _, results in of_each_host_count(runs, name):
        for k, batch in enumerate(expected):
            names = [result["names"][k] for result in results]
            held = [held_rows(result["batches"][k], case.rows) for result in results]
            assert names == [batch["name"][rows].tolist() for rows in held]
