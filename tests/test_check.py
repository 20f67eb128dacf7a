"""`check`, the acceptance test of a pipeline: passes right pipelines and finds faults."""

import concurrent.futures
import os
import random
import sys
import threading
import time

import grain
import jax
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

import grain_shard
from grain_shard import ArrayRecordSource, ArraySource, BatchSchedule, ShardingError, check
from grain_shard.tools.checking import check as checking
from tests.conftest import Made, data_mesh, refused
from tests.pipelines import shared_out
from tests.programs import command
from tests.test_rereads import OneFile

RECORDS = grain.MapDataset.range(1000)
WORKER = "a worker process"
SECONDS = 600  # no proof runs out of time, also on a busy machine


@pytest.fixture
def no_worker(monkeypatch):
    """Leaves out the worker process, which takes seconds to start."""

    def refuse(pipeline, most_bytes):
        raise ShardingError("no worker in this test.", remedy="")

    monkeypatch.setattr(checking, "pickled", refuse)


@pytest.fixture
def few_times(monkeypatch):
    """Where nothing is wrong, no second is spent to read a few records many times."""
    monkeypatch.setattr(checking, "_AGAIN_S", 0.1)


def numbered(ds):
    return ds.map(lambda i: {"id": i, "x": np.full(3, i, np.float32)})


def readme(path):
    return RECORDS.seed(42).shuffle().map(lambda i: {"x": i / 1000}).batch(256)


def array_records(path):
    writer = ArrayRecordWriter(str(path / "a.array_record"), "group_size:1")
    for i in range(100):
        writer.write(np.full(2, i, np.int32).tobytes())
    writer.close()
    source = ArrayRecordSource(str(path / "a.array_record"))
    return grain.MapDataset.source(source).map(lambda r: {"x": np.frombuffer(r, np.int32)}).batch(8)


def random_maps(path):
    ds = RECORDS.seed(1).random_map(lambda i, rng: {"x": rng.random(2), "text": str(i)})
    return ds.repeat(2).batch(8)


PASS = {
    "README": (readme, {}),
    "ArrayRecord": (array_records, {}),
    "arrays": (lambda path: grain.MapDataset.source(ArraySource({"x": np.eye(50)})).batch(8), {}),
    "random maps and text": (random_maps, {}),
    "a model axis": (
        readme,
        {"mesh": lambda: jax.make_mesh((2, 2), ("data", "model"), devices=jax.devices()[:4])},
    ),
    "one device": (readme, {"mesh": lambda: jax.devices()[0]}),
    "no padding": (readme, {"mask_key": None, "remainder": "drop"}),
    "masked records": (
        lambda path: RECORDS.map(lambda i: {"x": 1 // (i % 500)}).batch(8),
        {"on_bad_record": "mask", "pad_value": 7},
    ),
    "whole batches": (lambda path: numbered(RECORDS).batch(8).map(lambda batch: batch), {}),
    "a schedule": (lambda path: numbered(RECORDS).pipe(BatchSchedule({0: 8, 5: 16})), {}),
    "a mix": (
        lambda path: grain_shard.mix(
            [numbered(RECORDS), numbered(RECORDS)], {0: [3, 1], 9: [1, 1]}
        ).batch(8),
        {},
    ),
    "endless": (lambda path: numbered(RECORDS).seed(1).shuffle().repeat().batch(8), {}),
    "feeds": (lambda path: shared_out(numbered(RECORDS), 4, 8), {}),
    "short feeds": (lambda path: shared_out(numbered(RECORDS[:21]), 4, 8), {}),
    "a stream": (
        lambda path: numbered(RECORDS).to_iter_dataset().filter(lambda r: r["id"] % 3 > 0).batch(8),
        {},
    ),
    "local rows": (lambda path: numbered(RECORDS).to_iter_dataset().batch(8), {"rows": "local"}),
    "an executor": (
        lambda path: numbered(RECORDS).batch(8),
        {"executor": concurrent.futures.ThreadPoolExecutor(2)},
    ),
}


@pytest.mark.parametrize("name", PASS)
def test_a_right_pipeline_passes(name, tmp_path, no_worker, few_times):
    make, options = PASS[name]
    options = {"mesh": lambda: data_mesh(4), **options}
    ds = make(tmp_path).shard_to(options.pop("mesh")(), **options)
    checked = check(ds, batches=12, seconds=SECONDS)
    found = {line.name: line.found for line in checked.lines}
    other = [text for text in found.values() if text != "ok"]
    assert all(text.startswith(("does not apply: ", "not checked: ")) for text in other)
    assert f"not checked: {SECONDS} s were over" not in other
    assert len(checked.lines) >= 10
    for proof in ("read twice, by one thread", "a restore, through JSON"):
        assert found[proof] == "ok"
    assert (found["2 hosts"] == "ok") != (name == "local rows")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ArrayRecord", "feeds"])
def test_a_worker_process_gives_the_same_batches(name, tmp_path, few_times):
    checked = check(PASS[name][0](tmp_path).shard_to(data_mesh(4)), seconds=SECONDS)
    (line,) = [line for line in checked.lines if line.name == WORKER]
    assert line.found == "ok"
    assert line.compared.startswith({"ArrayRecord": "13", "feeds": "20"}[name])


def test_the_first_batches_the_last_ones_and_some_in_the_middle_are_read(no_worker, few_times):
    checked = check(numbered(RECORDS).batch(8).shard_to(data_mesh(4)), seconds=SECONDS)
    assert checked.lines[0].compared == "20 batches (0:10, 120:125, 60:65), 160 rows"
    assert checked.lines[-1].compared == "125 steps in a pass"
    assert str(checked) == repr(checked)
    assert "125 steps in a pass" in str(checked)
    shown = checked._repr_mimebundle_()
    assert "<pre" in shown["text/html"]
    assert shown["text/plain"] == str(checked)


# Planted faults.


class Forgetful(Made):
    """A stream whose iterator does not go back to a state."""

    def __iter__(self):
        iterator = super().__iter__()
        iterator.set_state = lambda state: None
        return iterator


class OfThread(threading.local):
    scale = 1


HERE = OfThread()
FAULTS = {
    "random numbers": (
        lambda path: RECORDS.map(lambda i: {"x": random.random()}),
        "read twice",
    ),
    "one file": (
        lambda path: OneFile(path / "r", 1000),
        "the pipeline's threads|16 th|a few",
    ),
    "a value of this thread": (
        lambda path: RECORDS.map(lambda i: {"x": (i + 1) * HERE.scale}),
        "the first batch, in this thread",
    ),
}
REMEDIES = [
    ("read twice", ".seed(s) and .random_map(f)"),
    ("the first batch", "no threading.local()"),
    ("", "threading.Lock()"),
]


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_record_and_leaf(name, tmp_path, no_worker, monkeypatch):
    monkeypatch.setattr(HERE, "scale", 3)
    make, proof = FAULTS[name]
    made = make(tmp_path)
    ds = made if isinstance(made, grain.MapDataset) else grain.MapDataset.source(made)
    with pytest.raises(ShardingError, match=rf"^batch\['x'\]: ({proof})") as failed:
        check(ds.batch(8).shard_to(data_mesh(4)), batches=8, seconds=SECONDS)
    text = str(failed.value)
    assert "record " in text
    assert "alone g" in text  # "one thread that reads alone gets"
    assert "mesh:   data=4" in text or "mesh: data=4" in text
    problem, remedy = failed.value.problem, failed.value.remedy
    assert next(words for begin, words in REMEDIES if problem.startswith(begin)) in remedy


@pytest.mark.parametrize(("way", "proof"), [("of_host", "2 hosts"), ("on_mesh", "mesh data=1")])
def test_other_rows_on_another_host_or_mesh_are_found(
    way, proof, no_worker, few_times, monkeypatch
):
    right, ds = getattr(checking, way), numbered(RECORDS).batch(8).shard_to(data_mesh(4))
    other = numbered(RECORDS[1:]).batch(8).shard_to(data_mesh(4))
    monkeypatch.setattr(checking, way, lambda ds, *where: right(other, *where))
    text = rf"{proof}: record 0 of epoch 0 \(row 0 of batch 0\) was 1. .* alone got 0."
    with pytest.raises(ShardingError, match=text) as failed:
        check(ds, seconds=SECONDS)
    assert failed.value.path == "batch['id']"
    assert "a record depend on its index alone, and not on the records" in failed.value.remedy


def test_a_stream_that_does_not_go_back_to_a_state_is_found(no_worker):
    ds = Forgetful(lambda i: {"x": np.full(4, i)}, 100).shard_to(data_mesh(4))
    with pytest.raises(ShardingError, match="a restore, through JSON: row 0 of batch 10 was 0"):
        check(ds, seconds=SECONDS)


SCALE = 1


def scaled(i):
    return {"x": i * SCALE}


class Elsewhere:
    """A source that opens a file where it is unpickled, and the file is missing there."""

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return {"x": index}

    def __reduce__(self):
        return open, ("/moved",)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("records", "words"),
    [
        (RECORDS.map(lambda i: {"x": hash(str(i)) % 999}), " was "),
        (RECORDS.map(scaled), " was "),
        (grain.MapDataset.source(Elsewhere()), "FileNotFoundError"),
    ],
    ids=["hash of a str", "a global variable", "a file"],
)
def test_a_worker_process_in_another_world_is_found(records, words, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2)
    with pytest.raises(ShardingError, match=f"{WORKER}: ") as failed:
        check(records.batch(8).shard_to(data_mesh(4)), batches=4, seconds=SECONDS)
    assert words in str(failed.value)
    assert "find what differs there: a flag, an environment variable" in failed.value.remedy


@pytest.mark.slow
def test_the_worker_processes_of_a_pipeline_are_checked_and_not_its_threads(tmp_path):
    source, options = OneFile(tmp_path / "r", 100), {"num_workers": 1}
    ds = grain.MapDataset.source(source).batch(8).shard_to(data_mesh(4), **options)
    found = lines_of(ds, seconds=SECONDS)
    assert found["the pipeline's worker processes (1)"] == "ok"
    assert found["16 threads"] == "does not apply: one thread at a time reads the records"
    ds = RECORDS.map(lambda i: {"x": os.getpid()}).batch(8).shard_to(data_mesh(4), **options)
    with pytest.raises(ShardingError, match=r"the pipeline's worker processes \(1\): "):
        check(ds, batches=4, seconds=SECONDS)


# What is not proved.


def lines_of(ds, **options):
    return {line.name: line.found for line in check(ds, **options).lines}


def test_a_pipeline_that_does_not_pickle_says_so_and_passes(few_times):
    lock = threading.Lock()
    ds = RECORDS.map(lambda i: {"x": i, "locked": lock.locked()}).batch(8).shard_to(data_mesh(4))
    found = lines_of(ds, batches=2, seconds=SECONDS)[WORKER]
    assert found.startswith("not checked: the pipeline cannot be sent to a worker process: ")
    assert "lock" in found


def test_a_source_of_one_pass_is_read_once():
    def batches():
        for i in range(4):
            yield {"x": np.full(8, i)}

    ds = grain_shard.from_iterable(batches(), rows="global").shard_to(data_mesh(4))
    lines = check(ds, seconds=SECONDS).lines
    assert lines[0].compared == "4 batches (0:4), 32 rows"
    assert all(line.found.startswith("does not apply: ") for line in lines[1:])


def test_a_slow_source_ends_the_check_and_each_line_says_what_was_compared(no_worker):
    ds = RECORDS.map(lambda i: {"x": time.sleep(0.01) or i}).repeat().batch(8)
    lines = check(ds.shard_to(data_mesh(4)), batches=1000, seconds=1).lines
    assert " of 1,000 batches (0:" in lines[0].compared
    assert {line.found.split(":")[0] for line in lines} >= {"ok", "does not apply"}
    assert lines[-1].found == "does not apply: the dataset repeats without an end"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda ds: {"ds": RECORDS.batch(8)}, "check got a "),
        (lambda ds: {"ds": ds, "batches": 0}, "batches=0 is not an integer of at least 1."),
        (lambda ds: {"ds": ds, "seconds": 0}, "seconds=0 is not a positive number."),
        (lambda ds: {"ds": numbered(RECORDS[:0]).batch(8).shard_to(data_mesh(4))}, "no batch"),
    ],
)
def test_other_arguments_are_refused(arguments, message):
    with refused(message):
        check(**arguments(numbered(RECORDS).batch(8).shard_to(data_mesh(4))))


# The command.

MODULE = """
import grain, jax, random
import grain_shard
mesh = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])
ds = grain.MapDataset.range(64).to_iter_dataset().filter(lambda i: True).batch(8)
right = ds.map(lambda batch: {"x": batch}).shard_to(mesh)
def wrong():
    return ds.map(lambda batch: {"x": batch + random.random()}).shard_to(mesh)
def none():
    return None
"""


@pytest.mark.parametrize(
    ("name", "code", "line"),
    [
        ("right", 0, ""),
        ("wrong", 1, "check: batch['x']: read twice, by one thread: row 0 of batch 0 was "),
        ("none", 2, "MODULE:none is a NoneType, not a dataset after .shard_to(mesh)."),
        ("other", 2, "the module 'MODULE' has no 'other'."),
    ],
)
def test_the_command_prints_the_table_and_one_line(name, code, line, tmp_path, monkeypatch, capsys):
    module = f"pipeline_{name}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    assert command(f"check {module}:{name} --seconds {SECONDS}") == code
    printed, told = capsys.readouterr()
    assert line.replace("MODULE", module) in told
    assert told.count("\n") == (code > 0)
    assert ("read twice, by one thread" in printed) == (code < 2)
