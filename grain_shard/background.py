"""`TaskStage`: background threads that work ahead of the training loop, with a bounded buffer.

Grain's own background stage can hang on a BaseException, blocks in ``close`` for as long as its
source blocks, and can abort the interpreter at exit. This stage replaces it and promises:

* Results come in order, even if a later result is ready first.
* At most `buffer_size` results exist at a time, ready or being made.
* An exception of any class that the work raises reaches the consumer; from then on ``next`` keeps
  raising it.
* No thread outlives its consumer: ``close``, garbage collection and the end of the interpreter stop
  the threads. A thread that is inside the user's code ends when that code returns.
* An interrupt (Ctrl-C) of the consumer leaves no lock held. The consumer then closes the stage, and
  opens another one where it stands.
* Errors of closing are reported. ``close`` raises the first one, after everything else has been
  closed. If ``close`` is never called, or has stopped waiting, the error is logged.

`TaskStage` implements all of this: its threads draw tasks (`tasks.py`) and run them. `Background`
is the simple case: it applies a function to the items of a producer.
"""

from __future__ import annotations

import atexit
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

from grain_shard.bell import Bell
from grain_shard.errors import GrainShardError
from grain_shard.ordered_results import OrderedResults
from grain_shard.pace import Pace
from grain_shard.spans import ROOM, span
from grain_shard.tasks import Items, Producer, Raised, Task, Tasks, log_unclosed
from grain_shard.world import World

S = TypeVar("S")
T = TypeVar("T")

# Most seconds that close(), or the interpreter's exit, waits for a thread inside the user's code.
_JOIN_TIMEOUT_S = 5.0
# Most seconds that a waiting consumer sleeps before it checks if the threads are alive.
_WAKE_S = 1.0
# After a wait for room, a thread waits at most this many seconds until half of the buffer is free.
# Several results in a row disturb the loop less than one at a time: a batch in memory takes 5 %
# less time. With many threads no thread waits, because unfinished results alone fill the half.
_LINGER_S = 5e-3

_stages: weakref.WeakSet[TaskStage[Any]] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for stage in _stages.copy():
        try:
            stage.close()
        except BaseException as error:
            log_unclosed(error)


class ForkedError(GrainShardError, RuntimeError):
    """This process was forked, and the background threads do not run in it."""


class TaskStage(OrderedResults[T]):
    """Runs tasks in background threads and hands out their results in order.

    The threads start with the first ``next``, in the `World` of the thread that made this stage.
    They refer to the stage, so it is not garbage-collected while they run. Therefore the user gets
    another object. When that object is garbage-collected, it stops the stage.

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
        self._world = World()
        # Rung when more threads should work, and when no work is left for any thread.
        self._more_wanted = Bell()
        self._one_draws = threading.Lock()  # held while a task is drawn, which may take long
        self._running = 0  # number of threads that have not ended
        self._is_over = False  # True once no more tasks will be drawn
        self._to_close = [tasks]  # empty once the tasks are closed
        self._close_errors: list[BaseException] = []
        self._to_start = [0]  # the rank of the first thread; empty once that thread is started
        _stages.add(self)
        # True once close() will not raise any more, so that errors of closing are logged.
        self._nobody_closes = False

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
        try:
            thread.start()
        except RuntimeError:
            self.threads.pop()
            self._running -= 1
            raise

    def _start_more(self) -> None:
        """Starts one more thread, if the pace asks for more threads than were started.

        Each new thread calls this. So the first threads already work while others start.
        """
        with self._lock:
            rank = len(self.threads)
            if rank >= self._pace.threads or self._is_over:
                return
            try:
                self._start_thread(rank)
            except RuntimeError:  # raised if the system allows no more threads
                self._pace.limit(rank)

    def wait_for(self, has_come: Callable[[], bool], wait_s: float = math.inf) -> bool | None:
        """Waits for an event that is not the next result. Any thread may call this.

        Args:
            has_come: Returns True once the event has happened. It is called again whenever a task
                is done, a result fails or the threads end, and after `wake`. It must take no lock
                of another stage.
            wait_s: The longest wait, in seconds.

        Returns:
            True if the event has happened; False if the stage was stopped; None after `wait_s`.

        Raises:
            BaseException: The error of a task, or StopIteration at the end, once all threads have
                ended without the event.
            ForkedError: This is a forked process, in which the threads do not run.
        """
        # An error does not end the wait at once: an unfinished task may still cause the event.
        has_come_now = self._wait(
            self._something_came, lambda: has_come() or self._ended() is not None, wait_s
        )
        if has_come_now and not has_come() and (final := self._ended()) is not None:
            final.throw()
        return has_come_now

    @property
    def is_idle(self) -> bool:
        """True if no thread works, because the buffer is full or all tasks are done."""
        is_full = self.room < max(1, self._tasks.room_wanted)
        return self._ready >= self._begun and (self._is_over or is_full)

    def _ended(self) -> Raised | None:
        """Returns the error or the end that follows the results; None while a thread runs."""
        return None if self._running else self._final

    def _wait(
        self, bell: Bell, has_come: Callable[[], bool], wait_s: float = math.inf
    ) -> bool | None:
        """Waits for an event, and starts the threads first.

        Args:
            bell: Rung when the event may have happened.
            has_come: Returns True once the event has happened.
            wait_s: The longest wait, in seconds.

        Returns:
            True if the event has happened; False if the stage was stopped; None after `wait_s`.

        Raises:
            ForkedError: This is a forked process, in which the threads do not run.
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
                raise ForkedError(
                    "os.fork() made this process and copied no threads, so the iterator cannot make"
                    " batches here.\n"
                    "  remedy: call iter(ds) after the fork, in the process that loops over the"
                    " batches."
                )
        return True

    def stop(self) -> None:
        """Tells the threads to end, without waiting. From then on ``next`` raises StopIteration."""
        self._is_over = True
        super().stop()
        self._tasks.stop()
        if all(thread.ident is None for thread in self.threads):  # no thread was started
            self._close_tasks()

    def close(self) -> None:
        """Stops the threads and waits for them.

        A thread inside the user's code is waited for 5 seconds at most.

        Raises:
            BaseException: An error of closing the tasks or a producer above this stage. A second
                call raises nothing.
        """
        self.stop()
        # At the interpreter's exit the modules that this file imports may be gone. By then the
        # threads have ended. So without a living thread, no imported function is called.
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
        except IndexError:  # another call has closed the tasks
            return
        try:
            tasks.close()
        except BaseException as error:
            self._close_errors.append(error)
            if self._nobody_closes:
                self.log_close_error()

    def log_close_error(self) -> None:
        """Logs the error of closing, now or when it happens, because close() will not be called."""
        self._nobody_closes = True
        if self._close_errors:
            log_unclosed(self._close_errors.pop())

    def _run(self, rank: int) -> None:
        try:
            self._start_more()
            self._world.enter()
            while self._step(rank):
                pass
        except BaseException as error:
            # This is an error of the stage itself, because errors of tasks are results. It is kept
            # as the end of the results, so that the consumer does not wait for ever.
            with self._lock:
                self._final, self._is_over = self._final or Raised.of(error), True
            self._wake_all()
            self._tasks.stop()  # ends the wait of a thread inside `draw`
        finally:
            self._thread_ended()

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
        if rank >= self._pace.threads:
            self._more_wanted.wait_for(lambda: rank < self._pace.threads or self._is_over)
        with self._one_draws:
            if not self._has_room():
                with span(ROOM):
                    self._room_came.wait_for(self._has_room)
                    if self._pace.threads <= (half := self._size // 2):
                        self._room_came.wait_for(lambda: self._has_room(half), _LINGER_S)
            if self._is_over:
                return False
            if rank >= self._pace.threads:
                return True
            try:
                task = self._tasks.draw(self.room)
            except StopIteration:
                # A new StopIteration, because the traceback of the caught one would keep the frames
                # of the source in memory.
                return self._end(Raised(StopIteration(), None))
            except BaseException as error:
                return self._end(Raised(error, error.__traceback__))
            if task is None:
                return True
            with self._lock:
                self._begun += task.begins
                start = time.perf_counter()
                self._pace.begun(start)
        processor_start = time.thread_time()
        for number, result in task.run():
            if isinstance(result, Raised):
                # After an error no further result begins. The threads go on, because earlier
                # results may be unfinished.
                with self._lock:
                    self._tasks.end()
                self._room_came.ring()
            self._put(number, result)
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

    def _end(self, final: Raised) -> bool:
        """Puts an error or the end after the last result that was begun.

        Returns:
            False, so that the calling thread ends.
        """
        self._is_over = True
        self._put(self._begun, final)
        self._wake_all()
        return False

    def _has_room(self, least: int = 0) -> bool:
        """Returns True if a thread can draw: a task, or that none is left.

        Args:
            least: Number of results for which there must be room, if the next task wants any room.
        """
        with self._lock:  # `Tasks.done` changes `room_wanted` under this lock
            wanted = self._tasks.room_wanted
            return self._is_over or self.room >= (wanted and max(wanted, least))

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
    """Applies a function to the items of a producer, in background threads. Results keep the order.

    Args:
        work: The function. If `num_threads` is above 1, several threads call it at the same time.
        source: The producer of the items. One thread at a time asks it for an item, once there is
            room for a result. The producer is stopped with this stage. The last thread to end
            closes it, because only that thread can be sure that no other thread uses it.
        buffer_size: Most results that wait or are unfinished.
        num_threads: Number of threads that work side by side.
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
    """The tasks of `Background`: each one makes one result from one item."""

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
        # This also drops the reference to the source. A Grain iterator that is still alive when the
        # interpreter clears its modules (if a global variable refers to it) fails in its __del__.
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
