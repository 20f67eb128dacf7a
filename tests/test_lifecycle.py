"""The life of the whole chain: C8 (a clean life) and C9 (bounded memory)."""

import gc
import re
import signal
import threading
import weakref
from concurrent.futures import Executor, Future
from types import SimpleNamespace

import grain
import jax
import numpy as np
import pytest

from grain_shard import DevicePut, GrainShardError, ShardingTree, from_iterable
from grain_shard.iteration import long_wait
from grain_shard.threads import pool
from tests.conftest import (
    HANG_S,
    Made,
    assert_ended,
    background_threads,
    data_mesh,
    eventually,
    ids,
    numbered,
    wait,
)
from tests.pipelines import IN_TURN, Odd, feeds_of, shared_out
from tests.programs import run, script, start, without_grains_warning


def number(i):
    return {"id": np.int32(i)}


def feeds(records, global_batch_size):
    """Batches of four feeds, each of which gives its rows of batch after batch."""
    rows = global_batch_size // 4

    def row(feed, i):
        return records[i // rows * global_batch_size + feed * rows + i % rows]

    return feeds_of(row, 4, global_batch_size, length=len(records) // 4)


def stream(ds):
    """The same batches as a stream: `.shard_to` does not look through this map."""
    return ds.to_iter_dataset(IN_TURN).map(lambda batch: batch)


KINDS = {
    "random access": lambda records, size: records.batch(size),
    "stream": lambda records, size: stream(records.batch(size)),
    "feeds": feeds,
}


@pytest.fixture(params=KINDS.values(), ids=KINDS)
def kind(request):
    """Makes batches of numbered records, by one kind of pipeline."""

    def build(num_records=80, decode=number, global_batch_size=8):
        return request.param(grain.MapDataset.range(num_records).map(decode), global_batch_size)

    return build


class TestEnd:
    @pytest.mark.filterwarnings("ignore:two iterators of this dataset gave only")
    def test_breaking_early_again_and_again_leaves_no_thread(self, mesh, kind):
        ds = kind().shard_to(mesh, num_threads=2)
        started = set()
        for _ in range(20):
            for batch in ds:
                started |= background_threads()
                assert ids([batch]) == [list(range(8))]
                break
        assert len(started) >= 20
        assert_ended(started)

    def test_at_the_end_the_threads_end_and_next_keeps_raising_stop_iteration(self, mesh, kind):
        before = background_threads()
        iterator = iter(kind(16).shard_to(mesh))
        assert ids(iterator) == [list(range(8)), list(range(8, 16))]
        assert_ended(background_threads() - before)
        state = iterator.get_state()
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        assert iterator.get_state() == state

    def test_a_context_manager_closes_for_good(self, mesh, kind):
        with iter(kind().shard_to(mesh)) as iterator:
            next(iterator)
            state = iterator.get_state()
            threads = background_threads()
            assert threads
        assert not any(thread.is_alive() for thread in threads)
        iterator.close()
        assert iterator.get_state() == state
        with pytest.raises(ValueError, match="closed"):
            iterator.set_state(state)
        grains = iter(numbered(80, 8).to_iter_dataset())
        next(grains)
        grains.close()
        for closed in (grains, iterator, iterator):
            with pytest.raises(ValueError, match="closed iterator"):
                next(closed)
        iter(kind().shard_to(mesh)).close()  # before the first batch

    def test_garbage_collection_ends_the_threads(self, mesh, kind):
        def decode(i):
            return number(i)

        before = background_threads()
        iterator = iter(kind(decode=decode).shard_to(mesh))
        next(iterator)
        threads, kept = background_threads() - before, weakref.ref(decode)
        gone = weakref.ref(iterator)
        assert threads
        del iterator, decode
        gc.collect()
        assert gone() is None
        assert_ended(threads)
        gc.collect()
        assert kept() is None, "the functions of the pipeline are freed, too"


class TestALongWait:
    @pytest.fixture
    def logged(self, monkeypatch):
        """Lines of the log. After each of them `then` is called, in the thread of the loop."""
        logged = SimpleNamespace(lines=[], then=lambda: None)

        def log(level, text, seconds, *args):
            logged.lines.append(text % args)
            logged.then()

        monkeypatch.setattr(long_wait, "_LONG_S", 0.0)
        monkeypatch.setattr(long_wait.logging, "log_every_n_seconds", log)
        return logged

    def test_the_log_has_the_lines_at_which_the_loop_and_a_thread_are(self, mesh, kind, logged):
        def decode(i):
            if i == 9:
                assert go_on.wait(HANG_S)
            return number(i)

        def loop(ds):
            return len(list(ds))

        go_on = threading.Event()
        logged.then = go_on.set
        assert loop(kind(decode=decode).shard_to(mesh, num_threads=1)) == 10
        at = f"at test_lifecycle.py:{loop.__code__.co_firstlineno + 1}"
        text = rf"loop {at} has waited [1-9]\d* s for its next batch."
        ends = r" Threads .* at test_lifecycle.py:\d+ in decode\."
        assert re.search(text + ends, logged.lines[0])

    def test_it_is_logged_too_while_the_loop_waits_for_the_first_record_of_the_source(
        self, mesh, logged
    ):
        class Source(list):
            def __getitem__(self, i):
                if i == 0:  # it is read beside the first batch, and in no batch
                    assert go_on.wait(HANG_S)
                return number(i)

        go_on = threading.Event()
        logged.then = go_on.set
        ds = grain.MapDataset.source(Source(range(80)))[8:].batch(8).shard_to(mesh)
        assert ids([next(iter(ds))]) == [list(range(8, 16))]
        assert "at test_lifecycle.py:" in logged.lines[0]

    def test_without_such_a_thread_it_names_the_workers(self, mesh, logged):
        class NoWorkers(Executor):
            def submit(self, task, *args):
                if logged.lines:
                    raise OSError("no worker")
                tasks.append(Future())
                return tasks[-1]

        tasks = []
        logged.then = lambda: [tasks.pop().cancel() for _ in list(tasks)]
        with pytest.raises(GrainShardError, match="accepts no task: OSError: no worker"):
            next(iter(numbered(80, 8).shard_to(mesh, executor=NoWorkers())))
        assert "num_workers or an executor, check that the workers run." in logged.lines[0]


# None has Grain's own `.batch` of a `MapDataset`, which refers to itself once it has made a batch.
FREED = {
    "random access": lambda records: records.batch(8),
    "stream": lambda records: records.to_iter_dataset().batch(8),
    "from_iterable": lambda records: from_iterable(lambda: ([r["id"]] * 8 for r in records)).map(
        lambda ids: {"id": np.array(ids)}
    ),
    "feeds": lambda records: shared_out(records, 2, 8, grain.ReadOptions()),
}


@pytest.mark.parametrize("until", ["closed", "the end"])
@pytest.mark.parametrize("batches", FREED.values(), ids=FREED)
@pytest.mark.filterwarnings("ignore:the stream has an iterator without")
def test_source_and_functions_are_freed_without_the_garbage_collector(mesh, batches, until):
    class Source(list):
        pass

    def build(source):
        records = grain.MapDataset.source(source).map(lambda i: number(source[i]))
        return batches(records).shard_to(mesh)

    source = Source(range(24))
    gone = weakref.ref(source)
    gc.collect()
    gc.disable()
    try:
        iterator = iter(build(source))
        del source
        if until == "closed":
            next(iterator)
            iterator.close()
        else:
            assert len(list(iterator)) >= 3
        assert gone() is not None
        del iterator
        eventually(lambda: gone() is None)
    finally:
        gc.enable()


class Unclosable(Made):
    """Batches whose iterator cannot be closed. Each says that it is, and fails the first time."""

    def __init__(self, num_batches=100, wait_for=None):
        super().__init__(lambda i: {"x": np.full(8, i + 1, np.int32)}, num_batches, self.close)
        self.wait_for, self.closed = wait_for, []

    def close(self, iterator):
        if iterator not in self.closed:  # Grain closes it again when it collects it
            self.closed.append(iterator)
            if self.wait_for is not None:
                wait(self.wait_for)
            raise OSError("cannot close")


WHILE_CLOSING = "grain_shard: while closing this host's stream"


class TestWhatCannotBeClosed:
    """Nothing is printed from a thread: the caller sees the error, or the log has it."""

    @pytest.fixture
    def logged(self, monkeypatch):
        errors = []
        monkeypatch.setattr(pool.logging, "error", lambda text, exc_info: errors.append(exc_info))
        return errors

    @pytest.mark.parametrize(
        ("num_batches", "asked"), [(0, True), (1, True), (100, True), (100, False)]
    )
    def test_close_raises_it_once_after_everything_else_is_closed(
        self, mesh, num_batches, asked, logged
    ):
        ds = Unclosable(num_batches)
        iterator = iter(ds.shard_to(mesh))
        if asked:
            next(iterator, None)
        threads = background_threads()
        with pytest.raises(OSError, match="cannot close") as raised:
            iterator.close()
        assert not any(thread.is_alive() for thread in threads)
        assert raised.value.__notes__ == [WHILE_CLOSING]
        iterator.close()
        with pytest.raises(ValueError, match="closed"):
            next(iterator)
        del iterator
        gc.collect()
        assert (len(ds.closed), logged) == (1, [])

    def test_it_does_not_hide_the_error_that_ends_the_loop(self, mesh, logged):
        def loop():
            with iter(Unclosable().shard_to(mesh)) as iterator:
                next(iterator)
                raise KeyError("of the loop")

        with pytest.raises(KeyError, match="of the loop"):
            loop()
        assert [str(error) for error in logged] == ["cannot close"]

    def test_a_state_is_taken_all_the_same_and_leaving_the_context_raises_it(self, mesh):
        def go_back():
            with iter(Unclosable().shard_to(mesh)) as iterator:
                next(iterator)
                state = iterator.get_state()
                next(iterator)
                with pytest.raises(OSError, match="cannot close"):
                    iterator.set_state(state)
                assert set(np.asarray(next(iterator)["x"])) == {2}

        with pytest.raises(OSError, match="cannot close"):
            go_back()

    @pytest.mark.parametrize("num_batches", [0, 1, 100])
    def test_of_an_iterator_that_is_collected_it_is_logged(self, mesh, num_batches, logged):
        iterator = iter(Unclosable(num_batches).shard_to(mesh))
        next(iterator, None)
        del iterator
        gc.collect()
        eventually(lambda: logged)
        assert [(str(error), error.__notes__) for error in logged] == [
            ("cannot close", [WHILE_CLOSING])
        ]

    def test_after_close_has_waited_long_enough_it_is_logged(self, mesh, logged, no_patience):
        goes_on = threading.Event()
        iterator = iter(Unclosable(wait_for=goes_on).shard_to(mesh))
        next(iterator)
        iterator.close()
        assert logged == []
        goes_on.set()
        eventually(lambda: logged)
        assert [str(error) for error in logged] == ["cannot close"]


@pytest.mark.parametrize("num_threads", [1, 2, 128])
@pytest.mark.parametrize(
    "error", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, Odd]
)
def test_an_error_of_any_class_comes_in_its_place_and_stays_until_set_state(
    mesh, kind, error, num_threads
):
    before, broken = background_threads(), threading.Event()
    broken.set()

    def decode(i):
        if i == 21 and broken.is_set():
            raise error("twenty-one")
        return number(i)

    iterator = iter(kind(32, decode).shard_to(mesh, num_threads=num_threads))
    assert ids([next(iterator), next(iterator)]) == [list(range(8)), list(range(8, 16))]
    state = iterator.get_state()
    raised = []
    for _ in range(3):
        with pytest.raises(error, match="twenty-one") as caught:
            next(iterator)
        assert "decode" in [entry.name for entry in caught.traceback]
        raised.append((caught.value, len(caught.traceback)))
    assert raised == [raised[0]] * 3, "the same error, its traceback no longer each time"
    assert iterator.get_state() == state
    assert_ended(background_threads() - before)
    broken.clear()
    iterator.set_state(state)
    assert ids(iterator) == [list(range(16, 24)), list(range(24, 32))]
    iterator.close()


class TestPromptness:
    @pytest.mark.parametrize("num_threads", [1, 2])
    def test_a_batch_is_handed_out_as_soon_as_it_is_ready(self, kind, num_threads):
        release = threading.Event()

        def decode(i):
            if i == 4:  # the first record of batch 1
                wait(release)
            return number(i)

        ds = kind(12, decode, 4)
        iterator = iter(ds.shard_to(data_mesh(2), num_threads=num_threads, cpu_buffer_size=8))
        assert ids([next(iterator)]) == [[0, 1, 2, 3]]
        assert not release.is_set()
        release.set()
        assert ids(iterator) == [[4, 5, 6, 7], [8, 9, 10, 11]]

    def test_start_prefetch_works_ahead_of_the_first_next(self, mesh, kind):
        began, before = threading.Event(), background_threads()
        with iter(kind(decode=lambda i: began.set() or number(i)).shard_to(mesh)) as it:
            state = it.get_state()
            assert not began.is_set()
            assert background_threads() == before
            it.start_prefetch()
            wait(began)
            assert it.get_state() == state, "working ahead does not move the state"


class TestMemory:
    """Counted in batches, with a consumer so slow that all buffers are full at each step."""

    SHAPE = (8, 7, 13)  # nothing else has this shape

    @pytest.mark.parametrize(
        ("cpu", "device", "num_threads"), [(1, 1, 1), (4, 2, 1), (4, 2, 2), (1, 3, 2), (3, 1, 8)]
    )
    @pytest.mark.parametrize("as_stream", [False, True])
    def test_only_so_many_batches_wait_on_the_host_and_on_the_devices(
        self, cpu, device, num_threads, as_stream
    ):
        references, begun, most = [], [], [0]
        counting = threading.Lock()

        def on_host():
            return sum(reference() is not None for reference in references)

        def make(k):
            array = np.full(self.SHAPE, k, np.float32)
            with counting:
                references.append(weakref.ref(array))
                begun.append(k)
                most[0] = max(most[0], on_host())
            return {"x": array}

        def on_devices():
            return sum(array.shape == self.SHAPE for array in jax.live_arrays())

        ds = grain.MapDataset.range(40).map(make)
        if as_stream:
            ds = stream(ds)
        buffers = {"cpu_buffer_size": cpu, "device_buffer_size": device}
        put = DevicePut(ShardingTree.of(data_mesh(2)), num_threads=num_threads, **buffers)
        assert on_devices() == 0
        with iter(ds.pipe(put)) as iterator:
            for k in range(12):
                batch = next(iterator)
                # Works ahead as far as it may,
                eventually(lambda: len(begun) >= k + 1 + cpu + device)
                eventually(lambda: on_devices() == device + 1)  # + 1: the consumer's
                assert np.asarray(batch["x"])[0, 0, 0] == k
                # and no farther.
                assert len(begun) <= k + 1 + cpu + device
                assert on_devices() <= device + 1
        assert most[0] <= cpu + 1, "+ 1: the one in flight between host and devices"
        del batch
        eventually(lambda: on_devices() == 0 and on_host() == 0)


# Else closing waits 5 seconds for a thread that sleeps for an hour, in each test that has one.
BLOCKED_THREADS_ARE_LEFT_SOON = """
        from grain_shard.threads import pool
        pool._JOIN_TIMEOUT_S = 0.5
        """


EXITS = {
    "with a source that sleeps for an hour": BLOCKED_THREADS_ARE_LEFT_SOON
    + """
        inside = threading.Event()
        def decode(i):
            if i == 8:
                inside.set()
                time.sleep(3600)
            return {"id": np.int32(i)}
        iterator = iter(pipeline(decode))
        next(iterator)
        inside.wait()
        print("end")
        """,
    "by sys.exit in the loop": """
        for batch in pipeline():
            print("end", flush=True)
            sys.exit(0)
        """,
    "with ten busy iterators in a reference cycle, and one before its first batch": """
        cycle = [iter(pipeline(num_threads=4)) for _ in range(10)]
        cycle.append(cycle)
        for iterator in cycle[:10]:
            next(iterator)
        iterator = iter(pipeline())
        iterator.start_prefetch()
        print("end")
        """,
    "with a stream that has a thread of Grain's in it": """
        ds = grain.MapDataset.range(100_000).map(lambda i: {"id": i}).batch(8).to_iter_dataset()
        ds = grain.experimental.ThreadPrefetchIterDataset(ds, prefetch_buffer_size=2)
        iterator = iter(ds.map(lambda b: b).shard_to(mesh()))
        for _ in range(3):
            next(iterator)
        print("end")
        """,
    "with feeds, each with threads of Grain's in it, also iterated alone and never closed": """
        alone, iterator = iter(feeds()), iter(feeds().shard_to(mesh(), num_threads=2))
        for _ in range(3):
            next(alone), next(iterator)
        print("end")
        """,
    "while a source that nobody refers to any more is being closed": """
        from tests.conftest import Made
        def close(iterator):
            if not closing.is_set():  # Grain closes it again when it is collected
                closing.set()
                threading.main_thread().join()  # until the interpreter ends
                print("end", flush=True)
        closing = threading.Event()
        iterator = iter(Made(lambda i: {"id": np.arange(8)}, on_close=close).shard_to(mesh()))
        next(iterator)
        del iterator
        closing.wait()
        """,
    "with a stream and feeds of which nobody asked for a batch": """
        stream = grain.MapDataset.range(64).map(lambda i: {"id": i}).to_iter_dataset().batch(8)
        iterators = iter(stream.shard_to(mesh())), iter(feeds().shard_to(mesh()))
        print("end")
        """,
    "while it is busy below an iterator of Grain's": """
        iterator = iter(pipeline().map(lambda batch: batch))
        next(iterator)
        print("end")
        """,
    "with a worker that takes longer to end than the exit waits for threads": """
        from grain_shard.threads import pool
        pool._JOIN_TIMEOUT_S = 1.0
        def decode(i):
            import multiprocessing.util as util
            if i % 16 == 0 and multiprocessing.parent_process() is not None:
                util.Finalize(None, time.sleep, (4,), exitpriority=10)
            return {"id": np.int32(i)}
        import multiprocessing
        if __name__ == "__main__":
            iterator = iter(pipeline(decode, num_workers=2))
            next(iterator)
            print("end")
        """,
    "with two workers": """
        if __name__ == "__main__":
            iterator = iter(pipeline(num_workers=2))
            for _ in range(3):
                next(iterator)
            print("end")
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("ds", ["pipeline()", "feeds().shard_to(mesh())"])
def test_in_a_forked_process_next_is_an_error_and_close_waits_for_no_lock(ds, tmp_path):
    body = """
        import gc, warnings
        warnings.simplefilter("ignore")  # JAX's, of os.fork
        iterator = iter(DS)
        next(iterator)
        held, forked, taken = threading.Event(), threading.Event(), []
        def hold():  # as a thread that is about to go on with its work
            for thing in gc.get_objects():
                module = str(type(thing).__module__)
                if module.startswith(("grain_shard.threads", "grain_shard.streams")):
                    for value in list(getattr(thing, "__dict__", {}).values()):
                        if hasattr(value, "acquire") and value.acquire(blocking=False):
                            taken.append(value)
            held.set()
            forked.wait()
            for lock in taken:
                lock.release()
        threading.Thread(target=hold).start()
        held.wait()
        child = os.fork()
        if child == 0:
            try:
                for batch in iterator:  # those that were ready
                    pass
            except RuntimeError as error:
                print("child:", error, flush=True)
            iterator.close()
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        assert taken
        forked.set()
        next(iterator)
        print("end")
        """
    code, out, err = run(script(body.replace("DS", ds)), tmp_path / "program.py")
    assert (code, err) == (0, "")
    problem, remedy, end = out.splitlines()
    assert problem.startswith(
        "child: os.fork() made this process and copied no threads, so the iterator cannot make"
    )
    assert (remedy.strip().split()[0], end) == ("remedy:", "end")


@pytest.mark.slow
class TestInterpreterExit:
    @pytest.mark.parametrize("body", EXITS.values(), ids=EXITS.keys())
    def test_is_clean(self, body, tmp_path):
        assert run(script(body), tmp_path / "program.py") == (0, "end\n", "")

    @pytest.mark.parametrize(
        "body",
        [
            """
            for batch in pipeline():
                raise ZeroDivisionError("the user's")
            """,
            """
            def batches():
                with iter(pipeline()) as iterator:
                    yield from iterator

            def train():
                generator = batches()  # closed by the interpreter, with the error's traceback
                next(generator)
                raise ZeroDivisionError("the user's")

            train()
            """,
        ],
        ids=["in a loop", "beside a generator that closes the iterator"],
    )
    def test_an_error_of_the_user_is_all_that_is_printed(self, body, tmp_path):
        code, _, err = run(script(body), tmp_path / "program.py")
        assert code == 1
        assert err.startswith("Traceback")
        assert err.endswith("ZeroDivisionError: the user's\n")
        assert err.count("Traceback") == 1

    def test_what_cannot_be_closed_is_logged(self, tmp_path):
        body = """
            class Source:
                def __iter__(self):
                    try:
                        while True:
                            yield {"x": np.zeros(8)}
                    finally:
                        raise OSError("cannot close")
            ds = grain_shard.from_iterable(Source(), rows="global")
            iterator = iter(ds.shard_to(mesh()))
            next(iterator)
            print("end")
            """
        code, out, err = run(script(body), tmp_path / "program.py")
        assert (code, out) == (0, "end\n")
        assert "grain_shard: closing a part of the pipeline failed" in err
        assert err.count("OSError: cannot close") == 1
        assert "grain_shard: while closing this host's stream" in err

    @pytest.mark.parametrize("caught", [True, False])
    def test_after_ctrl_c_in_next_is_clean(self, caught, tmp_path):
        body = """
            asked = threading.Event()
            def decode(i):
                if i == 8:
                    asked.wait()
                    print("waits", flush=True)
                    time.sleep(3600)
                return {"id": np.int32(i)}
            iterator = iter(pipeline(decode))
            next(iterator)
            try:
                asked.set()
                next(iterator)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
                if not CAUGHT:
                    raise
            """
        code = script(BLOCKED_THREADS_ARE_LEFT_SOON, body.replace("CAUGHT", str(caught)))
        process = start(code, tmp_path / "program.py")
        try:
            assert process.stdout.readline() == "waits\n"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=HANG_S)
        finally:
            process.kill()
        err = without_grains_warning(err)
        assert out == "interrupted\n"
        if caught:
            assert (process.returncode, err) == (0, "")
        else:
            assert process.returncode == -signal.SIGINT
            assert err.count("Traceback") == 1
            assert err.endswith("KeyboardInterrupt\n")
