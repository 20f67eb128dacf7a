"""The start-up agreement: hosts that do not run the same program are named, on every host: C7.

The functions named ``case_...`` run on four hosts, one after the other in one set of processes, so
each of them also shows that the failures before it did no lasting harm.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import threading
import time
import warnings
from pathlib import Path
from unittest import mock

import grain
import jax
import numpy as np
import pytest
from array_record.python import array_record_module
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import grain_shard
from grain_shard import rehearse
from grain_shard.hosts import rounds
from grain_shard.iteration.iterator import state_writer
from tests.conftest import HOSTS_S, eventually
from tests.counting_source import Source, bad
from tests.on_hosts import cases_of, meet, or_traceback, own_rows
from tests.pipelines import shared_out

pytestmark = [pytest.mark.slow, pytest.mark.long]

HOSTS = 4
ODD = 2  # the host that differs


# On the hosts.


def run_cases(cases, directory):
    """What this host returned in each case; the traceback of one that failed."""
    rounds._GRACE_S = 2.0  # after timeout_s, for a first host that is late
    results = {}
    for case in cases:
        # Some cases end by a timeout of 2 s, of which a host that begins late would have less.
        meet(f"begin {case.__name__}")
        results[case.__name__] = or_traceback(case, jax.process_index(), Path(directory))
    return results


def mesh_of(devices, sizes=(8,), names=("data",)):
    return Mesh(np.array(devices).reshape(sizes), names)


def numbered(num_records=22, width=3, dtype=np.float32):
    return grain.MapDataset.range(num_records).map(
        lambda i: {"id": np.int32(i), "x": np.full(width, i, dtype)}
    )


def shard(ds, mesh=None, spec=None, **options):
    return iter(ds.shard_to(mesh or mesh_of(jax.devices()), spec, **{"timeout_s": 60, **options}))


def first_batch(iterator):
    """How the first batch is refused."""
    with iterator if hasattr(iterator, "close") else contextlib.nullcontext():
        try:
            next(iterator)
        except Exception as error:
            result = {"type": type(error).__name__, "text": str(error)}
            try:
                next(iterator)
            except Exception as again:
                return {**result, "same error again": again is error}
    return None


def own_ids(batch):
    """The ids of the valid rows on this host's devices."""
    return list(own_rows(batch).values())


def decode(data):
    return {"id": np.frombuffer(data, np.int32, 1)[0]}


def shuffled(odd):
    return numbered().seed(7 if odd else 1).shuffle()


def started_ahead(iterator):
    iterator.start_prefetch()
    return iterator


def at_step(iterator, step=None, **place):
    """The iterator at a place; at step 0 nothing is sought, as by all but the odd host."""
    if step != 0:
        iterator.seek(step, **place)
    return iterator


def of_files(directory, names):
    source = grain_shard.ArrayRecordSource([str(directory / name) for name in names])
    return grain.MapDataset.source(source).map(decode).batch(8)


def of_records(ds, mesh=None, **options):
    return shard(ds.batch(16), mesh, **options)


def stream(ds):
    return ds.to_iter_dataset().batch(8)


def on_two_axes(sizes, spec=None):
    mesh = mesh_of(jax.devices(), sizes, ("data", "model"))
    return shard(numbered().batch(8), mesh, spec)


def with_more(odd):
    return numbered().map(lambda record: {**record, "extra": np.int32(0)} if odd else record)


# By the field that differs, and in what: a host's iterator, by whether it is the odd one, and the
# folder.
DIFFERENCES = {
    "seeds": lambda odd, _: shard(shuffled(odd).batch(8)),
    "seeds: when started ahead": lambda odd, _: started_ahead(shard(shuffled(odd).batch(8))),
    "source: files": lambda odd, at: shard(of_files(at, "ac" if odd else "ab")),
    "source: order of files": lambda odd, at: shard(of_files(at, "ba" if odd else "ab")),
    "records": lambda odd, at: shard(of_files(at, "a" if odd else "ab")),
    "global_batch_size": lambda odd, _: shard(numbered().batch(16 if odd else 8)),
    "transforms": lambda odd, _: of_records(numbered().map(dict) if odd else numbered()),
    "specs": lambda odd, _: on_two_axes((4, 2), P(("data", "model")) if odd else None),
    "mesh": lambda odd, _: on_two_axes((2, 4) if odd else (4, 2)),
    "devices": lambda odd, _: of_records(numbered(), mesh_of(jax.devices()[:: -1 if odd else 1])),
    "remainder": lambda odd, _: of_records(numbered(), remainder="drop" if odd else "pad"),
    "remainder: of a stream": lambda odd, _: shard(
        stream(numbered()), rows="global", remainder="drop" if odd else "pad"
    ),
    "pad_value": lambda odd, _: of_records(numbered(), pad_value=-1 if odd else 0),
    "rows": lambda odd, _: shard(stream(numbered()), rows="local" if odd else "global"),
    'first batch of rows="global"': lambda odd, _: shard(stream(shuffled(odd)), rows="global"),
    "next batch": lambda odd, _: at_step(of_records(numbered()), int(odd)),
    "batch['x']: shape": lambda odd, _: of_records(numbered(width=4 if odd else 3)),
    "batch['x']: dtype": lambda odd, _: of_records(numbered(dtype=np.int32 if odd else np.float32)),
    "batch['extra']": lambda odd, _: of_records(with_more(odd)),
    "batches": lambda odd, _: at_step(of_records(numbered()), 2 if odd else 0),
    "next record": lambda odd, _: at_step(of_records(numbered()), record=16 + odd),
    "global_batch_size: later": lambda odd, _: shard(
        numbered().pipe(grain_shard.BatchSchedule({0: 16, 100: 64 if odd else 32}))
    ),
    "epochs": lambda odd, _: next(
        numbered().batch(16).shard_to(mesh_of(jax.devices()), timeout_s=60).epochs(2 + odd)
    ),
    "weights": lambda odd, _: of_records(
        grain_shard.mix([numbered()] * 2, {0: [3, 1], **({10_000: [1, 1]} if odd else {})})
    ),
    "num_feeds": lambda odd, _: shard(shared_out(numbered(), 8 if odd else 4, 16)),
}
# By the same name, what the hosts say of the field, where that is short.
SAID = {
    "records": ("22", "11"),
    "global_batch_size": ("8", "16"),
    "specs": (json.dumps([str(P("data"))]), json.dumps([str(P(("data", "model")))])),
    "mesh": ('[["data", 4], ["model", 2]]', '[["data", 2], ["model", 4]]'),
    "remainder": ('"pad"', '"drop"'),
    "remainder: of a stream": ('"pad"', '"drop"'),
    "pad_value": ('"0"', '"-1"'),
    "rows": ('"global"', '"local"'),
    "next batch": ("0", "1"),
    "batch['extra']": ("nothing", None),
    "batches": ("nothing", '"none left"'),
    "next record": ('"16 of epoch 0"', '"17 of epoch 0"'),
    "epochs": ("2", "3"),
    "num_feeds": ("4", "8"),
}


def logged():
    """A list of the lines of the log from now on."""
    lines = []
    logging.getLogger("absl").addFilter(lambda line: lines.append(line.getMessage()) or True)
    return lines


def case_differences(host, directory):
    """By the name of each difference, how the host is refused."""
    return {name: first_batch(make(host == ODD, directory)) for name, make in DIFFERENCES.items()}


class Files:
    """Ten records a file; the files are in this order, and records end as `end` says."""

    def __init__(self, order, end=bytes):
        self._order, self._end = order, end

    def __len__(self):
        return 10 * len(self._order)

    def __getitem__(self, index):
        return np.int32(10 * self._order[index // 10] + index % 10).tobytes() + self._end()


def case_first_record(host, _):
    """By kind of pipeline. The files are in the order of a set, which differs by process."""
    files = Files((1, 0, 2, 3) if host == ODD else (0, 1, 2, 3))
    records = grain.MapDataset.source(files).map(decode)
    feeds = shared_out(records, 4, 8, grain.ReadOptions())
    return {"records": first_batch(shard(records.batch(8))), "feeds": first_batch(shard(feeds))}


def case_random_above_the_source(host, _):
    """Functions above it may be random: they are not compared."""

    def changed(record, rng):
        return {**record, "time": np.float64(time.time()), "x": rng.normal() + np.random.rand()}

    records = grain.MapDataset.source(Files(range(4))).map(decode)
    with shard(records.seed(3).random_map(changed).batch(8)) as iterator:
        return [own_ids(next(iterator))]


def case_random_in_the_source(host, _):
    ds = grain.MapDataset.source(Files(range(4), lambda: np.random.bytes(4))).map(decode).batch(8)
    return first_batch(shard(ds))


def case_first_record_that_one_host_cannot_read(host, _):
    class Damaged(Files):
        def __getitem__(self, index):
            if index == 0 and host == ODD:
                raise ValueError("damaged")
            return super().__getitem__(index)

    ds = grain.MapDataset.source(Damaged(range(4))).map(decode).batch(8)
    with shard(ds, on_bad_record="mask") as iterator:
        return own_ids(next(iterator)), iterator.get_state()


# Errors of a record that two hosts read, and whether each host that reads the record gets them: a
# file that one host alone lacks would make two different rows of one.
ERRORS = [
    (ValueError("no JPEG"), True),
    (KeyError("label"), True),
    (OSError("record 3"), False),
    (FileNotFoundError("train-7"), False),
    (PermissionError("train-7"), False),
    (ConnectionResetError(), False),
    (ImportError("no PIL"), False),
]


def case_bad_records_that_two_hosts_read(host, _):
    """For each error: the valid rows of the first batch, or the error that comes instead."""

    found, mesh = [], mesh_of(jax.devices(), (2, 4), ("model", "data"))
    options = {"on_bad_record": "mask", "retries": 0}
    for error, _ in ERRORS:
        source = Source(8, bad(3, error=lambda text, error=error: error))
        ds = grain.MapDataset.source(source).map(lambda i: {"id": np.int32(i)}).batch(8)
        with shard(ds, mesh, **options) as iterator:
            try:
                found.append(own_ids(next(iterator)))
            except grain_shard.AgreementError as failure:  # it has heard of the error of the other
                found.append(str(failure).splitlines()[1].split(":")[0].strip())
            except Exception as failure:
                found.append(type(failure).__name__)
    return found


def case_first_record_raises(host, _):
    """By the host on which it does."""

    def check(record):
        if host == failing:
            raise ValueError("bad record")  # of several records, any one may fail first
        return record

    found = {}
    for failing in (0, ODD):
        found[failing] = first_batch(shard(numbered().map(check).batch(8)))
    return found


def case_a_batch_of_a_stream_that_one_host_cannot_place(host, _):
    """The hosts have voted on the batch before one of them finds that it cannot place it."""
    mesh = mesh_of(jax.devices(), (4, 2), ("data", "model"))
    records = numbered(width=3 if host == ODD else 4)
    ds = stream(records)
    return {ODD: first_batch(shard(ds, mesh, P("data", "model"), rows="global"))}


def case_a_stream_on_one_host(host, _):
    ds = numbered(24).batch(8)
    if host != ODD:
        return first_batch(shard(ds, timeout_s=2))
    stream = ds.map(lambda batch: batch).to_iter_dataset().batch(1, batch_fn=lambda b: b[0])
    return first_batch(shard(stream, rows="global", timeout_s=2))


def case_two_iterators_interleaved(host, _):
    train, evaluation = shard(numbered(24).batch(8)), shard(numbered(16).batch(8))
    with train, evaluation:
        batches = [next(iterator) for iterator in (train, evaluation, train, evaluation, train)]
        return [own_ids(batch) for batch in batches]


def case_abandoned_iterators(host, _):
    """All hosts leave iterators in their middle, and make another one."""
    if host == ODD:
        shard(numbered().batch(8))  # never asked for a batch, so nobody waits for it
    for _ in range(2):
        next(shard(numbered(24).batch(8)))
    return [own_ids(next(shard(numbered(24).batch(8))))]


def case_own_devices_only(host, _):
    """Each host goes its own way: other files, other steps, a stream that does not say its rows."""
    mesh, lines = mesh_of(jax.local_devices(), (2,)), logged()
    numbered().batch(8).shard_to(mesh_of(jax.devices()))  # of which nothing is logged
    batches = numbered(8 + host).batch(4)
    with warnings.catch_warnings(action="error"), shard(batches, mesh) as iterator:
        taken = [own_ids(next(iterator)) for _ in range(host)]
    said = list(lines)
    stream = numbered(2 + host).to_iter_dataset().filter(lambda record: True).batch(4)
    return taken, said, [own_ids(batch) for batch in shard(stream, mesh)]


LATE_HOSTS = (3, 0)


def case_a_host_arrives_late(host, directory):
    """By the late host, which arrives when the others have given up on it."""
    found = {}
    for late_host in LATE_HOSTS:
        meet(f"begin without host {late_host}")
        if host == late_host:
            for other in set(range(HOSTS)) - {host}:
                eventually((directory / f"{other} without {host}").exists)
        found[late_host] = first_batch(shard(numbered().batch(8), timeout_s=2))
        (directory / f"{host} without {late_host}").touch()
    return found


def case_some_hosts_only_and_then_all(host, _):
    """Hosts 0 and 1 have an iterator of their own, as for an evaluation, before one of all."""
    if host < 2:
        with shard(numbered(8).batch(8), mesh_of(jax.devices()[:4], (4,))) as iterator:
            own_ids(next(iterator))
    with shard(numbered(24).batch(8)) as iterator:
        return [own_ids(next(iterator))]


def case_a_look_at_a_batch_on_one_host(host, _):
    """It cannot have the batch, which is of all hosts. The training is not disturbed by it."""
    evaluation = numbered(16).batch(8).shard_to(mesh_of(jax.devices()), timeout_s=2)
    train = numbered(24).batch(8).shard_to(mesh_of(jax.devices()), timeout_s=60)
    batches = iter(train)
    look = None
    if host == ODD:
        shown = numbered(8).batch(8).shard_to(mesh_of(jax.devices()))
        look = first_batch(iter(evaluation)), shown.abstract_batch()["id"].shape
    rows = [own_ids(batch) for batch in (next(batches), next(batches))]
    return look, rows, own_ids(next(iter(train)))


def case_a_seek_on_one_host_in_mid_run(host, _):
    with shard(numbered(24).batch(8), timeout_s=2) as iterator:
        next(iterator)
        if host != ODD:
            return None
        iterator.seek(2)
        return first_batch(iterator)


@contextlib.contextmanager
def hasty_clock(path):
    """Goes on by 100 s at each of the loop's first four looks at it, and then makes a file."""
    clock, looks = time.monotonic, itertools.count(1)
    passed_s = 0

    def look():
        nonlocal passed_s
        if threading.current_thread() is threading.main_thread() and passed_s < 400:
            passed_s = 100 * next(looks)
            if passed_s == 400:
                path.touch()
        return clock() + passed_s

    with mock.patch.object(time, "monotonic", look):
        yield


def case_an_extra_batch_on_one_host_before_a_save(host, directory):
    """How the save is refused, and the state that is written once the others have followed."""
    folder = directory / "extra"
    folder.mkdir(exist_ok=True)
    with shard(numbered(40).batch(8)) as iterator:
        next(iterator)
        if host == ODD:  # it is late, as if it wrote a large model first
            for other in set(range(HOSTS)) - {ODD}:
                eventually((directory / f"{other} has waited").exists)
            state_writer(iterator)(folder)
            next(iterator)
        else:  # a save is waited for ten times as long as `timeout_s`, which is 60 s
            with hasty_clock(directory / f"{host} has waited"):
                state_writer(iterator)(folder)
        try:
            refused = state_writer(iterator)(folder)
        except grain_shard.AgreementError as error:
            refused = str(error)
        if host != ODD:
            next(iterator)
        state_writer(iterator)(folder)
        meet("all have written")
        return refused, json.loads((folder / "state.json").read_text())["step"]


def save(iterator, folder):
    """Saves as Orbax's v1 API does, into a folder that may exist; returns the number of files."""

    class Created:
        async def await_creation(self):
            folder.mkdir(exist_ok=True)
            return folder

    async def saved():
        await (await iterator.save(Created()))

    asyncio.run(saved())
    return len(list(folder.iterdir()))


def case_saves_of_an_iterator_of_one_host(host, directory):
    """One host saves an iterator of its own, too, and at last leaves out a save of all hosts."""
    own = shard(numbered().to_iter_dataset().batch(2), mesh_of(jax.local_devices(), (2,)))
    ours = shard(numbered()[host::HOSTS].to_iter_dataset().batch(2), rows="local")
    with own, ours:
        found = []
        for step in range(3):
            if host == ODD:
                assert save(own, directory / f"own {step}") == 1
            found.append(save(ours, directory / f"ours {step}"))
            next(ours)
        late = "all have saved"
        ds = numbered()[host::HOSTS].to_iter_dataset().batch(2)
        meet("the next save is of three hosts")
        try:
            if host != ODD:
                with shard(ds, rows="local", timeout_s=2) as others:
                    save(others, directory / "late")
        except grain_shard.HostTimeoutError as error:
            late = str(error)
        meet("the others have stopped waiting")  # the program of the late host goes on until then
        return found, late


CASES = cases_of(globals())


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """By case, what each host returned."""
    directory = tmp_path_factory.mktemp("hosts")
    for name, first in (("a", 0), ("b", 11), ("c", 100)):
        writer = array_record_module.ArrayRecordWriter(str(directory / name), "group_size:1")
        for i in range(first, first + 11):
            writer.write(np.int32(i).tobytes())
        writer.close()
    values = rehearse.run(
        run_cases, CASES, str(directory), hosts=HOSTS, devices_per_host=2, timeout_s=HOSTS_S
    )
    return {case: [value[case.__name__] for value in values] for case in CASES}


def texts(of_hosts, error):
    """What the hosts say, each of which refused its first batch by this error, and did so again."""
    for host, result in enumerate(of_hosts):
        assert not isinstance(result, str), f"host {host}: {result}"
        assert result is not None, f"host {host} got a batch"
        assert (result["type"], result["same error again"]) == (error, True)
    return [result["text"] for result in of_hosts]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_a_host_that_differs_is_named_with_the_field_on_every_host(results, name):
    field, (usual, odd) = name.partition(": ")[0], SAID.get(name, (None, None))
    of_hosts = [of_host[name] for of_host in results[case_differences]]
    for text in texts(of_hosts, "AgreementError"):
        (line,) = [line for line in text.splitlines() if line.startswith(f"  {field}: ")]
        first, second = line.removeprefix(f"  {field}: ").split("; ")
        assert first.endswith(" on hosts 0, 1, 3")
        assert second.endswith(" on host 2")
        assert usual is None or first == f"{usual} on hosts 0, 1, 3"
        assert odd is None or second == f"{odd} on host 2"
        assert text.splitlines()[-1].startswith("  remedy: ")


@pytest.mark.parametrize("kind", ["records", "feeds"])
def test_a_host_that_lists_its_files_in_another_order_is_named_with_a_record(results, kind):
    of_hosts = [of_host[kind] for of_host in results[case_first_record]]
    for text in texts(of_hosts, "AgreementError"):
        first, line, remedy = text.splitlines()
        assert "different records at the same index" in first
        assert line.startswith("  record 0 of the source: ")
        assert line.endswith(" on host 2")
        assert "sort the list of files" in remedy


def test_a_source_that_is_random_is_refused_on_all_hosts_alike(results):
    (text,) = set(texts(results[case_random_in_the_source], "AgreementError"))
    assert "do not make random records in the source" in text
    assert "different records at the same index" in text


def test_a_host_that_cannot_read_a_record_is_not_compared_and_has_the_same_state(results):
    found = results[case_first_record_that_one_host_cannot_read]
    assert [rows for rows, _ in found] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found[0][1]["source"].count("-") == 1
    assert all(state == found[0][1] for _, state in found)


def test_of_rows_that_several_hosts_read_nothing_is_masked_that_one_of_them_may_have(results):
    readers = results[case_bad_records_that_two_hosts_read][::2]
    expected = [[0, 1, 2] if masked else type(error).__name__ for error, masked in ERRORS]
    assert readers == [expected, expected]


def test_a_field_that_is_the_same_everywhere_is_not_named(results):
    for of_host in results[case_differences]:
        for field in ("records", "seeds", "source", "mesh", "specs", "devices", "next batch"):
            assert f"  {field}: " not in of_host["global_batch_size"]["text"]
        assert "next batch: " not in of_host["next record"]["text"]


@pytest.mark.parametrize(
    ("case", "failing", "error", "told"),
    [
        (case_first_record_raises, 0, "ValueError", "ValueError: bad record"),
        (case_first_record_raises, ODD, "ValueError", "ValueError: bad record"),
        (
            case_a_batch_of_a_stream_that_one_host_cannot_place,
            ODD,
            "ShardingError",
            "dim 1 has size 3, which is not divisible by mesh axis 'model' (size 2)",
        ),
    ],
)
def test_a_host_that_fails_at_the_first_batch_has_its_own_error_and_is_named_elsewhere(
    results, case, failing, error, told
):
    others = [of_host[failing] for of_host in results[case]]
    own = others.pop(failing)
    assert told.removeprefix(f"{error}: ") in texts([own], error)[0]
    for text in texts(others, "AgreementError"):
        assert f"host {failing} failed, so this host stops as well." in text
        assert told in text


def test_a_host_that_runs_another_kind_of_pipeline_is_named(results):
    for text in texts(results[case_a_stream_on_one_host], "HostTimeoutError"):
        assert 'kind: "random access" on hosts 0, 1, 3; "stream" on host 2' in text
        assert "made at" not in text


@pytest.mark.parametrize(
    ("case", "batches"),
    [
        (case_random_above_the_source, [0]),
        (case_abandoned_iterators, [0]),
        (case_some_hosts_only_and_then_all, [0]),
        (case_two_iterators_interleaved, [0, 0, 1, 1, 2]),
    ],
)
def test_what_hosts_may_do_disturbs_no_batch(results, case, batches):
    for host, rows in enumerate(results[case]):
        assert rows == [[8 * k + 2 * host, 8 * k + 2 * host + 1] for k in batches]


def test_a_mesh_of_one_hosts_devices_needs_no_agreement_and_is_told_of_once(results):
    for host, result in enumerate(results[case_own_devices_only]):
        batches, (line,), stream = result
        assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]][:host]
        assert list(itertools.chain(*stream)) == list(range(2 + host))
        assert "only devices of this host, but the job has 4 hosts" in line
        assert "jax.make_mesh" in line


@pytest.mark.parametrize("late_host", LATE_HOSTS)
def test_a_host_that_does_not_arrive_in_time_is_named_and_learns_that_it_came_too_late(
    results, late_host
):
    others = [of_host[late_host] for of_host in results[case_a_host_arrives_late]]
    texts([others.pop(late_host)], "HostTimeoutError")
    for text in texts(others, "HostTimeoutError"):
        assert f"host {late_host} did not answer in time (timeout_s=2)" in text


def test_a_look_at_a_batch_on_one_host_is_refused_there_and_disturbs_no_other_iterator(results):
    for host, (look, rows, again) in enumerate(results[case_a_look_at_a_batch_on_one_host]):
        assert rows == [[2 * host, 2 * host + 1], [8 + 2 * host, 8 + 2 * host + 1]]
        assert again == rows[0]
        if host == ODD:
            refused, shape = look
            (text,) = texts([refused], "HostTimeoutError")
            assert "hosts 0, 1, 3 did not answer in time (timeout_s=2)" in text
            assert "dataset made at: " in text
            assert "iterate over the dataset before .shard_to" in text
            assert shape == (8,)


def test_a_seek_that_the_other_hosts_do_not_call_is_a_timeout_that_says_so(results):
    (text,) = texts([results[case_a_seek_on_one_host_in_mid_run][ODD]], "HostTimeoutError")
    assert "iterator: 0 on hosts 0, 1, 3; 1 on host 2" in text
    assert (
        "(Every call of iter, seek, reset and set_state opens one: make the same calls on all"
        " hosts.)" in text
    )


def test_an_extra_batch_on_one_host_is_refused_by_the_next_save_on_every_host(results):
    for refused, step in results[case_an_extra_batch_on_one_host_before_a_save]:
        assert "the hosts are not at the same batch" in refused
        assert "  next batch: 1 on hosts 0, 1, 3; 2 on host 2" in refused
        assert "call next equally often on every host" in refused
        assert step == 2


def test_a_save_ends_once_all_hosts_have_written_whatever_else_one_of_them_saves(results):
    for host, (found, late) in enumerate(results[case_saves_of_an_iterator_of_one_host]):
        assert found == [HOSTS] * 3
        assert host == ODD or f"host {ODD} did not answer in time (timeout_s=2)" in late
