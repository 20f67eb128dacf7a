"""`Pool`: an ordered, bounded map over tasks, which threads run beside the training loop.

Results are numbered from 0, in the order in which the consumer takes them. A task makes one result,
several results, or a part of one. Its results are fixed when it is drawn. The callers of the
methods, by thread:

* **The consumer** calls ``next``, which starts the threads, waits for the next result and takes it.
* **A thread of the pool** draws a task (`Tasks.draw`, one thread at a time), runs it (`Task.run`),
  and puts the results in order (`results.py`). If there is no room for more results, it waits
  until there is. If fewer threads should work than were started (`pace.py`), it rests.
* **Any thread** may call the other methods.

The pool promises:

* Results come in order. At most `size` results wait or are unfinished.
* An error of any class, at any result, reaches the consumer in place of that result, after the
  results before it. From then on ``next`` keeps raising it.
* No thread outlives the consumer: ``close``, garbage collection of the owner and the end of the
  interpreter stop the threads. A thread inside the user's code ends when that code returns.
* Errors of closing are reported: ``close`` raises them; if nobody calls it, they are logged.

Grain's own background threads can hang on a BaseException, block ``close`` for as long as their
source blocks, and abort the interpreter at exit.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol, TypeVar

from absl import logging

from grain_shard.errors import GrainShardError, Raised
from grain_shard.spans import ROOM, span
from grain_shard.threads.contexts import Contexts
from grain_shard.threads.pace import ReadPace
from grain_shard.threads.producer import Producer
from grain_shard.threads.results import Known, Results

T = TypeVar("T")
R = TypeVar("R", covariant=True)

# The maximum number of seconds that close(), or the interpreter's exit, waits for a thread inside
# the user's code.
_JOIN_TIMEOUT_S = 5.0
# Seconds between two calls of `on_wait` during a wait.
_WAKE_S = 1.0

_pools: weakref.WeakSet[Pool] = weakref.WeakSet()


class Task(Protocol[R]):
    """A piece of work, which one thread runs."""

    @property
    def size(self) -> int:
        """Number of records, by which speed is measured; 0 if the task does not count."""
        ...

    @abstractmethod
    def run(self) -> Iterable[tuple[int, R | Raised]]:
        """Returns or yields pairs (number of a result, the result or its error).

        Other tasks make the results with other numbers.
        """


class Tasks(Protocol[R]):
    """The work of a pool. One thread at a time calls `draw`; another one may be in `stop`."""

    @abstractmethod
    def draw(self, limit: int) -> Task[R] | None:
        """Returns the next task; None if there is none until another task ends or `limit` rises.

        The end, or an error in place of a result, is a task, too: `End`.

        Args:
            limit: The task may make only results with lower numbers.
        """

    def stop(self) -> None:
        """Makes waits inside tasks end soon, and returns at once. Any thread may call this."""

    def close(self) -> None:
        """Closes the objects that the tasks use. Called once, after the last task."""


class End(NamedTuple):
    """A task that puts an error, or StopIteration for the end, in place of a result."""

    number: int
    raised: Raised
    size: int = 0

    def run(self) -> list[tuple[int, Raised]]:
        return [(self.number, self.raised)]


class ForkedError(GrainShardError, RuntimeError):
    """This process was forked, and the background threads do not run in it."""


class Pool(Producer[T]):
    """The threads that run the tasks of one `Tasks`, and their results.

    The threads start with the first wait, in the `Contexts` of the thread that made this object.
    They refer to this object, so it is not garbage-collected while they run. Therefore the user
    gets another object, which stops the pool when it is garbage-collected.

    Args:
        tasks: The work.
        size: The maximum number of results that wait or are unfinished.
        name: Prefix of the names of the threads.
        num_threads: Number of threads that work side by side. Unused with `pace`.
        pace: Decides the number of threads by the times of the tasks; None to keep the number.
        on_wait: Called about once a second during a wait for the next result, with the seconds that
            the wait has lasted; None for no call.

    Attributes:
        threads: The threads that were started.
    """

    def __init__(
        self,
        tasks: Tasks[T],
        size: int,
        *,
        name: str,
        num_threads: int = 1,
        pace: ReadPace | None = None,
        on_wait: Callable[[float], None] | None = None,
    ):
        self.threads: list[threading.Thread] = []
        self._tasks, self._name, self._pace = tasks, name, pace
        self._on_wait, self._contexts = on_wait, Contexts()
        self._wanted = num_threads if pace is None else pace.threads  # threads that should work
        self._running = 0  # number of threads that have not ended
        self._results = Results[T](size)
        self._ended = 0  # number of tasks that have ended
        self._is_stopped = self._is_over = False  # `_is_over`: no more tasks will be drawn
        # In a fork of the process no thread runs, and a lock may stay taken for ever.
        self._is_forked = False
        self._all_know = False  # True once `stop` has told the threads and the tasks
        self._is_closed = False  # True once a thread closes the tasks
        # An error of closing the tasks waits for `close`, unless nobody will call that.
        self._close_error: BaseException | None = None
        self._logs_errors = False  # True if nobody is left to raise an error of closing
        # Reentrant, because the garbage collector may call `stop` in a thread that holds it.
        self._lock = threading.RLock()
        self._one_draws = threading.Lock()
        # `_draw_no_more` notifies all four conditions.
        self._came = threading.Condition(self._lock)  # the next result is here
        self._changed = threading.Condition(self._lock)  # a result is here; a task, thread ended
        self._room = threading.Condition(self._lock)  # more results may begin, or a task has ended
        self._more = threading.Condition(self._lock)  # more threads should work
        _pools.add(self)

    # The consumer

    def __next__(self) -> T:
        if self._wait(self._came, lambda: self._results.is_next_here, on_wait=self._on_wait):
            with self._lock:
                if not self._is_stopped:
                    result = self._results.take()
                    self._room.notify()
                    return result
        raise StopIteration

    @property
    def taken(self) -> int:
        """Number of results that were taken."""
        return self._results.taken

    def known(self) -> Known:
        """Returns the number of results that are ready, and the error or end that follows them."""
        return self._results.known()  # no lock, which a fork may have left taken

    def wait_for(
        self,
        has_come: Callable[[], bool],
        wait_s: float = math.inf,
        on_wait: Callable[[float], None] | None = None,
    ) -> bool | None:
        """Waits for an event that is not the next result. Any thread may call this.

        Args:
            has_come: Returns True once the event has happened. It is called again whenever a task
                ends or a result is ready, and after `wake`.
            wait_s: The longest wait, in seconds.
            on_wait: Called about once a second during the wait, with the seconds that the wait has
                lasted; None for no call.

        Returns:
            True if the event has happened; False if the pool was stopped; None after `wait_s`.

        Raises:
            BaseException: The error of a task, or StopIteration at the end, once all threads have
                ended without the event.
            ForkedError: This is a forked process, in which the threads do not run.
        """

        def has_ended() -> bool:
            # An error alone does not end the wait: an unfinished task may still cause the event.
            return self._results.end is not None and not self._running

        come = self._wait(self._changed, lambda: has_come() or has_ended(), wait_s, on_wait)
        if come and self._results.end is not None and not has_come():
            self._results.end.throw()
        return come

    def wake(self) -> None:
        """Makes the threads in `wait_for` check again whether their event has happened."""
        with self._lock:
            self._changed.notify_all()

    def _wait(
        self,
        condition: threading.Condition,
        has_come: Callable[[], bool],
        wait_s: float = math.inf,
        on_wait: Callable[[float], None] | None = None,
    ) -> bool | None:
        """Starts the threads, and waits until `has_come()`; see `wait_for`.

        Args:
            condition: Notified whenever `has_come` may have become true.
            has_come: Called with the lock.
            wait_s: See `wait_for`.
            on_wait: See `wait_for`. It is called without the lock.
        """
        if self._is_forked:
            raise ForkedError(
                "os.fork() made this process and copied no threads, so the iterator cannot make"
                " batches here.\n"
                "  remedy: call iter(ds) after the fork, in the process that loops over the"
                " batches."
            )
        if not self.threads:
            self.start()
        began = time.monotonic()
        while True:
            with _interrupts_first(), self._lock:
                if has_come():
                    return True
                if self._is_stopped:
                    return False
                if (left_s := began + wait_s - time.monotonic()) <= 0:
                    return None
                if self._pace is not None:
                    self._pace.consumer_waits(time.perf_counter())
                # For a second at most, because `on_wait` is called once a second.
                come = condition.wait_for(
                    lambda: self._is_stopped or has_come(), min(_WAKE_S, left_s)
                )
                if self._pace is not None:
                    self._pace.consumer_goes_on(time.perf_counter())
            if not come and on_wait is not None:
                on_wait(time.monotonic() - began)

    # The life of the threads

    def start(self) -> None:
        """Starts the first thread, which starts the others; a second call does nothing."""
        if self.threads:
            return
        # Exit hooks of JAX and of the user destroy objects that the threads use. The hook that was
        # registered last runs first. So `_end_all` is registered again, to end the threads before
        # those hooks run.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        self._start_more()
        if not (self.threads or self._is_over):
            raise RuntimeError("the system allows no more threads")

    def _start_more(self) -> None:
        """Starts one more thread, if more threads should work than were started.

        Each new thread calls this, so the first threads already work while others start.
        """
        with self._lock:
            rank = len(self.threads)  # the number of the new thread
            if rank >= self._wanted or self._is_over:
                return
            thread = threading.Thread(
                target=self._run, args=(rank,), name=f"{self._name}-{rank}", daemon=True
            )
            # Before the start, so that `close` knows of it if an interrupt cuts the start short.
            self.threads.append(thread)
            self._running += 1
        # Started without the lock, because the start waits for locks of `threading`. The garbage
        # collector may call `stop`, which takes the lock, in a thread that holds one of these.
        try:
            with _interrupts_first():
                thread.start()
        except BaseException as error:
            with self._lock:
                if thread.ident is not None:  # it runs: an interrupt has only ended the wait for it
                    raise
                self.threads.remove(thread)  # if it begins nevertheless, it ends at once
                self._running -= 1
                if not isinstance(error, RuntimeError):
                    raise
                self._wanted = rank  # the system allows no more threads
                if self._pace is not None:
                    self._pace.limit(max(1, rank))

    def stop(self) -> None:
        """Tells the threads to end, without waiting. From then on ``next`` raises StopIteration.

        The garbage collector may call this at any point of any thread. An interrupted call may be
        repeated.
        """
        # After the interpreter's exit hooks, imported names may be gone. By then all threads know.
        if self._all_know or self._is_forked:
            return
        with self._lock:
            self._is_stopped = True
            self._results.drop()
            self._draw_no_more()
        self._tasks.stop()
        if not self.threads:
            self._close_tasks()
        self._all_know = True

    def _draw_no_more(self) -> None:
        with self._lock:
            self._is_over = True
            for condition in (self._came, self._changed, self._room, self._more):
                condition.notify_all()

    def close(self) -> None:
        """Stops the threads and waits for them.

        A thread inside the user's code is waited for 5 seconds at most.

        Raises:
            BaseException: An error of closing the tasks. A second call raises nothing.
        """
        self.stop()
        if self._is_forked:
            return
        # Without a running thread this uses no imported name, which the exit may have cleared.
        if self._running:
            self._join()
        with self._lock:
            self._logs_errors = True  # later errors, because nobody is left to raise them
            error, self._close_error = self._close_error, None
        if error is not None:
            raise error

    def _join(self) -> None:
        """Waits until the threads have ended, except for the calling thread."""
        own, until = threading.current_thread(), time.monotonic() + _JOIN_TIMEOUT_S
        # By our own count: for `threading`, a thread that is just starting is not alive yet.
        with _interrupts_first(), self._lock:
            self._changed.wait_for(lambda: self._running <= (own in self.threads), _JOIN_TIMEOUT_S)
        for thread in self.threads:
            if thread is not own and thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    @property
    def is_running(self) -> bool:
        """True if a thread has not ended, for example inside the user's code."""
        return self._running > 0

    def log_close_error(self) -> None:
        """Logs the error of closing, now or when it happens, because close() will not be called."""
        if self._is_forked:
            return
        with self._lock:
            self._logs_errors = True
            error, self._close_error = self._close_error, None
        if error is not None:
            log_unclosed(error)

    def _close_tasks(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        try:
            self._tasks.close()
        except BaseException as error:
            with self._lock:
                if not self._logs_errors:
                    self._close_error = error
                    return
            log_unclosed(error)

    # A thread

    def _run(self, rank: int) -> None:
        """The target of a thread. The last thread that ends closes the tasks."""
        with self._lock:
            # An interrupt has cut the start short, so `_start_more` has removed this thread.
            if threading.current_thread() not in self.threads:
                return
        try:
            self._start_more()
            self._contexts.run(self._work, rank)
        except BaseException as error:  # an error of this package: errors of tasks are results
            with self._lock:
                self._results.put_end(Raised.of(error))
                self._draw_no_more()
            self._tasks.stop()
        finally:
            with self._lock:
                # A thread ends only if no more tasks will be drawn, so no other one starts now.
                is_last = self._running == 1
                if not is_last:
                    self._running -= 1
                    self._changed.notify_all()
            if is_last:  # it still counts as running while it closes the tasks
                self._close_tasks()
                with self._lock:
                    self._running -= 1
                    self._changed.notify_all()

    def _work(self, rank: int) -> None:
        while self._step(rank):
            pass

    def _step(self, rank: int) -> bool:
        """Rests if fewer threads should work, then draws a task and runs it.

        This is a separate function, so that its variables do not keep a batch in memory while the
        thread waits for the next task.

        Args:
            rank: Number of the calling thread, from 0. With n threads that should work, only those
                with a rank below n work.

        Returns:
            False if no task is left.
        """
        with self._lock:
            self._more.wait_for(lambda: rank < self._wanted or self._is_over)
        with self._one_draws:
            task = self._drawn()
        if task is None:
            return False
        if self._pace is None:
            self._run_task(task)
        else:
            self._run_measured(task, self._pace)
        return True

    def _drawn(self) -> Task[T] | None:
        """Waits for the next task; returns None if no task is left."""
        while True:
            with self._lock:
                if self._is_over:
                    return None
                seen = limit, _ = self._results.limit, self._ended
            if (task := self._tasks.draw(limit)) is not None:
                return task
            with self._lock, span(ROOM):
                while not self._is_over and seen == (self._results.limit, self._ended):
                    self._room.wait()

    def _run_task(self, task: Task[T]) -> None:
        for result in task.run():
            self._put(*result)
            del result  # which may be the last reference to a batch
        with self._lock:
            self._ended += 1
            self._room.notify()
            self._changed.notify_all()

    def _run_measured(self, task: Task[T], pace: ReadPace) -> None:
        """Runs a task, and lets `pace` decide by its times how many threads should work."""
        with self._lock:
            start = time.perf_counter()
            pace.begun(start)  # may ask for one more thread
            self._wanted = pace.threads
        self._start_more()
        processor_start = time.thread_time()
        self._run_task(task)
        processor_s = time.thread_time() - processor_start
        with self._lock:
            pace.done(start, time.perf_counter(), processor_s, task.size)
            before, self._wanted = self._wanted, pace.threads
            if self._wanted > before:  # threads that rest may work again
                self._more.notify_all()
        self._start_more()

    def _put(self, number: int, result: T | Raised) -> None:
        with self._lock:
            if self._is_stopped:
                return  # after `stop` an error may be an effect of the stop
            if self._results.put(number, result):
                self._came.notify()
                self._changed.notify_all()
                if self._results.end is not None:
                    self._draw_no_more()


class _interrupts_first:
    """Raises the interrupt (Ctrl-C) of a wait, in place of the error that Python makes of it.

    A signal's handler may raise in `Condition.wait` or in `Thread.start`, after a lock was released
    and before Python notes that. Python then releases the lock again, which is a RuntimeError.
    """

    def __enter__(self) -> None:
        self._handled = sys.exception()

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError) and "lock" in str(error):
            context = error.__context__
            if context is not None and context is not self._handled:
                raise context from None


def _in_fork() -> None:
    for pool in list(_pools):
        pool._is_forked = True


os.register_at_fork(after_in_child=_in_fork)


@atexit.register
def _end_all() -> None:
    for pool in list(_pools):
        try:
            pool.close()
        except BaseException as error:
            log_unclosed(error)


def log_unclosed(error: BaseException) -> None:
    """Logs an error of closing that cannot be raised, because no caller would receive it."""
    logging.error("grain_shard: closing a part of the pipeline failed", exc_info=error)
