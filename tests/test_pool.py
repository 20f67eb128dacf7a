"""`Pool` by itself, over the items of a producer.

Where threads meet, events and barriers say who goes first; a timeout only ends what hangs.
"""

import _thread
import contextlib
import signal
import threading

import pytest

from grain_shard.errors import Raised
from grain_shard.threads.mapped import mapped
from grain_shard.threads.pool import Pool
from grain_shard.threads.producer import Producer
from tests.conftest import HANG_S, assert_ended, eventually, wait


class Tickets(Producer):
    """Counts up; knows when it was asked, by whom, and how often it was closed."""

    def __init__(self):
        self._asking = threading.Lock()
        self.drawn = 0
        self.closed_by = []

    def __next__(self):
        assert self._asking.acquire(blocking=False), "two threads ask for a ticket"
        try:
            assert not self.closed_by, "asked after close"
            self.drawn += 1
            return self.drawn - 1
        finally:
            self._asking.release()

    def close(self):
        assert not self._asking.locked(), "closed while it is asked"
        self.closed_by.append(threading.current_thread().name)


def stage(work, tickets=None, *, buffer_size=2, num_threads=1):
    options = {"size": buffer_size, "num_threads": num_threads}
    return mapped(work, tickets or Tickets(), name="grain-shard-test", **options)


def test_an_error_ends_no_wait_for_something_that_a_task_may_still_bring_about():
    begun, go_on, done = (threading.Event() for _ in range(3))

    def work(number):
        if number == 1:
            wait(begun)
            raise ValueError("of the second result")
        if number == 2:
            begun.set()
            wait(go_on)
            done.set()

    with contextlib.closing(stage(work, buffer_size=3, num_threads=3)) as background:
        next(background)
        eventually(lambda: background.known().end is not None)
        assert background.wait_for(done.is_set, 0) is None
        go_on.set()
        assert background.wait_for(done.is_set)
        with pytest.raises(ValueError, match="of the second result"):
            background.wait_for(lambda: False)


@pytest.mark.parametrize("is_started", [True, False])
def test_a_wait_for_something_ends_with_false_once_it_is_stopped(is_started):
    background = stage(lambda n: n)
    if is_started:
        next(background)
        waited = []
        waiting = threading.Thread(
            target=lambda: waited.append(background.wait_for(lambda: False)), daemon=True
        )
        waiting.start()
    background.stop()
    assert_ended(background.threads)
    assert background.wait_for(lambda: False) is False
    if is_started:
        waiting.join(HANG_S)
        assert waited == [False]


def test_an_error_that_comes_for_a_result_or_after_a_stop_is_no_end():
    numbers = stage(lambda n: n)
    numbers._put(0, "first")
    numbers._put(0, Raised(MemoryError(), None))
    assert (next(numbers), numbers.known().end) == ("first", None)
    numbers.close()
    numbers._put(1, Raised(OSError("an effect of the stop"), None))  # other hosts would be told
    assert numbers.known().end is None


class TestErrors:
    def test_after_an_error_no_more_tickets_are_drawn(self):
        tickets = Tickets()

        def fail(n):
            raise ZeroDivisionError

        numbers = stage(fail, tickets, buffer_size=8)
        with pytest.raises(ZeroDivisionError):
            next(numbers)
        assert_ended(numbers.threads)
        assert tickets.drawn == 1
        assert len(tickets.closed_by) == 1

    @pytest.mark.parametrize(
        "interrupt",
        [
            lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGINT),
            # As if the signal came just before the consumer's wait began: it wakes no lock.
            _thread.interrupt_main,
        ],
        ids=["during the wait", "just before the wait"],
    )
    def test_a_keyboard_interrupt_of_the_waiting_consumer_loses_nothing(self, interrupt):
        waiting, interrupted = threading.Event(), threading.Event()

        def work(n):
            if n == 1:
                wait(waiting)
                for _ in range(5):
                    interrupt()
                    if interrupted.wait(HANG_S / 5):
                        return n
                raise AssertionError("hangs")
            return n

        numbers = stage(work)
        assert next(numbers) == 0
        with pytest.raises(KeyboardInterrupt):
            next(waiting.set() or numbers)
        interrupted.set()
        assert [next(numbers), next(numbers)] == [1, 2]
        numbers.close()


class TestClose:
    def test_the_last_thread_to_end_closes_the_tickets(self):
        busy, release = threading.Barrier(4), [threading.Event() for _ in range(3)]

        def work(n):
            busy.wait(HANG_S)
            wait(release[n])
            return threading.current_thread().name

        tickets = Tickets()
        names = stage(work, tickets, buffer_size=3, num_threads=3)
        names.start()
        busy.wait(HANG_S)
        names.stop()
        for n in range(2):
            release[n].set()
            alive = 2 - n
            eventually(lambda: sum(t.is_alive() for t in names.threads) == alive)
            assert tickets.closed_by == [], "a thread may still ask"
        (last,) = [t for t in names.threads if t.is_alive()]
        release[2].set()
        names.close()
        assert tickets.closed_by == [last.name]

    def test_from_another_thread_it_wakes_the_consumer(self):
        release = threading.Event()

        def work(n):
            threading.Thread(target=numbers.stop).start()
            wait(release)

        numbers = stage(work)
        with pytest.raises(StopIteration):
            next(numbers)
        release.set()
        numbers.close()

    @pytest.mark.parametrize("where", ["in the work", "in the tickets"])
    def test_a_source_that_blocks_for_ever_does_not_block_it_for_ever(self, where, no_patience):
        blocked, release = threading.Event(), threading.Event()

        def block():
            blocked.set()
            wait(release)

        class Blocking(Tickets):
            def __next__(self):
                if where == "in the tickets" and self.drawn == 1:
                    block()
                return super().__next__()

        tickets = Blocking()
        numbers = stage(lambda n: block() if n and where == "in the work" else n, tickets)
        assert next(numbers) == 0
        wait(blocked)
        numbers.close()
        assert tickets.closed_by == [], "it is still in use"
        (thread,) = numbers.threads
        assert thread.is_alive()
        release.set()
        assert_ended([thread])
        assert len(tickets.closed_by) == 1, "by the thread, when the user's code returned"

    def test_one_that_an_interrupt_cut_short_may_be_repeated(self, monkeypatch):
        tickets, ends = Tickets(), Pool._draw_no_more

        def interrupted(pool):
            monkeypatch.setattr(Pool, "_draw_no_more", ends)
            raise KeyboardInterrupt

        numbers = stage(lambda n: n, tickets)
        next(numbers)
        monkeypatch.setattr(Pool, "_draw_no_more", interrupted)
        with pytest.raises(KeyboardInterrupt):
            numbers.close()
        numbers.close()
        assert_ended(numbers.threads)
        assert len(tickets.closed_by) == 1

    def test_called_by_the_work_itself_it_does_not_wait_for_itself(self):
        numbers = stage(lambda n: numbers.close())
        with pytest.raises(StopIteration):
            next(numbers)
        assert_ended(numbers.threads)


def test_an_iterator_may_be_collected_and_stop_a_stage_that_holds_its_locks():
    tickets = Tickets()
    numbers = stage(lambda n: n, tickets)
    next(numbers)
    stopped = threading.Event()

    def stopped_under_the_locks():
        with numbers._lock:
            numbers.stop()
        stopped.set()

    threading.Thread(target=stopped_under_the_locks, daemon=True).start()
    wait(stopped)
    assert_ended(numbers.threads)
    assert len(tickets.closed_by) == 1
