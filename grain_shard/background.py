"""The background stage: threads that work ahead, a bounded buffer, and a clean life.

Grain's own background stage can hang on a BaseException, blocks in ``close`` for as long as its
source blocks, and can abort the interpreter at exit. This stage replaces it and promises:

* Results come in order, whichever thread is first.
* At most `buffer_size` results exist at a time, including unfinished ones.
* An exception of any class that the work raises reaches the consumer; from then on ``next`` keeps
  raising it.
* No thread outlives its consumer: ``close``, garbage collection and the end of the interpreter stop
  the threads. A thread that is inside the user's code ends when that code returns.
* An interrupt (Ctrl-C) of the consumer changes nothing: it takes no lock, and may ask again.
* Errors in closing are reported: ``close`` raises the first one, once, after everything else has
  been closed. If no one calls ``close``, or ``close`` has stopped waiting, the error is logged.

`TaskStage` implements all of this: its threads draw tasks from a producer and run them
(`tasks.py`). `Background` is the simple case: a function mapped over another producer's items.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from grain_shard.interrupts import Bell
from grain_shard.jax_context import jax_context
from grain_shard.ordered_results import OrderedResults
from grain_shard.pace import Pace
from grain_shard.spans import ROOM, span
from grain_shard.tasks import Items, Producer, Raised, Task, Tasks, log_unclosed

S = TypeVar("S")
T = TypeVar("T")

# The time that close() and the interpreter's exit wait for a thread that is inside the user's code.
_JOIN_TIMEOUT_S = 5.0
# The longest time that a waiting consumer sleeps before it checks again.
_WAKE_S = 1.0

_stages: weakref.WeakSet[TaskStage[Any]] = weakref.WeakSet()  # those whose threads were started


def _end_all() -> None:
    for stage in _stages.copy():
        try:
            stage.close()
        except BaseException as error:
            log_unclosed(error)


class TaskStage(OrderedResults[T]):
    """Runs tasks in background threads and hands out their results in order.

    The threads start with the first ``next``, in the JAX context (mesh, x64) of the thread that
    made this object. They refer to this object. So the object that hands out its results to the
    user is another one, which stops this one when it is collected.

    Args:
        tasks: The work. The last thread to end closes the tasks, because only that thread can be
            sure that no other thread uses them.
        buffer_size: Most results that wait or are unfinished.
        pace: Decides how many threads work side by side, from the times of the tasks.
        name: Thread name prefix.

    Attributes:
        threads: The threads that were started.
    """

    def __init__(self, tasks: Tasks[T], *, buffer_size: int, pace: Pace, name: str):
        super().__init__(buffer_size)
        self.threads: list[threading.Thread] = []
        self._tasks, self._pace, self._name = tasks, pace, name
        self._enter_context = jax_context()
        # Rung when more threads should work, and when no work is left for any thread.
        self._more_wanted = Bell()
        self._one_draws = threading.Lock()  # held while a task is drawn, which may take long
        self._running = 0  # threads that have not ended
        self._is_over = False  # no task will be drawn any more
        self._to_close = [tasks]  # until they are closed
        self._close_errors: list[BaseException] = []
        self._nobody_closes = False  # close() will not be called again: log errors in closing

    def start(self) -> None:
        """Starts working ahead; a second call does nothing."""
        if not self.threads and not self._is_over:
            self._start_more()

    def _start_more(self) -> None:
        """Starts one more thread, if more should work.

        Each new thread calls this, so the first ones already work while the last ones start.
        """
        with self._lock:
            rank = len(self.threads)
            if rank >= self._pace.threads or self._is_over:
                return
            name = f"{self._name}-{rank}"
            thread = threading.Thread(target=self._run, args=(rank,), name=name, daemon=True)
            try:
                thread.start()
            except RuntimeError:  # the system allows no more threads: continue with these
                if not rank:
                    raise
                self._pace.limit(rank)
                return
            self.threads.append(thread)
            self._running += 1
        if not rank:
            _stages.add(self)
            # At exit the threads must end before JAX, and the user's own hooks, take apart the
            # objects that the threads use. Hooks run last in, first out.
            atexit.unregister(_end_all)
            atexit.register(_end_all)

    def wait_for(self, has_come: Callable[[], bool], wait_s: float = math.inf) -> bool | None:
        """Waits for something other than the next result; by any thread.

        Args:
            has_come: Returns True once the event has happened. It is called again whenever a task
                is done, a result fails or the threads end, and after `wake`. It must take no lock
                of another stage.
            wait_s: The longest wait, in seconds.

        Returns:
            True once `has_come` does; False if the stage was stopped; None after `wait_s`.

        Raises:
            RuntimeError: This is a forked process, in which the threads do not run.
        """
        # A task behind the last result may still make `has_come` true.
        has_come_now = self._wait(
            self._something_came, lambda: has_come() or self._ended() is not None, wait_s
        )
        if has_come_now and not has_come() and (final := self._ended()) is not None:
            final.throw()
        return has_come_now

    def _ended(self) -> Raised | None:
        """Returns the error, or the end, after the results, once no thread runs a task any more."""
        return None if self._running else self._final

    def _wait(
        self, bell: Bell, has_come: Callable[[], bool], wait_s: float = math.inf
    ) -> bool | None:
        """Waits until `has_come`; returns False if the stage is stopped first, None after `wait_s`.

        Raises:
            RuntimeError: This is a forked process, in which the threads do not run.
        """
        self.start()
        until = time.monotonic() + wait_s
        while not has_come():
            if self._is_stopped:
                return False
            if (left_s := until - time.monotonic()) <= 0:
                return None
            self._pace.consumer_waits(time.perf_counter())
            come = bell.wait_for(lambda: self._is_stopped or has_come(), min(_WAKE_S, left_s))
            self._pace.consumer_goes_on(time.perf_counter())
            if not come and not any(thread.is_alive() for thread in self.threads):
                raise RuntimeError(
                    "the iterator has no running background threads, because os.fork() made this"
                    " process and copied no threads.\n"
                    "  remedy: call iter(ds) in the process that uses the iterator."
                )
        return True

    def stop(self) -> None:
        """Tells the threads to end, without waiting. From then on ``next`` ends at once."""
        self._is_over = True
        super().stop()
        self._tasks.stop()
        if not self.threads:
            self._close_tasks()

    def close(self) -> None:
        """Stops the threads and waits for them; for user code they are in, only some seconds.

        Raises:
            BaseException: A producer above this stage failed to close. A second call raises
                nothing.
        """
        self.stop()
        # A stage whose threads have ended may be closed at the interpreter's exit, when the modules
        # that this file imports are gone; so nothing else is called for it.
        alive = [t for t in self.threads if t.is_alive() and t.ident != threading.get_ident()]
        if alive:
            deadline = time.monotonic() + _JOIN_TIMEOUT_S
            for thread in alive:
                thread.join(max(0.0, deadline - time.monotonic()))
        self._nobody_closes = True
        if self._close_errors:
            raise self._close_errors.pop()

    def _close_tasks(self) -> None:
        try:
            tasks = self._to_close.pop()
        except IndexError:  # they are closed
            return
        try:
            tasks.close()
        except BaseException as error:
            self._close_errors.append(error)
            if self._nobody_closes:
                self.log_close_error()

    def log_close_error(self) -> None:
        """Logs the error of closing, past or future, because close() will not be called."""
        self._nobody_closes = True
        if self._close_errors:
            log_unclosed(self._close_errors.pop())

    def _run(self, rank: int) -> None:
        try:
            self._start_more()
            with self._enter_context():
                while self._step(rank):
                    pass
        except BaseException as error:
            # An error of the stage itself: errors of tasks are results. The consumer must not hang.
            with self._lock:
                self._final, self._is_over = self._final or Raised.of(error), True
            self._wake_all()
            self._tasks.stop()  # another thread may be waiting for something to draw
        finally:
            self._thread_ended()

    def _step(self, rank: int) -> bool:
        """Runs one task; False when no task is left.

        A function of its own, so that no variable keeps a batch alive while the thread waits.

        Args:
            rank: Rank of the calling thread. A thread with a rank of at least the wanted number of
                threads rests.
        """
        if rank >= self._pace.threads:
            self._more_wanted.wait_for(lambda: rank < self._pace.threads or self._is_over)
        with self._one_draws:
            if not self._has_room():
                with span(ROOM):
                    self._room_came.wait_for(self._has_room)
            if self._is_over:
                return False
            if rank >= self._pace.threads:
                return True
            try:
                task = self._tasks.draw(self.room)
            except StopIteration:
                # A new StopIteration: the traceback of the caught one keeps the source's frames.
                return self._end(Raised(StopIteration(), None))
            except BaseException as error:
                return self._end(Raised(error, error.__traceback__))
            with self._lock:
                self._begun += task.begins
                start = time.perf_counter()
                self._pace.begun(start)
        processor_start = time.thread_time()
        for number, result in task.run():
            self._deliver(number, result)
        processor_s = time.thread_time() - processor_start
        with self._lock:
            may_draw = self._tasks.done(task)
            before = self._pace.threads
            self._pace.done(start, time.perf_counter(), processor_s, task.size)
            more = self._pace.threads > before
        if may_draw:
            self._room_came.ring()
        self._something_came.ring()
        if more:
            self._more_wanted.ring()
            self._start_more()
        return True

    def _deliver(self, number: int, result: T | Raised) -> None:
        if isinstance(result, Raised):
            # Earlier results may still be unfinished, so the threads continue.
            with self._lock:
                self._tasks.end()
            self._room_came.ring()
        self._put(number, result)

    def _end(self, final: Raised) -> bool:
        """Lets an error, or the end, follow the results begun; returns False, as `_step` does."""
        self._is_over = True
        self._deliver(self._begun, final)
        self._wake_all()
        return False

    def _has_room(self) -> bool:
        with self._lock:  # `Tasks.done` changes `room_wanted` under this lock
            return self._is_over or self.room >= self._tasks.room_wanted

    def _wake_all(self) -> None:
        super()._wake_all()
        self._more_wanted.ring()

    def _thread_ended(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._something_came.ring()
            self._close_tasks()


class Background(TaskStage[T], Generic[S, T]):
    """Maps `work` over what another producer makes, in background threads, in order.

    Args:
        work: Called with each item; by several threads at once if `num_threads` is above 1.
        source: The producer of the items. One thread at a time asks it, once there is room for a
            result. It is stopped with this stage. The last thread to end closes it, because only
            that thread can be sure that no other thread uses it.
        buffer_size: Most results that wait or are unfinished.
        num_threads: Threads that work side by side.
        name: Thread name prefix.
    """

    def __init__(
        self,
        work: Callable[[S], T],
        source: Producer[S],
        *,
        buffer_size: int,
        num_threads: int = 1,
        name: str,
    ):
        pace = Pace(min(num_threads, buffer_size))
        super().__init__(_Mapped(work, source), buffer_size=buffer_size, pace=pace, name=name)


class _Mapped(Tasks[T], Generic[S, T]):
    """Tasks that each make one result from one item."""

    # A class attribute, because the names of this module may be gone at the interpreter's exit.
    _no_source = Items(iter(()))

    def __init__(self, work: Callable[[S], T], source: Producer[S]):
        self._work, self._source, self._drawn = work, source, 0
        self._ended = False

    @property
    def room_wanted(self) -> int:
        return 0 if self._ended else 1

    def end(self) -> None:
        self._ended = True

    def draw(self, room: int) -> Task[T]:
        if self._ended:
            raise StopIteration
        item, self._drawn = next(self._source), self._drawn + 1
        return _MappedTask(self._work, item, self._drawn - 1)

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        # Drop the reference, too: an object that is still alive when the interpreter clears its
        # modules (e.g. a Grain iterator that a global variable reaches) fails in its __del__.
        source, self._source = self._source, self._no_source
        source.close()


class _MappedTask(Task[T], Generic[S, T]):
    def __init__(self, work: Callable[[S], T], item: S, number: int):
        self._work, self._item, self._number = work, item, number

    def run(self) -> Iterable[tuple[int, T | Raised]]:
        try:
            return ((self._number, self._work(self._item)),)
        except BaseException as error:
            return ((self._number, Raised.of(error)),)
