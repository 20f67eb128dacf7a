"""`check`, the acceptance test of a pipeline: passes right pipelines and finds faults."""

import concurrent.futures
import io
import itertools
import os
import random
import sys
import tarfile
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
from tests.conftest import FORKS, Made, data_mesh, refused
from tests.pipelines import shared_out
from tests.programs import command

RECORDS = grain.MapDataset.range(1000)
WORKER, EACH = "a worker process", "each source and function"
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
    monkeypatch.setattr(checking, "_RECORDS_S", 0.1)


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
    assert f"not checked: the {SECONDS} s ran out" not in other
    assert len(checked.lines) >= 10
    for proof in (EACH, "read twice, by one thread", "a restore, through JSON"):
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
    assert str(checked) == repr(checked)
    assert "read twice, by one thread" in str(checked)
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


class OneFile:
    """A source that seeks and reads in one open file, so several threads disturb each other."""

    def __init__(self, path, num_records=2000):
        self.path, self.num_records = path, num_records
        # A read that follows another one at the end of the records finds a whole record, too.
        np.repeat(np.arange(num_records + 64, dtype=np.int32), 1024).tofile(path)
        self.file = os.open(path, os.O_RDONLY)

    def __len__(self):
        return self.num_records

    def __getitem__(self, index):
        os.lseek(self.file, 4096 * index, os.SEEK_SET)
        return {"id": index, "x": np.frombuffer(os.read(self.file, 4096), np.int32)}

    def __getstate__(self):
        return {**self.__dict__, "file": None}

    def __setstate__(self, state):
        self.__dict__ = {**state, "file": os.open(state["path"], os.O_RDONLY)}


class Archive:
    """A source that reads the files of one open tar archive."""

    def __init__(self):
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for i in range(100):
                member = tarfile.TarInfo(f"{i}")
                member.size = 4096
                archive.addfile(member, io.BytesIO(np.full(1024, i, np.int32).tobytes()))
        file.seek(0)
        self.archive = tarfile.open(fileobj=file)  # noqa: SIM115 (it stays open)
        self.members = self.archive.getmembers()

    def __len__(self):
        return len(self.members)

    def __getitem__(self, index):
        return {"x": np.frombuffer(self.archive.extractfile(self.members[index]).read(), np.int32)}


class Reusing:
    """A source that returns one of a few arrays, which later reads overwrite."""

    def __init__(self, arrays):
        self.arrays, self.reads = np.zeros((arrays, 3), np.int32), itertools.count()

    def __len__(self):
        return 1000

    def __getitem__(self, index):
        array = self.arrays[next(self.reads) % len(self.arrays)]
        array[:] = index
        return {"x": array}


ARRAY = np.zeros(3)


def into_one_array(i):
    np.copyto(ARRAY, i)
    return {"x": ARRAY}


def of_one_file(path):
    return grain.MapDataset.source(OneFile(path / "r"))


def as_stream(records):
    return records.to_iter_dataset().filter(lambda record: True)


class OfThread(threading.local):
    scale = 1


HERE, CALLS = OfThread(), itertools.count()
ONE_FILE = r"SourceMapDataset\(source=OneFile\)"
AT_ONCE = r"was .* for one of 16 threads that read at the same time\."
CHANGED = r"a later read changed record 0 of .*{}.* from \[0.*\] to \[\d\d+.*\]\."
FAULTS = {  # how it is made, and what is said about which leaf
    "random numbers": (
        lambda path: RECORDS.map(lambda i: i).map(lambda i: {"x": random.random()}),
        r"record \d+ of MapMapDataset\(transform=<lambda> @ \S*test_check.py:\d+\) was \d",
    ),
    "NumPy's random numbers": (
        lambda path: RECORDS.map(lambda i: {"x": np.random.rand()}),
        "at the next read, each time for one thread that read alone",
    ),
    "a rare change": (
        lambda path: RECORDS.map(lambda i: {"x": i + (next(CALLS) % 100 == 99)}),
        "at the next read, each time for one thread that read alone",
    ),
    "one file": (of_one_file, f"record .* of {ONE_FILE} {AT_ONCE}"),
    "one file below functions": (
        lambda path: of_one_file(path).seed(1).shuffle().map(dict),
        f"record .* of {ONE_FILE} {AT_ONCE}",
    ),
    "one file in a stream": (
        lambda path: as_stream(of_one_file(path)),
        f"record .* of {ONE_FILE} {AT_ONCE}",
    ),
    "one file in feeds": (
        lambda path: shared_out(of_one_file(path), 4, 8, grain.ReadOptions(num_threads=1)),
        f"record .* of {ONE_FILE} {AT_ONCE}",
    ),
    "one file of a mix": (
        lambda path: grain_shard.mix(
            [RECORDS.map(lambda i: {"id": i, "x": np.zeros(1024, np.int32)}), of_one_file(path)],
            {0: [9, 1]},
        ),
        f"record .* of {ONE_FILE} {AT_ONCE}",
    ),
    "one tar archive": (
        lambda path: grain.MapDataset.source(Archive()),
        f"record .* of SourceMapDataset.source=Archive. {AT_ONCE}",
    ),
    "one array": (
        lambda path: grain.MapDataset.source(Reusing(1)),
        CHANGED.format("source=Reusing"),
    ),
    "three arrays in turn": (lambda path: grain.MapDataset.source(Reusing(3)), CHANGED.format("")),
    "one array of a function": (
        lambda path: RECORDS.map(into_one_array),
        CHANGED.format("transform=into_one_array"),
    ),
    "one array in a stream": (
        lambda path: as_stream(RECORDS.map(into_one_array)),
        CHANGED.format(""),
    ),
    "a value of this thread": (
        lambda path: RECORDS.map(lambda i: {"x": (i + 1) * HERE.scale}),
        "the first batch, in this thread: record .* One thread that read alone got ",
    ),
}
REMEDIES = {
    "at the next read": ".seed(s) and .random_map(f)",
    "16 threads": "hold a threading.Lock() around its reads, read with os.pread",
    "changed": "return a new array for each record, such as self.buffer.copy()",
    "the first batch": "depend on a threading.local()",
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_with_its_source_or_function_and_its_leaf(
    name, tmp_path, no_worker, monkeypatch
):
    monkeypatch.setattr(HERE, "scale", 3)
    make, words = FAULTS[name]
    ds = make(tmp_path)
    ds = ds if name == "one file in feeds" else ds.batch(8)
    with pytest.raises(ShardingError, match=words) as failed:
        check(ds.shard_to(data_mesh(4)), batches=8, seconds=SECONDS)
    text, problem = str(failed.value), failed.value.problem
    assert text.startswith("batch['x']: ")
    assert "mesh:   data=4" in text or "mesh: data=4" in text
    remedy = next(remedy for words, remedy in REMEDIES.items() if words in problem)
    assert remedy in failed.value.remedy


def test_a_source_that_is_not_safe_passes_with_one_thread(tmp_path, no_worker, few_times):
    ds = of_one_file(tmp_path)[:64].batch(8).shard_to(data_mesh(4), num_threads=1)
    found = lines_of(ds, seconds=SECONDS)
    assert found[EACH] == "ok"
    assert found["16 threads"] == "does not apply: one thread at a time reads the records"


@pytest.mark.slow
def test_a_source_that_is_not_safe_passes_with_an_executor_of_processes(tmp_path, few_times):
    with concurrent.futures.ProcessPoolExecutor(1, FORKS) as executor:
        ds = of_one_file(tmp_path)[:64].batch(8).shard_to(data_mesh(4), executor=executor)
        found = lines_of(ds, seconds=SECONDS)
    assert found["the pipeline's ProcessPoolExecutor"] == found[EACH] == found[WORKER] == "ok"


def test_a_stream_with_one_thread_in_its_read_options_may_have_such_a_source(
    tmp_path, no_worker, few_times
):
    records = of_one_file(tmp_path)[:64].to_iter_dataset(grain.ReadOptions(num_threads=1)).batch(8)
    assert lines_of(records.shard_to(data_mesh(4)), batches=4, seconds=SECONDS)[EACH] == "ok"


def test_the_interval_of_python_s_threads_is_as_before(tmp_path, no_worker):
    before = sys.getswitchinterval()
    with pytest.raises(ShardingError, match=AT_ONCE):
        check(of_one_file(tmp_path).batch(8).shard_to(data_mesh(4)), batches=4)
    assert sys.getswitchinterval() == before


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


class Mapped:
    """A source of the numbers in a file, which each process opens by the same path."""

    def __init__(self, path):
        self.path, self.numbers = path, np.memmap(path, np.int32, mode="r")

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        return {"x": self.numbers[index]}

    def __reduce__(self):
        return Mapped, (self.path,)


def in_another_folder(folder):
    """The path is relative, and the folder changes after the source has opened its file."""
    for name, first in (("before", 0), ("after", 5000)):
        (folder / name).mkdir()
        np.arange(first, first + 64, dtype=np.int32).tofile(folder / name / "records")
    os.chdir(folder / "before")
    source = Mapped("records")
    os.chdir(folder / "after")
    return grain.MapDataset.source(source)


def in_a_replaced_file(folder):
    """The file is replaced after the source has opened it, as by a new export."""
    old, new = folder / "records", folder / "new"
    np.arange(64, dtype=np.int32).tofile(old)
    source = Mapped(str(old))
    np.arange(5000, 5064, dtype=np.int32).tofile(new)
    new.replace(old)
    return grain.MapDataset.source(source)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: RECORDS.map(lambda i: {"x": hash(str(i)) % 999}), " was "),
        (lambda folder: RECORDS.map(scaled), " was "),
        (lambda folder: grain.MapDataset.source(Elsewhere()), "FileNotFoundError"),
        (in_another_folder, r"record 0 of epoch 0 .* was 5000\. .* read alone got 0\."),
        (in_a_replaced_file, r"record 0 of epoch 0 .* was 5000\. .* read alone got 0\."),
    ],
    ids=["hash of a str", "a global variable", "no file", "another folder", "a replaced file"],
)
def test_a_worker_process_in_another_world_is_found(make, words, tmp_path, monkeypatch, few_times):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys.modules[__name__], "SCALE", 2)
    ds = make(tmp_path).batch(8).shard_to(data_mesh(4))
    with pytest.raises(ShardingError, match=f"{WORKER}: .*{words}") as failed:
        check(ds, batches=4, seconds=SECONDS)
    assert "find what differs there: a flag, an environment variable, the working directory" in (
        failed.value.remedy
    )


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
    assert "ok" in {line.found for line in lines}


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
        ("none", 2, "MODULE:none is a NoneType, not a dataset."),
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
