"""After Ctrl-C the same iterator goes on with the next batch. On several hosts all get an error.

Signals at random times, many hundred of a kind: benchmarks/soak/signals.py.
"""

import contextlib
import itertools
import random
import signal
import sys
import threading
from pathlib import Path

import grain
import jax
import numpy as np
import pytest

import grain_shard
from benchmarks.soak import signals
from grain_shard import rehearse
from grain_shard.threads.pool import Pool
from tests.conftest import (
    HOSTS_S,
    Restorable,
    assert_ended,
    background_threads,
    data_mesh,
    eventually,
    numbered,
    wait,
)
from tests.on_hosts import own_rows
from tests.pipelines import feeds_of

OURS = str(Path(grain_shard.__file__).parent)


class Interrupt:
    """As a context: KeyboardInterrupt at one of the lines of the package that this thread comes to.

    Args:
        line: The number of that line; -1 for none.

    Attributes:
        lines: The number of lines that it came to.
        where: The place of the interrupt; None if there were fewer lines.
    """

    def __init__(self, line):
        self.line, self.lines, self.where = line, 0, None

    def __enter__(self):
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info):
        sys.settrace(None)

    def _call(self, frame, event, arg):
        return self._line if frame.f_code.co_filename.startswith(OURS) else None

    def _line(self, frame, event, arg):
        if event == "line":
            self.lines += 1
            if self.where is None and 0 < self.line <= self.lines:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


def stream(start=0):
    records = grain.MapDataset.range(start, start + 20).map(lambda i: {"id": np.int32(i)})
    return records.to_iter_dataset().batch(8)


def in_feeds():
    return feeds_of(lambda feed, i: {"id": np.int32(10 * feed + i)}, 4, 8, length=5)


KINDS = {
    "random access": lambda mesh: numbered(20, 8).shard_to(mesh),
    "a global stream": lambda mesh: stream().shard_to(mesh, rows="global"),
    "a local stream": lambda mesh: stream(100 * jax.process_index()).shard_to(mesh, rows="local"),
    "feeds": lambda mesh: in_feeds().shard_to(mesh),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", signals.KINDS)
def test_after_signals_at_random_times_no_batch_is_lost_or_doubled(kind):
    count, most_s = (3, 0.5) if kind == "workers" else (60, 0.02)
    interrupts = signals.Interrupts(random.Random(kind), most_s)
    try:
        signals.interrupted(signals.KINDS[kind](data_mesh(2)), count, interrupts)
    finally:
        interrupts.end()
    assert interrupts.sent == count


def test_an_interrupted_stream_without_a_state_says_that_it_cannot_go_on():
    def make_batches():
        for i in range(4):
            yield {"id": np.arange(8) + 8 * i}

    iterator = iter(grain_shard.from_iterable(make_batches).shard_to(data_mesh(2)))
    next(iterator)
    with pytest.raises(KeyboardInterrupt), Interrupt(30):  # a line of the wait for the batch
        next(iterator)
    for _ in range(2):
        with pytest.raises(grain_shard.StateError, match="generator has no state") as error:
            next(iterator)
    assert "an interrupt" in error.value.__notes__[0]
    iterator.reset()
    assert own_rows(next(iterator)) == {i: i for i in range(8)}


class Blocked(Restorable):
    """Its second batch waits for an event."""

    goes_on, is_inside = threading.Event(), threading.Event()

    def __next__(self):
        if self.next == 1:
            self.is_inside.set()
            wait(self.goes_on)
        return super().__next__()


def test_no_second_thread_reads_a_stream_while_the_interrupted_one_is_inside(no_patience):
    source = Blocked([{"id": np.arange(8) + first} for first in (8, 16, 24)])
    with iter(grain_shard.from_iterable(source).shard_to(data_mesh(2))) as iterator:
        assert own_rows(next(iterator))[0] == 8
        wait(source.is_inside)
        with pytest.raises(KeyboardInterrupt), Interrupt(30):
            next(iterator)
        with pytest.raises(grain_shard.GrainShardError, match="still inside the source"):
            next(iterator)
        threads = background_threads()
        source.goes_on.set()
        assert_ended(threads)
        assert [own_rows(next(iterator))[0] for _ in range(2)] == [16, 24]


@pytest.mark.parametrize("error", [RuntimeError, TimeoutError])
def test_an_error_of_a_signal_handler_is_an_interrupt(error):
    def handler(number, frame):
        raise error("preempted")

    asked = threading.Event()

    def load(i):
        if i == 16 and not asked.is_set():
            asked.set()
            signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)
        return {"id": np.int32(i)}

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        records, rows, errors = grain.MapDataset.range(32).map(load), [], 0
        with iter(records.batch(8).shard_to(data_mesh(2), num_threads=1)) as iterator:
            while len(rows) < 4:
                try:
                    rows.append(own_rows(next(iterator))[0])
                except error:
                    errors += 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (rows, errors) == ([0, 8, 16, 24], 1)


def test_an_interrupt_in_the_comparison_of_a_run_of_one_batch_is_raised(monkeypatch):
    def interrupted(pool, has_come, **options):
        eventually(lambda: pool.known().end is not None)
        raise KeyboardInterrupt

    with iter(numbered(8, 8).shard_to(data_mesh(2))) as iterator:
        with monkeypatch.context() as patch:
            patch.setattr(Pool, "wait_for", interrupted)
            with pytest.raises(KeyboardInterrupt):
                next(iterator)
        assert [own_rows(batch)[0] for batch in iterator] == [0]


ENDLESS = {
    "random access": lambda mesh: numbered(20, 8).repeat().shard_to(mesh),
    "a stream": lambda mesh: grain.experimental.RepeatIterDataset(stream()).shard_to(
        mesh, rows="global"
    ),
    "feeds": lambda mesh: feeds_of(
        lambda feed, i: {"id": np.int32(10 * feed + i % 5)}, 4, 8, length=10**6
    ).shard_to(mesh),
}


def what_they_raise():
    """On a host: what the loop gets after an interrupt on host 1, and then from a saved state."""
    found = []
    for kind, line in itertools.product(ENDLESS.values(), (3, 40, 90)):
        with iter(kind(jax.make_mesh((4,), ("data",)))) as iterator:
            next(iterator)
            state = iterator.get_state()
            # After an interrupt that comes before the run is used, the next call goes on.
            lines, error = itertools.count(line), None
            while error is None:
                interrupt = Interrupt(next(lines) if jax.process_index() == 1 else -1)
                with contextlib.suppress(KeyboardInterrupt), interrupt:
                    try:
                        for _ in iterator:
                            pass
                    except grain_shard.AgreementError as raised:
                        error = raised
            iterator.set_state(state)
            found.append((str(error).split("\n")[0], own_rows(next(iterator))))
    return found


@pytest.mark.slow
def test_an_interrupt_on_one_of_two_hosts_is_an_error_on_both():
    first, second = rehearse.run(what_they_raise, hosts=2, devices_per_host=2, timeout_s=HOSTS_S)
    for (here, rows), (there, other_rows) in zip(first, second, strict=True):
        assert "host 1 failed" in here
        assert there.startswith("KeyboardInterrupt interrupted a call of next on this host, host 1")
        assert len(rows | other_rows) == 8
