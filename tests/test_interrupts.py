"""An interrupt at any line of the main thread's way through the package, and the loop goes on."""

import contextlib
import gc
import itertools
import sys
from pathlib import Path

import grain
import jax
import numpy as np
import pytest

import grain_shard
from grain_shard import rehearse
from grain_shard.background import Background
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.tasks import Items
from tests.conftest import assert_ended, background_threads, data_mesh, numbered
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
            if self.where is None and 0 < self.line <= self.lines and not is_in_del(frame):
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self._line


def is_in_del(frame):
    """Whether Python would drop what is raised there."""
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


def again(call, *args):
    """Calls it, and once more if it is interrupted, as a loop in a notebook would."""
    try:
        return call(*args)
    except KeyboardInterrupt:
        return call(*args)


def walk(ds, expected):
    """Goes through all batches, and back twice; each batch comes in its turn, with its state."""
    iterator = again(iter, ds)
    beginning = again(iterator.get_state)

    def take(k):
        before = again(iterator.get_state)
        try:
            batch = next(iterator)
        except KeyboardInterrupt:
            assert again(iterator.get_state) == before
            batch = next(iterator)
        assert (own_rows(batch), again(iterator.get_state)) == expected[k]

    for k in range(len(expected)):
        take(k)
    assert again(next, iterator, None) is None
    again(iterator.set_state, expected[0][1])
    take(1)
    again(iterator.reset)
    assert again(iterator.get_state) == beginning
    take(0)
    devices = [t for t in background_threads() if t.name.startswith("grain-shard-device")]
    assert len(devices) == 1
    again(iterator.close)
    with pytest.raises(ValueError, match="closed"):
        again(next, iterator)


def expected_of(ds):
    with iter(ds) as iterator:
        return [(own_rows(batch), iterator.get_state()) for batch in iterator]


def interrupted_walk(ds, expected, line):
    """A walk with an interrupt at a line; which it was."""
    with Interrupt(line) as interrupt:
        try:
            walk(ds, expected)
        except BaseException as error:
            raise AssertionError(f"line {line} of the walk: {interrupt.where}") from error
    return interrupt


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


# Python says so of objects that are half made, when Grain closes them in their __del__.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("every", [41, pytest.param(1, marks=[pytest.mark.slow, pytest.mark.long])])
def test_after_an_interrupt_at_any_line_the_next_batch_is_the_one_that_the_state_says(kind, every):
    ds = KINDS[kind](data_mesh(2))
    expected = expected_of(ds)
    walks = (interrupted_walk(ds, expected, line) for line in itertools.count(1, every))
    last = next(interrupt for interrupt in walks if interrupt.where is None)
    assert last.lines > 500


@pytest.mark.parametrize("kind", KINDS)
def test_threads_end_although_an_interrupt_cuts_the_iterators_own_end(kind, monkeypatch):
    monkeypatch.setattr(ShardedIterator, "__del__", lambda self: None)  # cut at its first line
    others = background_threads()
    iterator = iter(KINDS[kind](data_mesh(2)))
    next(iterator)
    threads = background_threads() - others
    del iterator
    gc.collect()
    assert_ended(threads)


@pytest.mark.parametrize("line", range(1, 10))
def test_an_interrupt_while_a_result_is_released_loses_no_result(line):
    items = Items(iter(range(4)))
    results = Background(lambda item: item, items, buffer_size=3, name="grain-shard-one")
    try:
        for number in range(4):
            assert results.peek() == results.taken == number
            with contextlib.suppress(KeyboardInterrupt), Interrupt(line):
                results.release(number + 1)
            results.release(results.taken)  # as before each wait for the votes of other hosts
            if results.taken == number:
                assert results.peek() == number
                results.release(number + 1)
        with pytest.raises(StopIteration):
            results.peek()
    finally:
        results.close()


def walks_of_every_kind():
    """On a host: walks, in each of which the second host is interrupted at a later line."""
    for kind in KINDS.values():
        ds = kind(jax.make_mesh((4,), ("data",)))
        expected = expected_of(ds)
        for line in range(1, 3000, 37):
            interrupted_walk(ds, expected, line if jax.process_index() else -1)
    return "gone on"


@pytest.mark.slow
@pytest.mark.long
def test_if_one_of_two_hosts_is_interrupted_both_go_on():
    found = rehearse.run(walks_of_every_kind, hosts=2, devices_per_host=2, timeout_s=300)
    assert found == ["gone on"] * 2
