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
import contextlib
import math
import threading
import time
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar, cast

import jax

from grain_shard.interrupts import Bell
from grain_shard.pace import Pace
from grain_shard.spans import ROOM, counted_by, counter, span
from grain_shard.tasks import Items, Known, Producer, Raised, Results, Task, Tasks, log_unclosed

S = TypeVar("S")
T = TypeVar("T")

# The time that close() and the interpreter's exit wait for a thread that is inside the user's code.
_JOIN_TIMEOUT_S = 5.0
# The longest time that a waiting consumer sleeps before it checks again.
_WAKE_S = 1.0


class TaskStage(Results[T]):
    """Runs tasks in background threads and hands out their results in order.

    The threads start with the first ``next``, in the JAX context (mesh, x64) of the thread that
    made this object.

    Args:
        tasks: The work. The last thread to end closes the tasks, because only that thread can be
            sure that no other thread uses them.
        buffer_size: Most results that wait or are unfinished.
        pace: Decides how many threads work side by side, from the times of the tasks.
        name: Thread name prefix.
    """

    def __init__(self, tasks: Tasks[T], *, buffer_size: int, pace: Pace, name: str):
        # The threads hold the shared part and not this object, so this object can be collected.
        self._shared = _Shared(tasks, buffer_size, pace, name, jax_context())

    def peek(self) -> T:
        self.start()
        return self._shared.peek()

    def release(self, taken: int) -> None:
        self._shared.release(taken)

    @property
    def taken(self) -> int:
        """Number of results handed out."""
        return self._shared.taken

    def known(self) -> Known:
        """Returns the number of results that are ready, and the error or end that follows them."""
        self.start()
        return self._shared.known()

    def wait_for(self, has_come: Callable[[], bool], wait_s: float = math.inf) -> bool | None:
        """Waits for something other than the next result; by any thread, once started.

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
        return self._shared.wait_for(has_come, wait_s)

    def wake(self) -> None:
        """Makes the threads in `wait_for` call `has_come` again."""
        self._shared.wake()

    def start(self) -> None:
        """Starts working ahead; a second call does nothing."""
        self._shared.start()

    def stop(self) -> None:
        """Tells the threads to end, without waiting. From then on ``next`` ends at once."""
        self._shared.stop()

    def close(self) -> None:
        """Stops the threads and waits for them; for user code they are in, only some seconds.

        Raises:
            BaseException: A producer above this stage failed to close. A second call raises
                nothing.
        """
        self._shared.stop()
        self._shared.join()
        if (error := self._shared.take_close_error()) is not None:
            raise error

    def __del__(self) -> None:
        if (shared := getattr(self, "_shared", None)) is not None:  # __init__ may have failed
            shared.stop()
            shared.log_close_error()


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


def jax_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns the calling thread's JAX context (mesh, x64), for another thread to enter.

    The counter of the calling thread's spans then counts the other thread's spans, too.
    """
    mesh, x64 = jax.sharding.get_mesh(), jax.config.jax_enable_x64  # pyright: ignore
    counting = counter()

    @contextlib.contextmanager
    def enter():
        with counted_by(counting), jax.enable_x64(x64), contextlib.ExitStack() as stack:
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            yield

    return enter


class _Shared(Generic[T]):
    """State that the threads and the consumer share.

    The lock is the threads' own. The consumer, and whoever stops the stage, does without it: each
    of their steps is a single one, or may be done twice, in the order in which it stands there.
    """

    def __init__(
        self,
        tasks: Tasks[T],
        buffer_size: int,
        pace: Pace,
        name: str,
        enter_context: Callable[[], contextlib.AbstractContextManager[None]],
    ):
        self.threads: list[threading.Thread] = []
        self._tasks, self._buffer_size, self._pace = tasks, buffer_size, pace
        self._name, self.enter_context = name, enter_context
        self._lock = threading.Lock()
        # Bells apart, so that an event wakes only the threads that wait for it.
        # Rung when the next result or its error is ready, and when the stage is stopped.
        self._result_came = Bell()
        # Rung when any result or its error is ready, when a task is done, and when it is stopped.
        self._something_came = Bell()
        # Rung when there is room for one more result, and when no more results will begin.
        self._room_came = Bell()
        # Rung when more threads should work, and when no work is left for any thread.
        self._more_wanted = Bell()
        self._one_draws = threading.Lock()  # held while a task is drawn, which may take long
        self._results: dict[int, T | Raised] = {}
        self._begun = 0  # results that tasks have begun
        self._ready = 0  # results that are there, or were, without a gap
        self.taken = 0  # results handed out; the consumer alone changes it
        self._running = 0
        self._started = self._stopped = False
        self._drained = False  # no task will be drawn any more
        self._final: Raised | None = None  # follows the results that are ready
        self._to_close = [tasks]  # until they are closed
        self._close_errors: list[BaseException] = []
        self._nobody_closes = False  # close() will not be called again: log errors in closing

    def start(self) -> None:
        if self._started or self._stopped:
            return
        with self._lock:
            if self._started:
                return
            self._started = True
            # At exit the threads must end before JAX and Python take apart the objects they use.
            # Exit hooks run last in, first out, and JAX registered its hooks when it was imported.
            atexit.register(self._at_exit)
            try:
                self._start_thread()
            except RuntimeError:  # the system allows no more threads
                self._started = False
                atexit.unregister(self._at_exit)
                raise

    def _start_thread(self) -> None:
        rank = len(self.threads)
        thread = threading.Thread(
            target=_run, args=(self, rank), name=f"{self._name}-{rank}", daemon=True
        )
        # Recorded first: an interrupt may come as soon as the thread has started.
        self.threads.append(thread)
        self._running += 1
        try:
            thread.start()
        except RuntimeError:  # the system allows no more threads
            self.threads.pop()
            self._running -= 1
            raise

    def start_more(self) -> None:
        """Starts one more thread, if more should work.

        Each new thread calls this, so the first ones already work while the last ones start.
        """
        with self._lock:
            if len(self.threads) < self._pace.threads and not self._over():
                try:
                    self._start_thread()
                except RuntimeError:  # the system allows no more threads: continue with these
                    self._pace.limit(len(self.threads))

    def peek(self) -> T:
        if not self._wait(self._result_came, self._next_has_come):
            raise StopIteration
        if self.taken < self._ready:
            try:
                return cast(T, self._results[self.taken])
            except KeyError:  # the stage was stopped
                raise StopIteration from None
        return cast(Raised, self._final).throw()

    def release(self, taken: int) -> None:
        while self.taken < taken:
            self._results.pop(self.taken, None)
            self.taken += 1
        self._room_came.ring()

    def known(self) -> Known:
        final, ready = self._final, self._ready  # in this order: none is ready after the end
        return Known(ready, final.error if final is not None else None)

    def wait_for(self, has_come: Callable[[], bool], wait_s: float) -> bool | None:
        # Behind the last result a task may still bring it about.
        has_come_now = self._wait(
            self._something_came, lambda: has_come() or self._ended() is not None, wait_s
        )
        if has_come_now and not has_come() and (final := self._ended()) is not None:
            final.throw()
        return has_come_now

    def _ended(self) -> Raised | None:
        """Returns what follows the results, once no thread runs a task any more."""
        return None if self._running else self._final

    def wake(self) -> None:
        self._something_came.ring()

    def _wait(
        self, bell: Bell, has_come: Callable[[], bool], wait_s: float = math.inf
    ) -> bool | None:
        """Waits; False if the stage is stopped first, None after `wait_s`.

        Raises:
            RuntimeError: This is a forked process, in which the threads do not run.
        """
        until = time.monotonic() + wait_s
        while not has_come():
            if self._stopped:
                return False
            if (left_s := until - time.monotonic()) <= 0:
                return None
            self._pace.consumer_waits(time.perf_counter())
            come = bell.wait_for(lambda: self._stopped or has_come(), min(_WAKE_S, left_s))
            self._pace.consumer_goes_on(time.perf_counter())
            if not come and not any(thread.is_alive() for thread in self.threads):
                raise RuntimeError(
                    "the background threads are gone, as they are in a process made by os.fork();"
                    " make the iterator in the process that uses it."
                )
        return True

    def _next_has_come(self) -> bool:
        return self.taken < self._ready or self._final is not None

    def stop(self) -> None:
        self._stopped = True
        self._results.clear()
        self._wake_to_end()
        self._tasks.stop()
        if not self._started:
            self._close_tasks()

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

    def take_close_error(self) -> BaseException | None:
        """Returns the error of closing, once; later errors of closing are logged."""
        self._nobody_closes = True
        try:
            error = self._close_errors.pop()
        except IndexError:
            return None
        atexit.unregister(self._at_exit)
        return error

    def log_close_error(self) -> None:
        """Logs the error of closing, past or future, because close() will not be called."""
        if (error := self.take_close_error()) is not None:
            log_unclosed(error)

    def join(self) -> None:
        # A stage that never started has no threads. It may be collected at the interpreter's exit,
        # when the modules that this file imports are gone; so nothing else is called for it.
        alive = [t for t in self.threads if t.is_alive() and t.ident != threading.get_ident()]
        if alive:
            deadline = time.monotonic() + _JOIN_TIMEOUT_S
            for thread in alive:
                thread.join(max(0.0, deadline - time.monotonic()))

    def step(self, rank: int) -> bool:
        """Runs one task; False when no task is left.

        A function of its own, so that no variable keeps a batch alive while the thread waits.

        Args:
            rank: Rank of the calling thread. A thread with a rank of at least the wanted number of
                threads rests.
        """
        self._more_wanted.wait_for(lambda: rank < self._pace.threads or self._over())
        with self._one_draws:
            if not self._has_room():
                with span(ROOM):
                    self._room_came.wait_for(self._has_room)
            if self._over():
                return False
            if rank >= self._pace.threads:
                return True
            room = self._room()
            try:
                task = self._tasks.draw(room)
            except StopIteration:
                # A new StopIteration: the traceback of the caught one keeps the source's frames.
                self._end(Raised(StopIteration(), None))
                return False
            except BaseException as error:
                self._end(Raised(error, error.__traceback__))
                return False
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
            self.start_more()
        return True

    def fail(self, error: Raised) -> None:
        """Ends the stage with an error that no single result caused."""
        with self._lock:
            self._final, self._drained = self._final or error, True
        self._wake_to_end()
        self._tasks.stop()  # another thread may be waiting for something to draw

    def thread_ended(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            self._something_came.ring()
            self._close_tasks()
            # Not earlier: the interpreter's exit waits for this thread, and logs its close error.
            if not self._close_errors:
                atexit.unregister(self._at_exit)

    def _room(self) -> int:
        return self._buffer_size - (self._begun - self.taken)

    def _has_room(self) -> bool:
        with self._lock:  # where it does not change together with `Tasks.done`
            return self._over() or self._room() >= self._tasks.room_wanted

    def _over(self) -> bool:
        return self._stopped or self._drained

    def _end(self, final: Raised) -> None:
        self._drained = True
        self._deliver(self._begun, final)
        self._wake_to_end()

    def _wake_to_end(self) -> None:
        for bell in (self._result_came, self._something_came, self._room_came, self._more_wanted):
            bell.ring()

    def _deliver(self, number: int, result: T | Raised) -> None:
        with self._lock:
            if isinstance(result, Raised):
                # Earlier results may still be unfinished, so the threads continue.
                self._tasks.end()
            # If one result has several errors, the first one counts.
            if self._final is None:
                self._results.setdefault(number, result)
            before = self._ready
            with contextlib.suppress(KeyError):
                while self._final is None:
                    after = self._results[self._ready]
                    if isinstance(after, Raised):
                        self._final = after
                    else:
                        self._ready += 1
            if self._stopped:  # also if that was while this ran
                self._results.clear()
        if isinstance(result, Raised):
            self._room_came.ring()
        if self._ready > before or self._final is not None:
            self._result_came.ring()
        self._something_came.ring()

    def _at_exit(self) -> None:
        self.stop()
        self.join()
        self.log_close_error()


def _run(shared: _Shared, rank: int) -> None:
    try:
        shared.start_more()
        with shared.enter_context():
            while shared.step(rank):
                pass
    except BaseException as error:
        # An error of the stage itself: errors of tasks are results. The consumer must not hang.
        shared.fail(Raised.of(error))
    finally:
        shared.thread_ended()
