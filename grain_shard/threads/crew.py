"""`Crew`: background threads that draw tasks and run them, some of them side by side.

Grain's own background threads can hang on a BaseException, block in ``close`` for as long as their
source blocks, and can abort the interpreter at exit. A crew replaces them and promises:

* No thread outlives its consumer: ``close``, garbage collection of the owner and the end of the
  interpreter stop the threads. A thread that is inside the user's code ends when that code returns.
* After an interrupt (Ctrl-C), the consumer closes the crew, and opens another one where it stands.
* Errors of closing are reported. ``close`` raises the first one, after everything else has been
  closed. If ``close`` is never called, or has stopped waiting, the error is logged.
* A fork, or an error of the crew itself, is an error of the consumer, and no endless wait.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
import weakref
from collections.abc import Callable

from grain_shard.errors import GrainShardError
from grain_shard.threads.bell import Bell
from grain_shard.threads.closing import Closing, log_unclosed
from grain_shard.threads.pace import ReadPace
from grain_shard.threads.tasks import Raised, Task, Tasks
from grain_shard.threads.world import World

# Most seconds that close(), or the interpreter's exit, waits for a thread inside the user's code.
_JOIN_TIMEOUT_S = 5.0
# Most seconds that a waiting consumer sleeps before it checks if the threads are alive.
_WAKE_S = 1.0

_crews: weakref.WeakSet[Crew] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for crew in _crews.copy():
        try:
            crew.close()
        except BaseException as error:
            log_unclosed(error)


class ForkedError(GrainShardError, RuntimeError):
    """This process was forked, and the background threads do not run in it."""


class Crew:
    """The threads that draw the tasks of one `Tasks` and run them.

    The threads start with `start` or the first wait, in the `World` of the thread that made this
    object. They refer to the crew, so it is not garbage-collected while they run. Therefore the
    user gets another object. When that object is garbage-collected, it stops the crew.

    Args:
        tasks: The work. The last thread to end closes the tasks, because only that thread can be
            sure that no other thread uses them.
        name: Thread name prefix.
        progress: Rung when a task is done, when all threads have ended, and when the crew is
            stopped.
        num_threads: Number of threads that work side by side. Unused with `pace`.
        pace: Decides the number of threads, from the times of the tasks; None to keep the number.

    Attributes:
        threads: The threads that were started.
        failure: An error of the crew itself, because errors of tasks are results; None without one.
        is_stopped: True after `stop`.
    """

    def __init__(
        self,
        tasks: Tasks,
        *,
        name: str,
        progress: Bell,
        num_threads: int = 1,
        pace: ReadPace | None = None,
    ):
        self.threads: list[threading.Thread] = []
        self.failure: Raised | None = None
        self.is_stopped = False
        self._is_over = False  # True once no more tasks will be drawn
        self._tasks, self._pace, self._name, self._progress = tasks, pace, name, progress
        self._wanted = num_threads if pace is None else pace.threads  # threads that should work
        self._world, self._closing = World(), Closing(tasks.close)
        # Rung when more threads should work, and when no work is left for any thread.
        self._more_wanted = Bell()
        self._lock = threading.Lock()
        self._one_draws = threading.Lock()  # held while a task is drawn, which may take long
        self._running = 0  # number of threads that have not ended
        self._to_start = [0]  # the rank of the first thread; empty once that thread is started
        _crews.add(self)

    def start(self) -> None:
        """Starts the first thread, which starts the others; a second call does nothing."""
        if self._is_over:
            return
        try:
            rank = self._to_start.pop()
        except IndexError:  # another call has started the thread
            return
        # At exit, hooks of JAX and of the user destroy objects that the threads use. The exit hook
        # that was registered last runs first. So `_end_all` is registered again, to end the threads
        # before the other hooks run.
        atexit.unregister(_end_all)
        atexit.register(_end_all)
        try:
            self._start_thread(rank)
        except RuntimeError:  # raised if the system allows no more threads
            self._to_start.append(rank)
            raise

    def _start_thread(self, rank: int) -> None:
        name = f"{self._name}-{rank}"
        thread = threading.Thread(target=self._run, args=(rank,), name=name, daemon=True)
        # Before the start: if an interrupt cuts the start short, `close` knows of the thread.
        self.threads.append(thread)
        self._running += 1
        handled = sys.exception()  # the error that the caller handles
        try:
            thread.start()
        except RuntimeError as error:
            if error.__context__ is not None and error.__context__ is not handled:
                # An interrupt of the wait for the start, which Python followed by an error of its
                # own, "release unlocked lock". The thread runs.
                raise error.__context__ from None
            self.threads.pop()
            self._running -= 1
            raise

    def _start_more(self) -> None:
        """Starts one more thread, if more threads should work than were started.

        Each new thread calls this. So the first threads already work while others start.
        """
        with self._lock:
            rank = len(self.threads)
            if rank >= self._wanted or self._is_over:
                return
            try:
                self._start_thread(rank)
            except RuntimeError:  # raised if the system allows no more threads
                self._wanted = rank
                if self._pace is not None:
                    self._pace.limit(rank)

    @property
    def has_no_thread(self) -> bool:
        """True if no thread runs: all have ended, or none was started."""
        return not self._running

    def wait_for(
        self,
        has_come: Callable[[], bool],
        wait_s: float = math.inf,
        *,
        bell: Bell | None = None,
        on_wait: Callable[[float], None] | None = None,
    ) -> bool | None:
        """Starts the threads, and waits for an event. Any thread may call this.

        Args:
            has_come: Returns True once the event has happened. It must take no lock of a crew.
            wait_s: The longest wait, in seconds.
            bell: Rung when the event may have happened; None for the crew's `progress`.
            on_wait: Called about once a second during the wait, with the seconds that the wait has
                lasted; None for no call.

        Returns:
            True if the event has happened; False if the crew was stopped; None after `wait_s`.

        Raises:
            ForkedError: This is a forked process, in which the threads do not run.
            BaseException: An error of the crew itself.
        """
        if self._to_start:
            self.start()
        bell, began = bell or self._progress, time.monotonic()
        while not has_come():
            if self.is_stopped:
                return False
            if self.failure is not None:
                self.failure.throw()
            if (left_s := began + wait_s - time.monotonic()) <= 0:
                return None
            if self._pace is not None:
                self._pace.consumer_waits(time.perf_counter())
            come = bell.wait_for(
                lambda: self.is_stopped or self.failure is not None or has_come(),
                min(_WAKE_S, left_s),
            )
            if self._pace is not None:
                self._pace.consumer_goes_on(time.perf_counter())
            if not come and not any(thread.is_alive() for thread in self.threads):
                raise ForkedError(
                    "os.fork() made this process and copied no threads, so the iterator cannot make"
                    " batches here.\n"
                    "  remedy: call iter(ds) after the fork, in the process that loops over the"
                    " batches."
                )
            if not come and on_wait is not None:
                on_wait(time.monotonic() - began)
        return True

    def stop(self) -> None:
        """Tells the threads to end, without waiting."""
        self.is_stopped = self._is_over = True
        self._tasks.stop()
        self._draw_no_more()
        if all(thread.ident is None for thread in self.threads):  # no thread was started
            self._closing.close()

    def _draw_no_more(self) -> None:
        self._is_over = True
        self._more_wanted.ring()
        self._progress.ring()

    def close(self) -> None:
        """Stops the threads and waits for them.

        A thread inside the user's code is waited for 5 seconds at most.

        Raises:
            BaseException: An error of closing the tasks. A second call raises nothing.
        """
        self.stop()
        # At the interpreter's exit the modules that this file imports may be gone. By then the
        # threads have ended. So without a living thread, no imported function is called.
        until: float | None = None
        while alive := self._others_alive():  # again, because one of them may have started another
            until = time.monotonic() + _JOIN_TIMEOUT_S if until is None else until
            if (left_s := until - time.monotonic()) <= 0:
                break
            alive[0].join(left_s)
        self._closing.raise_error()

    def _others_alive(self) -> list[threading.Thread]:
        return [t for t in self.threads if t.is_alive() and t.ident != threading.get_ident()]

    def log_close_error(self) -> None:
        """Logs the error of closing, now or when it happens, because close() will not be called."""
        self._closing.log_error()

    def _run(self, rank: int) -> None:
        try:
            self._start_more()
            self._world.run(self._work, rank)
        except BaseException as error:
            self.failure = self.failure or Raised.of(error)
            self._draw_no_more()
            self._tasks.abort(self.failure)
        finally:
            with self._lock:
                self._running -= 1
                is_last = self._running == 0
            if is_last:
                self._progress.ring()
                self._closing.close()

    def _work(self, rank: int) -> None:
        while self._step(rank):
            pass

    def _step(self, rank: int) -> bool:
        """Draws one task and runs it, or rests.

        This is a separate function, so that its variables do not keep a batch in memory while the
        thread waits for the next task.

        Args:
            rank: Number of the calling thread, from 0. The thread rests while its rank is not below
                the number of threads that should work.

        Returns:
            False if no task is left, so that the thread ends.
        """
        if rank >= self._wanted:
            self._more_wanted.wait_for(lambda: rank < self._wanted or self._is_over)
        with self._one_draws:
            if self._is_over:
                return False
            if rank >= self._wanted:
                return True
            task = self._tasks.draw()
            if task is None:
                self._draw_no_more()
                return False
        if self._pace is None:
            task.run()
            self._progress.ring()
        else:
            self._run_measured(task, self._pace)
        return True

    def _run_measured(self, task: Task, pace: ReadPace) -> None:
        """Runs a task, and lets the pace decide by its times how many threads should work."""
        with self._lock:
            start = time.perf_counter()
            pace.begun(start)
        processor_start = time.thread_time()
        task.run()
        processor_s = time.thread_time() - processor_start
        with self._lock:
            before = self._wanted
            pace.done(start, time.perf_counter(), processor_s, task.size)
            self._wanted = pace.threads
            more = self._wanted > before
        self._progress.ring()
        if more:
            self._more_wanted.ring()
            self._start_more()
