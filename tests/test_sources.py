"""`ArrayRecordSource` on real ArrayRecord files."""

import http.server
import itertools
import pickle
import re
import shutil
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import grain
import numpy as np
import pyarrow.parquet
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from grain_shard import ArrayRecordSource, BatchLayout, PadToDivisible, ShardBatch
from grain_shard.sources import array_record_source, record_files
from tests.conftest import HANG_S, data_mesh, ids
from tests.pipelines import read_together
from tests.programs import run

SIZES = [7, 1, 20, 4]  # records of each file
TOTAL = sum(SIZES)


def record(i):
    """A record of some length that tells its number."""
    return f"record {i} ".encode() * (i % 5 + 1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder, paths, first = tmp_path_factory.mktemp("records"), [], 0
    for number, size in enumerate(SIZES):
        path = str(folder / f"train-{number:05d}-of-{len(SIZES):05d}")
        writer = ArrayRecordWriter(path, "group_size:1")
        for i in range(first, first + size):
            writer.write(record(i))
        writer.close()
        paths.append(path)
        first += size
    return paths


class Counting(ArrayRecordSource):
    """Counts the reads of each kind."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.single, self.batched = [], []

    def __getitem__(self, index):
        self.single.append(index)
        return super().__getitem__(index)

    def _getitems(self, indices):
        self.batched.append(list(indices))
        return super()._getitems(indices)


def decode(value):
    return {"id": np.int32(value.split()[1])}


def read_at_once(source, order=lambda records: records):
    """The numbers of records, which are read in one call."""
    records = order(grain.MapDataset.source(source)).map(decode)
    return read_together(records, len(records))[0]["id"].tolist()


ORDERS = {
    "one": (lambda records: records[5:6], [5]),
    "backwards": (lambda records: records[::-3], [*range(TOTAL)][::-3]),
    "of several files": (lambda records: records[6:30:2], [*range(6, 30, 2)]),
    "twice": (lambda records: records[6:9].repeat(2), [6, 7, 8, 6, 7, 8]),
    "the ends": (lambda records: records[::-31], [31, 0]),
}


@pytest.mark.parametrize(("order", "numbers"), ORDERS.values(), ids=ORDERS)
def test_a_batched_read_keeps_the_order_that_was_asked_for(paths, order, numbers):
    source = Counting(paths)
    assert read_at_once(source, order) == numbers
    assert source.batched[-1] == numbers


def test_it_says_which_file_holds_a_record_and_where(paths):
    source = ArrayRecordSource([paths[3], f"{paths[2]}[5:9]", paths[0]])
    for index in range(len(source)):
        path, position = source.where(index)
        assert ArrayRecordSource(path)[position] == source[index]
    assert source.where(np.int64(4)) == (paths[2], 5)
    with pytest.raises(IndexError, match="there is no record 15: the source has 15 records"):
        source.where(15)


def test_a_read_is_of_whole_batches_and_of_no_more_than_the_buffer_has_room_for(paths):
    source = Counting(paths)
    ds = grain.MapDataset.source(source).map(decode).batch(4)
    with iter(ds.shard_to(data_mesh(2), num_threads=1, cpu_buffer_size=3)) as iterator:
        batches = ids(iterator)
    assert batches == [list(range(k, k + 4)) for k in range(0, 32, 4)]
    first, *others = source.batched
    assert first == batches[0]  # the first batch comes alone, to be there soon
    assert list(itertools.chain(first, *others)) == list(range(32))
    assert {len(read) for read in others} <= {4, 8, 12}
    assert source.single == [0]  # it is compared with that of other hosts and of states


def test_a_shuffled_batch_is_one_read_too_and_of_this_hosts_rows_alone(paths):
    source = Counting(paths)
    shuffled = grain.MapDataset.source(source).seed(7).shuffle().map(decode)
    expected = [int(r["id"]) for r in shuffled]
    source.single.clear(), source.batched.clear()
    rows = shuffled.batch(8).pipe(PadToDivisible(4)).pipe(ShardBatch(BatchLayout(4, (1,))))
    mine = [expected[k + 2 : k + 4] for k in range(0, 32, 8)]
    assert [rows[k]["id"].tolist() for k in range(4)] == mine
    assert source.batched == mine
    assert source.single == []


def test_reader_options_reach_the_reader(paths):
    source = ArrayRecordSource(paths, {"index_storage_option": "in_memory"})
    assert source[31] == record(31)
    with pytest.raises(Exception, match="index_storage_option"):
        ArrayRecordSource(paths, {"index_storage_option": "nowhere"})[0]


@pytest.fixture
def tree(paths, tmp_path, monkeypatch):
    """The current folder, with the same four files in several places."""
    a, b, c, d = paths
    for source, name in [
        (a, "data/img-2.array_record"),
        (b, "data/img-10.array_record"),
        (c, "data/more/deep/img-1.array_record"),
        (d, "data/train-0"),
        (a, "what[1]"),
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(source, tmp_path / name)
    (tmp_path / "data/dataset_info.json").write_text("{}")
    (tmp_path / "data/more/array_record_folder").mkdir()
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def reader(monkeypatch):
    """A reader of files that asks the real one; `use` has sources take a class for theirs."""
    real = record_files.ArrayRecordReader

    class Reader:
        def __init__(self, path, **options):
            self.reader = real(path, **options)

        def __getattr__(self, name):
            return getattr(self.reader, name)

        @staticmethod
        def use(kind):
            monkeypatch.setattr(record_files, "ArrayRecordReader", kind)

    return Reader


IMAGES = ["data/img-10.array_record", "data/img-2.array_record"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        # By name, character by character, as every host sorts them.
        ("data/img-*.array_record", IMAGES),
        ("data/img-[2-9].array_record", ["data/img-2.array_record"]),
        ("data/**/img-*", [*IMAGES, "data/more/deep/img-1.array_record"]),
        # A folder stands for the files right in it that are called so.
        ("data", IMAGES),
        ("data/", IMAGES),
        # Several keep their order.
        (["data/train-*", "data/img-1*"], ["data/train-0", "data/img-10.array_record"]),
        # A file that exists is that file, whatever its name looks like.
        ("what[1]", ["what[1]"]),
        # The folder whose name matches is no file.
        ("data/**/*array_record*", [*IMAGES, "data/more/deep/img-1.array_record"]),
    ],
)
def test_patterns_and_folders_become_sorted_files(tree, given, found):
    source = ArrayRecordSource(given)
    assert source.paths == [f"{tree}/{path}" for path in found]
    assert list(source) == list(grain.sources.ArrayRecordDataSource(found))


def instruction(filename):
    """As much of a `FileInstruction` of TensorFlow Datasets as is read."""
    return SimpleNamespace(filename=filename, skip=5, take=3, examples_in_shard=20)


def test_a_range_of_a_files_records(paths):
    source = ArrayRecordSource([f"{paths[2]}[5:8]", paths[1], f"{paths[0]}[0:1]"])
    assert list(source) == [record(13), record(14), record(15), record(7), record(0)]
    assert read_at_once(source, lambda records: records[::-2]) == [0, 15, 13]
    assert source.paths == [paths[2], paths[1], paths[0]]
    assert list(ArrayRecordSource([f"{paths[2]}[2:2]", f"{paths[1]}[0:1]"])) == [record(7)]
    of_datasets = ArrayRecordSource(instruction(paths[2]))
    assert list(of_datasets) == [record(13), record(14), record(15)]


IN_DATA = (
    "exists: '{tree}/data', which holds dataset_info.json, img-10.array_record,"
    " img-2.array_record, more, train-0 (files and folders: 5)"
)
IN_TREE = "exists: '{tree}', which holds data, empty, what[1] (files and folders: 3)"
IS_EMPTY = "exists: '{tree}/empty', which holds nothing (files and folders: 0)"
PATH = "correct the path. If it is in a bucket, check that this host has the bucket mounted."
NAME = "pass a pattern that matches the files, such as 'folder/train-*'."


@pytest.mark.parametrize(
    ("given", "problem", "exists", "remedy"),
    [
        ("data/pic-*.rec", "no file matches 'data/pic-*.rec'.", IN_DATA, PATH),
        ("gs-mount/images/*", "no file matches 'gs-mount/images/*'.", IN_TREE, PATH),
        (["data/train-0", "data/none"], "there is no file '{tree}/data/none'.", IN_DATA, PATH),
        (
            "empty",
            "no file in the folder 'empty' has \"array_record\" in its name.",
            IS_EMPTY,
            NAME,
        ),
    ],
)
def test_what_is_not_found_is_said_with_what_is_there(tree, given, problem, exists, remedy):
    with pytest.raises(FileNotFoundError) as raised:
        ArrayRecordSource(given)
    message = f"{problem}\n  {exists}\n  remedy: {remedy}"
    assert str(raised.value) == message.format(tree=tree)


def test_only_a_few_of_many_names_are_shown(tmp_path):
    for number in range(7):
        (tmp_path / f"val-{number}").touch()
    with pytest.raises(FileNotFoundError, match=r"val-3, val-4, \.\.\. \(files and folders: 7\)"):
        ArrayRecordSource(str(tmp_path / "train-*"))


def test_a_link_that_leads_nowhere_is_never_passed_over(tree):
    Path("data/train-1").symlink_to("mount/train-1")
    for given in ["data/train-1", "data/train-*", "data/**/train-*"]:
        with pytest.raises(FileNotFoundError, match=r"/data/train-1' is a link to .+ not exist"):
            ArrayRecordSource(given)


NO_PATH = (ValueError, TypeError)
TWICE = "is among the files twice"
NO_URL = r"must begin with gs:// and name one object.*\n.*mount the bucket and give the path or"
REFUSED = [
    ([], NO_PATH, None),
    (None, NO_PATH, None),
    (5, NO_PATH, None),
    ([5], NO_PATH, None),
    (b"data/train-0", TypeError, "b.data/train-0. is not a path: pass a str"),
    ("data/train-0[5:2]", ValueError, r"range \[5:2\] of 'data/train-0' ends before"),
    (["data/train-0", "data/train-*"], ValueError, f"'/.+/data/train-0' {TWICE}"),
    (["data/train-0[0:2]", "data/train-0[0:2]"], ValueError, f"'/.+/data/train-0' {TWICE}"),
    (["data/train-0[0:2]", "data/train-0[1:3]"], ValueError, f"'/.+/data/train-0' {TWICE}"),
    (["data/train-0", "./data/train-0"], ValueError, f"'/.+/data/train-0' {TWICE}"),
    ("data/none-*[0:2]", FileNotFoundError, "no file matches 'data/none-"),
    ("data/more[0:1]", FileNotFoundError, "no file in the folder 'data/more'"),
    (["data/img-2.array_record", "data"], ValueError, f"'/.+/data/img-2.array_record' {TWICE}"),
    (["data/train-0", "data/dataset_info.json"], RuntimeError, "info.json' cannot be read"),
    ("gs://bucket/img-*", ValueError, NO_URL),
    ("s3://bucket/img-0", ValueError, NO_URL),
    ("s3://bucket/img-*", ValueError, NO_URL),
    ("https://host/img-0[0:10]", ValueError, NO_URL),
    (instruction("file:///data/img-0"), ValueError, NO_URL),
]


@pytest.mark.parametrize(("given", "error", "message"), REFUSED)
def test_what_cannot_be_read_is_refused_at_once(tree, given, error, message):
    with pytest.raises(error, match=message):
        ArrayRecordSource(given)


def test_a_range_past_the_end_of_its_file_is_named(paths):
    with pytest.raises(ValueError, match="of-00004' has 7 records, so it has no record 9"):
        ArrayRecordSource(f"{paths[0]}[0:10]")[9]


@pytest.mark.parametrize(
    ("error", "heals"),
    [
        (ValueError("UNAVAILABLE: Error reading 'gs://bucket/object'"), True),
        (ValueError("NOT_FOUND: Error opening 'gs://bucket/object'"), False),
        (RuntimeError("read() failed: Input/output error; reading /mnt/train-0"), True),
        (RuntimeError("Corrupted Riegeli/records file: chunk data hash mismatch"), False),
    ],
)
def test_what_a_second_read_may_heal_is_tried_again(paths, error, heals, reader):
    errors = [error]

    class Failing(reader):
        def read(self, positions):
            if errors:
                raise errors.pop()
            return self.reader.read(positions)

    reader.use(Failing)
    ds = grain.MapDataset.source(ArrayRecordSource(paths)).map(decode).batch(4)
    with iter(ds.shard_to(data_mesh(2), num_threads=1)) as batches:
        if heals:
            assert ids(batches) == [list(range(k, k + 4)) for k in range(0, 32, 4)]
            assert batches.stats().faults.retries >= 1
        else:
            with pytest.raises(type(error), match=re.escape(str(error))):
                next(batches)


def test_the_home_folder_may_be_written_as_a_tilde(tree, monkeypatch):
    monkeypatch.setenv("HOME", f"{tree}/data")
    monkeypatch.chdir(tree / "empty")
    for given in ["~/train-?", "~/train-0", Path("~/train-0"), "~/train-0[0:4]"]:
        source = ArrayRecordSource(given)
        assert (source.paths, len(source)) == ([f"{tree}/data/train-0"], SIZES[3])
    with pytest.raises(FileNotFoundError, match=re.escape(f"exists: '{tree}/data', which holds")):
        ArrayRecordSource("~/missing-*")


def test_who_gives_a_parquet_file_is_told_how_to_read_it(tmp_path):
    path = str(tmp_path / "rows.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2]}), path)
    with pytest.raises(RuntimeError, match=r"rows.parquet.*\n.*Parquet.* grain_shard\.feeds"):
        ArrayRecordSource(path)


@pytest.fixture
def bucket(paths, monkeypatch):
    """A Google bucket on this machine: its objects by name."""
    objects = {"train-0": Path(paths[2]).read_bytes()}

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            content = objects.get(re.search(r"/o/([^?]+)", self.path)[1])
            self.send_response(404 if content is None else 206)
            body = content or b""
            if content is not None:
                first, last = re.fullmatch(r"bytes=(\d*)-(\d*)", self.headers["Range"]).groups()
                start = int(first) if first else max(0, len(content) - int(last))
                stop = int(last) + 1 if first and last else len(content)
                body = content[start:stop]
                range_ = f"bytes {start}-{start + len(body) - 1}/{len(content)}"
                self.send_header("Content-Range", range_)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setenv("CLOUD_STORAGE_EMULATOR_ENDPOINT", url)
        yield
        server.shutdown()


def test_an_object_of_a_google_bucket_is_read_by_its_url(bucket):
    source = ArrayRecordSource(["gs://bucket/train-0[0:3]", "gs://bucket/train-0[3:5]"])
    assert len(ArrayRecordSource("gs://bucket/train-0")) == SIZES[2]
    assert read_at_once(source) == [8, 9, 10, 11, 12]
    with pytest.raises(
        RuntimeError,
        match=r"gs://bucket/missing.*404(.|\n)*can reach the bucket and read the object",
    ):
        ArrayRecordSource("gs://bucket/missing")


def test_at_most_half_of_the_files_that_a_process_may_open_are_open(paths, monkeypatch, reader):
    opened, alive = [], weakref.WeakSet()

    class Noted(reader):
        def __init__(self, path, **options):
            super().__init__(path, **options)
            opened.append(path)
            alive.add(self)

    reader.use(Noted)
    monkeypatch.setattr(array_record_source.resource, "getrlimit", lambda kind: (6, 6))
    monkeypatch.setattr(array_record_source, "_open_files", [])
    source = ArrayRecordSource(paths)
    assert (len(opened), len(alive)) == (4, 3)
    others = [source, ArrayRecordSource(paths), ArrayRecordSource(paths[:2])]
    for one in others:
        assert list(one) == [record(i) for i in range(len(one))]
        assert read_at_once(one) == [*range(len(one))]
        assert len(alive) <= 4


@pytest.fixture
def impatient(monkeypatch):
    """Threads open and read every file but the first one, as if that had taken long."""
    monkeypatch.setattr(array_record_source, "_PATIENCE_S", -1)


@pytest.mark.parametrize("what", ["open", "read"])
def test_slow_files_are_opened_and_read_at_the_same_time(paths, what, impatient, reader):
    together = threading.Barrier(len(paths) - 1)  # passed only by as many threads at once

    class Meeting(reader):
        def __init__(self, path, **options):
            self.waits = path != paths[0]
            if what == "open" and self.waits:
                together.wait(HANG_S)
            super().__init__(path, **options)

        def read(self, positions):
            if what == "read" and self.waits:
                together.wait(HANG_S)
            return self.reader.read(positions)

    reader.use(Meeting)
    assert read_at_once(ArrayRecordSource(paths)) == [*range(TOTAL)]


def test_one_thread_serves_many_callers_and_an_error_leaves_no_call_behind(
    paths, impatient, monkeypatch
):
    with ThreadPoolExecutor(1) as thread, ThreadPoolExecutor(8) as callers:
        monkeypatch.setattr(array_record_source, "_threads", lambda: thread)
        for _ in range(2):
            with pytest.raises(FileNotFoundError, match="missing"):
                ArrayRecordSource([paths[0], f"{paths[0]}-missing", *paths[1:]])
            source = ArrayRecordSource(paths)
            calls = [callers.submit(read_at_once, source) for _ in range(20)]
            for call in calls:
                assert call.result(HANG_S) == [*range(TOTAL)]


def test_the_caller_reads_if_no_thread_can_be_had(paths, impatient, monkeypatch):
    # As at the end of the program, where a thread of the user may still train.
    monkeypatch.setattr(ThreadPoolExecutor, "submit", mock.Mock(side_effect=RuntimeError))
    assert read_at_once(ArrayRecordSource(paths)) == [*range(TOTAL)]


@pytest.mark.slow
def test_a_forked_process_reads_and_a_program_that_reads_ahead_ends(tmp_path):
    code = """
        import os, signal, warnings
        import grain, jax, numpy as np
        import grain_shard
        from grain_shard.sources import array_record_source, record_files

        class Reader:  # because array_record's own may crash in the threads of a forked process
            def __init__(self, path, **options):
                self.number = int(path[1:])
            ok = lambda self: True
            num_records = lambda self: 10
            writer_options_string = lambda self: "group_size:1"
            read = lambda self, positions: [10 * self.number + position for position in positions]

        warnings.simplefilter("ignore")  # JAX's, of os.fork
        record_files.ArrayRecordReader = Reader
        array_record_source._PATIENCE_S = -1  # threads read
        source = grain_shard.ArrayRecordSource([f"/{number}" for number in range(4)])
        if (child := os.fork()) == 0:
            signal.alarm(30)  # so that a hang is a failure
            os._exit(7 if source._getitems(range(40)) == list(range(40)) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        ds = grain.MapDataset.source(source).repeat().map(lambda i: {"id": np.int32(i)})
        batches = iter(ds.batch(16).shard_to(jax.make_mesh((1,), ("data",))))
        print(next(batches)["id"].tolist() == list(range(16)))
        """
    assert run(textwrap.dedent(code), tmp_path / "program.py") == (0, "True\n", "")


def test_the_current_folder_may_change_after_the_source_was_made(tree, monkeypatch):
    given = ["data/train-0[0:4]", Path("data/img-10.array_record")]
    source = ArrayRecordSource(given)
    records, copied = list(ArrayRecordSource(given)), pickle.dumps(source)
    (tree / "empty/data").mkdir()
    for name in ["data/train-0", "data/img-10.array_record"]:
        shutil.copy(tree / "what[1]", tree / "empty" / name)  # other records
    monkeypatch.chdir(tree / "empty")
    assert list(source) == list(pickle.loads(copied)) == records
    assert source.where(4) == (f"{tree}/data/img-10.array_record", 0)


@pytest.mark.parametrize("index", [TOTAL, -TOTAL - 1])
def test_an_index_that_does_not_exist_is_an_error(paths, index):
    source = ArrayRecordSource(paths)
    for read in (lambda: source[index], lambda: source._getitems([0, index])):
        with pytest.raises((IndexError, ValueError)):
            read()
