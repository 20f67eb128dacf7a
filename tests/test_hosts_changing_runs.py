"""On several hosts: mixtures, schedules, epochs, loaders and pad values.

The functions named ``case_...`` run on 2 and on 4 hosts, one after the other in one set of
processes for each, and return what the tests look at.
"""

import collections
import functools
import itertools
import json

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import BatchSchedule, from_iterable, rehearse
from tests.conftest import HOSTS_S
from tests.on_hosts import assembled_batches, cases_of, data_mesh, own_parts, run_cases
from tests.pipelines import IN_TURN, flat

pytestmark = [pytest.mark.slow, pytest.mark.long]

HOSTS = (2, 4)
NUM_DEVICES = 8
WEIGHTS = {0: [3, 1], 24: [1, 1], 40: [0, 1]}


# On the hosts.


def batches_of(ds):
    """This host's parts of every batch; or the text of the error."""
    try:
        with iter(ds) as iterator:
            return [own_parts(batch) for batch in iterator]
    except grain_shard.GrainShardError as error:
        return str(error)


def alone(batches):
    """The ids of every batch; of a dataset, by Grain alone."""
    return [np.asarray(batch["id"]).tolist() for batch in batches]


def mixture(weights):
    records = [
        grain.MapDataset.range(first, first + 40).seed(first).shuffle().map(lambda i: {"id": i})
        for first in (0, 1000)
    ]
    return grain_shard.mix(records, weights).batch(8)


def case_mixture_on_the_mesh_in_use(_):
    with jax.set_mesh(data_mesh()):
        return batches_of(mixture(WEIGHTS).shard_to(P("data"), timeout_s=60))


def case_mixture_with_other_weights_from_record_16_on(before):
    """From the state of the run before, whose weights were to stay; the first run saves it."""
    if before:
        state = before["case_mixture_with_other_weights_from_record_16_on"]
        ds = mixture({0: [3, 1], 16: [1, 3]}).shard_to(data_mesh(), timeout_s=60)
        with iter(ds) as iterator:
            iterator.set_state(state)
            return [own_parts(batch) for batch in iterator]
    with iter(mixture({0: [3, 1]}).shard_to(data_mesh(), timeout_s=60)) as iterator:
        next(iterator), next(iterator)
        return json.loads(json.dumps(iterator.get_state()))


def case_grains_loader_with_a_part_for_each_process(_):
    options = grain.sharding.ShardByJaxProcess()
    loader = grain.DataLoader(
        data_source=[{"id": np.int32(i)} for i in range(20)],
        sampler=grain.samplers.IndexSampler(20, options, num_epochs=1, shuffle=False),
        operations=[grain.transforms.Batch(8 // options.shard_count)],
        worker_count=0,
    )
    ds = from_iterable(loader, rows="local").shard_to(data_mesh(), timeout_s=60)
    with iter(ds) as iterator:
        first = own_parts(next(iterator))
        state = json.loads(json.dumps(iterator.get_state()))
    with iter(ds) as iterator:
        iterator.set_state(state)
        return [first, *(own_parts(batch) for batch in iterator)]


def whole_batches():
    for i in range(2):
        yield {"id": np.arange(8 - i, dtype=np.int32) + 10 * i}


def case_the_same_whole_batches(_):
    ds = from_iterable(whole_batches, rows="global")
    return batches_of(ds.shard_to(data_mesh(), timeout_s=60))


def case_the_same_rows_by_mistake(_):
    ds = from_iterable(whole_batches, rows="local")
    return batches_of(ds.shard_to(data_mesh(), timeout_s=60))


def case_prefetch_onto_several_hosts(_):
    prefetch = functools.partial(grain_shard.prefetch_to_device, device=data_mesh())
    refused = {}
    for name, source in {
        "generator": whole_batches(),
        "local": from_iterable(whole_batches, rows="local"),
        "dataset": mixture(WEIGHTS),
    }.items():
        with pytest.raises(grain_shard.ShardingError) as refusal:
            prefetch(source)
        refused[name] = str(refusal.value)
    (batch,) = prefetch(from_iterable([{"id": np.arange(8)}], rows="global"))
    _, parts = own_parts(batch)["id"]
    on_one = alone(prefetch(whole_batches(), device=jax.local_devices()[0]))
    return refused, [(rows.start, part.tolist()) for (rows,), part in parts], on_one


def case_pad_value_of_random_access(_):
    """10 records: of the second batch the last hosts have nothing but padding."""
    records = grain.MapDataset.range(10).map(lambda i: {"id": np.int32(i)}).batch(8)
    return batches_of(records.shard_to(data_mesh(), pad_value={"id": -1}, timeout_s=60))


def case_generators_that_end_at_different_times(_):
    """Of host h, h + 1 batches, whose numbers begin at 100 h."""
    rows, host = NUM_DEVICES // jax.process_count(), jax.process_index()
    firsts = [100 * host + i * rows for i in range(1 + host)]
    own = ({"id": np.arange(first, first + rows, dtype=np.int32)} for first in firsts)
    return batches_of(
        from_iterable(own, rows="local").shard_to(data_mesh(), pad_value=-1, timeout_s=60)
    )


def case_pad_value_of_feeds(_):
    """Feed f has f records; with 4 hosts the first has none from the start."""

    def make_feed(feed):
        first = 10 * feed.shard_index
        records = grain.MapDataset.range(first, first + 4).map(lambda i: {"id": np.int32(i)})
        return records.to_iter_dataset(IN_TURN).filter(lambda r: r["id"] % 10 < feed.shard_index)

    feeds = grain_shard.feeds(make_feed, num_feeds=4).batch(8)
    return batches_of(feeds.shard_to(data_mesh(), pad_value={"id": -1}, timeout_s=60))


SCHEDULE = {0: 12, 3: 32, 5: 20}


def records(num_records):
    numbers = grain.MapDataset.range(num_records).seed(5).shuffle()
    return numbers.map(lambda i: {"id": np.int32(i)})


def scheduled():
    return records(130).pipe(BatchSchedule(SCHEDULE)).repeat(2)


def mesh_with_models():
    """Rows over four devices; each is held by two, which may be of two hosts."""
    return Mesh(np.array(jax.devices()).reshape(2, 4).T, ("data", "model"))


def case_schedule(_):
    return {
        of_mesh.__name__: batches_of(scheduled().shard_to(of_mesh(), P("data"), timeout_s=60))
        for of_mesh in (data_mesh, mesh_with_models)
    }


def case_seek(_):
    with iter(scheduled().shard_to(data_mesh(), timeout_s=60)) as iterator:
        iterator.seek(6)
        rest = [own_parts(batch) for batch in iterator]
        iterator.seek(record=133)
        return {"step": rest, "record": [own_parts(batch) for batch in iterator]}


def case_epochs_of_which_one_is_left_early(_):
    with records(50).batch(16).shard_to(data_mesh(), timeout_s=60).epochs(3) as epochs:
        seen = {}
        for batches in epochs:
            some = itertools.islice(batches, 1 if batches.epoch == 1 else None)
            seen[batches.epoch, len(batches)] = [own_parts(batch) for batch in some]
        return seen


def parts():
    return grain_shard.split(records(100), [0.8, 0.2], seed=0)


def three_epochs():
    return parts()[0].seed(1).shuffle().batch(16).repeat(3)


def case_training_part_of_a_split(states):
    """By threads; and by a worker from the state in the second epoch, of another number of hosts.

    Returns all batches, the state after seven of them, and the batches after the state that was
    given.
    """
    with iter(three_epochs().shard_to(data_mesh(), timeout_s=60)) as iterator:
        batches = [own_parts(next(iterator)) for _ in range(7)]
        state = json.loads(json.dumps(iterator.get_state()))
        batches += [own_parts(batch) for batch in iterator]
    if not states:
        return batches, state, None
    ds = three_epochs().shard_to(data_mesh(), num_workers=1, timeout_s=60)
    with iter(ds) as iterator:
        iterator.set_state(states["case_training_part_of_a_split"][1])
        return batches, state, [own_parts(batch) for batch in iterator]


# Here.


@pytest.fixture(scope="module")
def runs():
    before, results, cases = None, {}, cases_of(globals())
    for hosts in HOSTS:
        sizes = {"hosts": hosts, "devices_per_host": NUM_DEVICES // hosts, "timeout_s": HOSTS_S}
        results[hosts] = rehearse.run(run_cases, cases, before, **sizes)
        before = results[hosts][0]
    return results


def of_case(of_hosts, name):
    results = [of_host[f"case_{name}"] for of_host in of_hosts]
    for result in results:
        assert "Traceback" not in str(result), result
    return results


@pytest.fixture(params=HOSTS, ids=lambda hosts: f"{hosts} hosts")
def case(runs, request):
    """From a case's name to what every host of a run returned."""
    return functools.partial(of_case, runs[request.param])


def joined(of_hosts):
    """The ids of every batch, of all hosts together; None for a row of padding."""
    return [
        np.where(batch["valid_mask"], batch["id"], None).tolist()
        for batch in assembled_batches(of_hosts)
    ]


def valid(of_hosts):
    """The ids of every batch without padding, of all hosts together."""
    return [batch["id"][batch["valid_mask"]].tolist() for batch in assembled_batches(of_hosts)]


def each_valid(of_hosts):
    """`valid` of each entry of dicts of batches."""
    return {key: valid([of_host[key] for of_host in of_hosts]) for key in of_hosts[0]}


def test_a_mixture_is_the_same_on_any_number_of_hosts_also_on_the_mesh_in_use(case):
    assert valid(case("mixture_on_the_mesh_in_use")) == alone(mixture(WEIGHTS))


def test_weights_change_where_another_number_of_hosts_goes_on(runs):
    of_hosts = of_case(runs[HOSTS[1]], "mixture_with_other_weights_from_record_16_on")
    assert valid(of_hosts) == alone(mixture({0: [3, 1], 16: [1, 3]}))[2:]


def test_a_part_of_a_split_holds_no_record_of_another_part_in_any_epoch(runs):
    held_out = [int(record["id"]) for record in parts()[1]]
    for hosts in HOSTS:
        of_hosts = of_case(runs[hosts], "training_part_of_a_split")
        batches = valid([result[0] for result in of_hosts])
        assert batches == alone(three_epochs())
        seen = collections.Counter(flat(batches))
        assert len(seen) == 80
        assert set(seen.values()) == {3}
        assert not seen.keys() & set(held_out)
    assert valid([result[2] for result in of_hosts]) == batches[7:]


def test_a_schedule_has_the_same_batches_on_any_hosts_and_mesh(case):
    assert [len(batch) for batch in alone(scheduled())[:7]] == [12, 12, 12, 32, 32, 20, 10]
    assert each_valid(case("schedule")) == {
        mesh: alone(scheduled()) for mesh in ("data_mesh", "mesh_with_models")
    }


def test_any_step_and_any_record_can_be_sought(case):
    found = each_valid(case("seek"))
    assert found["step"] == alone(scheduled())[6:]
    assert flat(found["record"]) == [int(one["id"]) for one in records(130).repeat(2)][133:]


def test_epochs_are_the_same_on_all_hosts(case):
    expected = alone(records(50).batch(16).repeat(3))
    assert each_valid(case("epochs_of_which_one_is_left_early")) == {
        (0, 4): expected[:4],
        (1, 4): expected[4:5],
        (2, 4): expected[8:],
    }


def test_a_loader_with_a_part_for_each_process_gives_every_record_once(case):
    batches = joined(case("grains_loader_with_a_part_for_each_process"))
    assert sorted(row for row in flat(batches) if row is not None) == list(range(20))
    assert {len(batch) for batch in batches} == {8}


def test_generators_that_end_at_different_times_end_together_with_the_pad_value(case):
    of_hosts = case("generators_that_end_at_different_times")
    assert {len(batches) for batches in of_hosts} == {len(of_hosts)}
    rows_each = NUM_DEVICES // len(of_hosts)
    batches = assembled_batches(of_hosts)
    for host in range(len(of_hosts)):
        own = slice(rows_each * host, rows_each * (host + 1))
        values = [batch["id"][own][batch["valid_mask"][own]].tolist() for batch in batches]
        assert flat(values) == [100 * host + i for i in range(rows_each * (host + 1))]
        for batch in batches[host + 1 :]:
            assert batch["id"][own].tolist() == [-1] * rows_each


def test_of_the_same_whole_batches_every_host_keeps_its_rows(case):
    assert joined(case("the_same_whole_batches")) == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [10, 11, 12, 13, 14, 15, 16, None],
    ]


def test_the_same_rows_by_mistake_are_found_out(case):
    for error in case("the_same_rows_by_mistake"):
        assert "hold different shards, but their pipelines yield the same rows" in error


def test_prefetch_to_device_refuses_what_could_lose_rows(case):
    of_hosts = case("prefetch_onto_several_hosts")
    each = NUM_DEVICES // len(of_hosts)
    for host, (refused, parts, on_one) in enumerate(of_hosts):
        assert 'from_iterable(source, rows="global")' in refused["generator"]
        assert "this generator may yield different batches" in refused["generator"]
        assert "data=8" in refused["generator"]
        assert "yields only a part of each batch" in refused["local"]
        assert "end the dataset with .shard_to(sharding)" in refused["dataset"]
        assert sorted(parts) == [(row, [row]) for row in range(each * host, each * (host + 1))]
        assert on_one == [list(range(8)), list(range(10, 17))]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("random_access", [list(range(8)), [8, 9, *[None] * 6]]),
        ("feeds", [[None, None, 10, None, 20, 21, 30, 31], [*[None] * 6, 32, None]]),
    ],
)
def test_the_pad_value_is_in_all_padding(case, kind, expected):
    of_hosts = case(f"pad_value_of_{kind}")
    assert joined(of_hosts) == expected
    assert alone(assembled_batches(of_hosts)) == [
        [-1 if row is None else row for row in batch] for batch in expected
    ]
