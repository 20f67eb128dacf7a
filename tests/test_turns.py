"""The turns of streams as tasks of a pool: the streams run side by side, the results are in order.

The streams here are lists, and events say who goes first.
"""

import contextlib
import random
import threading
from types import SimpleNamespace

import grain
import numpy as np
import pytest

import grain_shard
from grain_shard.reading.faults import FAIL_AT_ONCE, Faults
from grain_shard.streams.streams import StreamReads, Turn
from grain_shard.streams.turns import _TurnTasks
from grain_shard.threads.pace import ReadPace
from grain_shard.threads.pool import Pool
from tests.conftest import HANG_S, data_mesh, wait

pytestmark = pytest.mark.usefixtures("one_record_at_a_time")  # a task takes one turn


class Stream:
    """A stream whose turn k is the number k; `before` is called inside each turn."""

    def __init__(self, number, before=lambda number, turn: None):
        self.number, self.before, self.turns = number, before, 0
        self.inside, self.is_closed = threading.Lock(), False

    def turn(self, rows):
        assert self.inside.acquire(blocking=False), "two threads are inside a stream"
        try:
            turn, self.turns = self.turns, self.turns + 1
            self.before(self.number, turn)
            return Turn(self.number, [turn], b"")
        finally:
            self.inside.release()


def rows_of(turns):
    """Joins turns: the streams' numbers and rows; ends after the turns 9."""
    if turns[0].rows == [10]:
        raise StopIteration
    return [[(turn.number, *turn.rows) for turn in turns]]


def pool_of(streams, join=rows_of, size=3):
    pace = ReadPace(len(streams))
    tasks = tasks_of(streams, join, pace)
    return contextlib.closing(Pool(tasks, size, name="grain-shard-test", pace=pace))


def tasks_of(streams, join, pace):
    turns = SimpleNamespace(readers=streams, close=lambda: None)
    return _TurnTasks(turns, join, StreamReads(Faults(FAIL_AT_ONCE)), pace)


def joined(streams, turns):
    return [[(number, turn) for number in range(streams)] for turn in turns]


@pytest.mark.parametrize("num_streams", [1, 2, 5])
def test_each_result_has_a_turn_of_each_stream_in_their_order(num_streams):
    pauses = random.Random(0)

    def before(number, turn):
        threading.Event().wait(pauses.random() / 1000)

    with pool_of([Stream(k, before) for k in range(num_streams)]) as pool:
        assert list(pool) == joined(num_streams, range(10))


def test_a_task_takes_turns_with_the_same_number_of_as_many_streams_as_are_free(monkeypatch):
    pace = ReadPace(2)
    monkeypatch.setattr(pace, "at_a_time", lambda streams: 3)
    tasks = tasks_of([Stream(k) for k in range(5)], rows_of, pace)
    first, second, third = (tasks.draw(limit=1) for _ in range(3))
    assert (first.size, second.size, third) == (3, 2, None)  # there is no room for a second result
    assert [*first.run(), *second.run()] == [(0, joined(5, [0])[0])]
    assert tasks.draw(limit=2).size == 3


def test_a_task_takes_no_further_turn_once_it_is_stopped(monkeypatch):
    """A stream that has become slow would hold up `close` by the turns of all other streams."""
    pace = ReadPace(1)
    monkeypatch.setattr(pace, "at_a_time", lambda streams: 5)
    streams = [
        Stream(k, lambda number, turn: tasks.stop() if number == 2 else None) for k in range(5)
    ]
    tasks = tasks_of(streams, rows_of, pace)
    assert list(tasks.draw(limit=1).run()) == []
    assert [stream.turns for stream in streams] == [1, 1, 1, 0, 0]


def test_all_streams_are_read_at_once():
    together = threading.Barrier(3)
    with pool_of([Stream(k, lambda *_: together.wait(HANG_S)) for k in range(3)]) as pool:
        assert next(pool) == joined(3, [0])[0]
        together.abort()


def test_a_stream_that_fails_early_does_so_after_the_results_before_it():
    failed = threading.Event()

    def before(number, turn):
        if (number, turn) == (0, 2):
            failed.set()
            raise OSError("turn 2 of stream 0")
        if number == 1:
            wait(failed)  # the other stream has failed before this one has given anything

    with pool_of([Stream(k, before) for k in range(2)]) as pool:
        assert [next(pool), next(pool)] == joined(2, range(2))
        for _ in range(2):
            with pytest.raises(OSError, match="turn 2 of stream 0"):
                next(pool)


def test_what_is_left_out_is_no_result_and_takes_no_room():
    def without_odd_ones(turns):
        return [found for found in rows_of(turns) if turns[0].rows[0] % 2 == 0]

    with pool_of([Stream(0)], without_odd_ones, size=1) as pool:
        assert list(pool) == joined(1, range(0, 10, 2))


def test_no_stream_is_farther_ahead_than_the_room():
    release = threading.Event()

    def before(number, turn):
        if number == 1:
            wait(release)

    fast = Stream(0, before)
    with pool_of([fast, Stream(1, before)], size=3) as pool:
        pool.start()
        assert pool.wait_for(lambda: fast.turns == 3, HANG_S)
        assert pool.wait_for(lambda: fast.turns > 3, 0.05) is None
        release.set()
        assert list(pool) == joined(2, range(10))


def test_an_error_of_the_join_is_in_place_of_its_result():
    def join(turns):
        if turns[0].rows == [1]:
            raise ValueError("rows of other shapes")
        return rows_of(turns)

    with pool_of([Stream(0), Stream(1)], join) as pool:
        assert next(pool) == joined(2, [0])[0]
        with pytest.raises(ValueError, match="other shapes"):
            next(pool)


class OfGenerator(grain.DatasetIterator):
    """An iterator over a user's generator, which is in the middle of a `with` between two turns."""

    def __init__(self):
        super().__init__()
        self.rows = self.make_rows()

    def make_rows(self):
        with np.errstate(all="raise"):
            for i in range(20):
                threading.Event().wait(1e-3)
                yield {"id": np.int32(i)}

    def __next__(self):
        return next(self.rows)

    def get_state(self):
        return {}

    def set_state(self, state):
        pass

    def close(self):
        self.rows.close()
        super().close()


class Generated(grain.IterDataset):
    def __iter__(self):
        return OfGenerator()


@pytest.mark.parametrize("stops_early", [False, True])
def test_a_generator_may_change_its_context_between_turns_that_several_threads_take(stops_early):
    ds = grain_shard.feeds(lambda feed: Generated(), num_feeds=4).batch(8)
    with iter(ds.shard_to(data_mesh(1), num_threads=4)) as batches:
        for number, batch in enumerate(batches):
            assert batch["id"].tolist() == 4 * [2 * number, 2 * number + 1]
            if stops_early and number == 3:
                break
    assert number == (3 if stops_early else 9)
