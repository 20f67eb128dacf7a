"""On several hosts: mixtures, loaders, the mesh in use and pad values.

The functions named ``case_...`` run on 2 and on 4 hosts, one after the other in one set of
processes for each, and return what the tests look at.
"""

import json

import grain
import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import from_iterable, rehearse
from tests.on_hosts import cases_of, data_mesh, run_cases

pytestmark = pytest.mark.slow

HOSTS = (2, 4)
NUM_DEVICES = 8
WEIGHTS = {0: [3, 1], 24: [1, 1], 40: [0, 1]}


# On the hosts.


def rows_of(batch, key="id"):
    """The rows of a leaf that this host's devices hold, by row: its value, and if it is valid."""
    rows = {}
    shards = zip(batch[key].addressable_shards, batch["valid_mask"].addressable_shards, strict=True)
    for values, mask in shards:
        start = values.index[0].start or 0
        for row, (value, valid) in enumerate(
            zip(np.asarray(values.data).tolist(), np.asarray(mask.data).tolist(), strict=True)
        ):
            rows[start + row] = (value, valid)
    return rows


def batches_of(ds):
    """The rows of every batch; or the text of the error."""
    try:
        with iter(ds) as iterator:
            return [rows_of(batch) for batch in iterator]
    except grain_shard.GrainShardError as error:
        return str(error)


def refusal(call):
    with pytest.raises(grain_shard.ShardingError) as caught:
        call()
    return str(caught.value)


def mixture(weights):
    records = [
        grain.MapDataset.range(first, first + 40).seed(first).shuffle().map(lambda i: {"id": i})
        for first in (0, 1000)
    ]
    return grain_shard.mix(records, weights).batch(8)


def case_mixture(_):
    return batches_of(mixture(WEIGHTS).shard_to(data_mesh(), timeout_s=20))


def case_mixture_with_other_weights_from_record_16_on(states):
    """Saved on the hosts of the run before, by weights that were to stay; "" in the first run."""
    if states:
        iterator = iter(mixture({0: [3, 1], 16: [1, 3]}).shard_to(data_mesh(), timeout_s=20))
        with iterator:
            iterator.set_state(states["mixture"])
            return [rows_of(batch) for batch in iterator]
    with iter(mixture({0: [3, 1]}).shard_to(data_mesh(), timeout_s=20)) as iterator:
        next(iterator), next(iterator)
        return json.loads(json.dumps(iterator.get_state()))


def case_mixture_in_feeds(_):
    def make_feed(feed):
        part = slice(feed.shard_index, None, feed.shard_count)
        datasets = [
            grain.MapDataset.range(first, first + 40).map(lambda i: {"id": i})[part]
            for first in (0, 1000)
        ]
        ds = grain_shard.mix(datasets, {0: [3, 1], 4: [1, 3]})
        return ds.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))

    feeds = grain_shard.feeds(make_feed, num_feeds=4).batch(16)
    return batches_of(feeds.shard_to(data_mesh(), timeout_s=20))


def case_mesh_in_use(_):
    with jax.set_mesh(data_mesh()):
        return batches_of(mixture(WEIGHTS).shard_to(P("data"), timeout_s=20))


class Records:
    def __len__(self):
        return 20

    def __getitem__(self, index):
        return {"id": np.int32(index)}


def case_grains_loader_with_a_part_for_each_process(_):
    options = grain.sharding.ShardByJaxProcess()
    loader = grain.DataLoader(
        data_source=Records(),
        sampler=grain.samplers.IndexSampler(20, options, num_epochs=1, shuffle=False),
        operations=[grain.transforms.Batch(8 // options.shard_count)],
        worker_count=0,
    )
    ds = from_iterable(loader, rows="local").shard_to(data_mesh(), timeout_s=20)
    with iter(ds) as iterator:
        first = rows_of(next(iterator))
        state = json.loads(json.dumps(iterator.get_state()))
    with iter(ds) as iterator:
        iterator.set_state(state)
        return [first, *(rows_of(batch) for batch in iterator)]


def own_batches(num_batches):
    """Batches of this host's own, numbered by host: 100, 101, ... on host 1."""
    rows = NUM_DEVICES // jax.process_count()
    first = 100 * jax.process_index()
    for i in range(num_batches):
        yield {"id": np.arange(rows, dtype=np.int32) + first + i * rows}


def whole_batches():
    for i in range(2):
        yield {"id": np.arange(8 - i, dtype=np.int32) + 10 * i}


def case_the_same_whole_batches(_):
    ds = from_iterable(whole_batches, rows="global")
    return batches_of(ds.shard_to(data_mesh(), timeout_s=20))


def case_the_same_rows_by_mistake(_):
    ds = from_iterable(whole_batches, rows="local")
    return batches_of(ds.shard_to(data_mesh(), timeout_s=20))


def case_different_batches_by_mistake(_):
    ds = from_iterable(lambda: own_batches(2), rows="global")
    mesh = Mesh(np.array(jax.devices()[:: NUM_DEVICES // jax.process_count()]), ("data",))
    return batches_of(ds.shard_to(mesh, timeout_s=20))


def case_prefetch_onto_several_hosts(_):
    mesh, own = data_mesh(), jax.local_devices()[0]
    refused = {
        "generator": refusal(lambda: grain_shard.prefetch_to_device(whole_batches(), device=mesh)),
        "local": refusal(
            lambda: grain_shard.prefetch_to_device(
                from_iterable(whole_batches, rows="local"), device=mesh
            )
        ),
        "dataset": refusal(
            lambda: grain_shard.prefetch_to_device(mixture(WEIGHTS), device=mesh),
        ),
    }
    said = from_iterable([{"id": np.arange(8)}], rows="global")
    (batch,) = grain_shard.prefetch_to_device(said, device=mesh)
    shards = {
        shard.index[0].start: np.asarray(shard.data).tolist()
        for shard in batch["id"].addressable_shards
    }
    on_one = [b["id"].tolist() for b in grain_shard.prefetch_to_device(whole_batches(), device=own)]
    return refused, shards, on_one


def case_pad_value_of_random_access(_):
    """10 records: of the second batch the last hosts have nothing but padding."""
    records = grain.MapDataset.range(10).map(lambda i: {"id": np.int32(i)}).batch(8)
    return batches_of(records.shard_to(data_mesh(), pad_value={"id": -1}, timeout_s=20))


def case_generators_that_end_at_different_times(_):
    ds = from_iterable(own_batches(1 + jax.process_index()), rows="local")
    return batches_of(ds.shard_to(data_mesh(), pad_value=-1, timeout_s=20))


def case_pad_value_of_feeds(_):
    """Feed f has f records; with 4 hosts the first has none from the start."""

    def make_feed(feed):
        first = 10 * feed.shard_index
        records = grain.MapDataset.range(first, first + 4).map(lambda i: {"id": np.int32(i)})
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        return records.to_iter_dataset(options).filter(lambda r: r["id"] % 10 < feed.shard_index)

    feeds = grain_shard.feeds(make_feed, num_feeds=4).batch(8)
    return batches_of(feeds.shard_to(data_mesh(), pad_value={"id": -1}, timeout_s=20))


# Here.


@pytest.fixture(scope="module")
def runs():
    states, results = None, {}
    for hosts in HOSTS:
        results[hosts] = rehearse.run(
            run_cases,
            cases_of(globals()),
            states,
            hosts=hosts,
            devices_per_host=NUM_DEVICES // hosts,
            timeout_s=150,
        )
        states = {"mixture": results[hosts][0]["case_mixture_with_other_weights_from_record_16_on"]}
    return results


@pytest.fixture(params=HOSTS)
def case(runs, request):
    """From a case's name to what every host of a run returned."""

    def results(name):
        of_hosts = [of_host[f"case_{name}"] for of_host in runs[request.param]]
        for result in of_hosts:
            assert "Traceback" not in str(result), result
        return of_hosts

    return results


def joined(of_hosts):
    """The rows of every batch, in order, of all hosts together; None for a row of padding."""
    batches = []
    for parts in zip(*of_hosts, strict=True):
        rows = {row: value for part in parts for row, value in part.items()}
        assert sorted(rows) == list(range(len(rows)))
        batches.append([value if valid else None for _, (value, valid) in sorted(rows.items())])
    return batches


def alone(ds):
    """The same of a dataset of batches, by Grain alone; the last batch filled up."""
    batches = [np.asarray(ds[i]["id"]).tolist() for i in range(len(ds))]
    return [batch + [None] * (len(batches[0]) - len(batch)) for batch in batches]


def test_a_mixture_is_the_same_on_any_number_of_hosts(case):
    assert joined(case("mixture")) == alone(mixture(WEIGHTS))


def test_weights_change_where_another_number_of_hosts_goes_on(runs):
    of_hosts = [
        of_host["case_mixture_with_other_weights_from_record_16_on"] for of_host in runs[HOSTS[1]]
    ]
    assert "Traceback" not in str(of_hosts)
    assert joined(of_hosts) == alone(mixture({0: [3, 1], 16: [1, 3]}))[2:]


def test_a_mixture_in_feeds_is_the_same_on_any_number_of_hosts(case):
    batches = joined(case("mixture_in_feeds"))
    # Of each of 4 feeds 4 rows: first 3 to 1, then 1 to 3.
    assert batches[0][:4] == [0, 4, 1000, 8]
    assert batches[1][:4] == [1004, 12, 1008, 1012]
    assert batches[0][12:] == [3, 7, 1003, 11]
    rows = [row for batch in batches for row in batch if row is not None]
    assert len(rows) == len(set(rows))


def test_the_mesh_in_use_may_span_hosts(case):
    assert joined(case("mesh_in_use")) == alone(mixture(WEIGHTS))


def test_a_loader_with_a_part_for_each_process_gives_every_record_once(case):
    batches = joined(case("grains_loader_with_a_part_for_each_process"))
    rows = [row for batch in batches for row in batch if row is not None]
    assert sorted(rows) == list(range(20))
    assert {len(batch) for batch in batches} == {8}


def test_generators_that_end_at_different_times_end_together_with_the_pad_value(case):
    of_hosts = case("generators_that_end_at_different_times")
    assert {len(batches) for batches in of_hosts} == {len(of_hosts)}
    rows_each = NUM_DEVICES // len(of_hosts)
    for host, batches in enumerate(of_hosts):
        values = [value for batch in batches for value, valid in batch.values() if valid]
        assert values == [100 * host + i for i in range(rows_each * (host + 1))]
        for batch in batches[host + 1 :]:
            assert set(batch.values()) == {(-1, False)}


def test_of_the_same_whole_batches_every_host_keeps_its_rows(case):
    assert joined(case("the_same_whole_batches")) == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [10, 11, 12, 13, 14, 15, 16, None],
    ]


def test_the_same_rows_by_mistake_are_found_out(case):
    for error in case("the_same_rows_by_mistake"):
        assert "hold different shards, but their pipelines yield the same rows" in error


def test_different_batches_by_mistake_are_found_out(case):
    for error in case("different_batches_by_mistake"):
        assert 'rows="global" every host must produce the same batches' in error


def test_prefetch_to_device_refuses_what_could_lose_rows(case):
    for host, (refused, shards, on_one) in enumerate(case("prefetch_onto_several_hosts")):
        assert 'from_iterable(source, rows="global")' in refused["generator"]
        assert "this generator may yield different batches" in refused["generator"]
        assert "data=8" in refused["generator"]
        assert "yields only a part of each batch" in refused["local"]
        assert "end the dataset with .shard_to(sharding)" in refused["dataset"]
        each = NUM_DEVICES // len(case("prefetch_onto_several_hosts"))
        assert shards == {row: [row] for row in range(each * host, each * (host + 1))}
        assert on_one == [list(range(8)), list(range(10, 17))]


def rows_with_padding(of_hosts):
    """The same as `joined`, with what rows of padding hold."""
    return [
        [value for part in parts for _, (value, _) in sorted(part.items())]
        for parts in zip(*of_hosts, strict=True)
    ]


def test_the_pad_value_is_in_hosts_that_hold_nothing_else(case):
    of_hosts = case("pad_value_of_random_access")
    assert joined(of_hosts) == [list(range(8)), [8, 9, *[None] * 6]]
    assert rows_with_padding(of_hosts) == [list(range(8)), [8, 9, *[-1] * 6]]


def test_the_pad_value_is_in_the_rows_of_feeds_that_have_ended(case):
    of_hosts = case("pad_value_of_feeds")
    assert rows_with_padding(of_hosts) == [
        [-1, -1, 10, -1, 20, 21, 30, 31],
        [-1, -1, -1, -1, -1, -1, 32, -1],
    ]
    assert joined(of_hosts) == [
        [None, None, 10, None, 20, 21, 30, 31],
        [None, None, None, None, None, None, 32, None],
    ]
