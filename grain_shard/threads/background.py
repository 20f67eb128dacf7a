"""`Background`: results that background threads make ahead of the training loop, in order.

A `Crew` (`crew.py`) runs the threads, and `Results` (`results.py`) is the buffer between them and
the loop. Together they promise:

* Results come in order, even if a later result is ready first.
* At most as many results as the buffer has places exist at a time, ready or being made.
* An exception of any class that the work raises reaches the consumer; from then on ``next`` keeps
  raising it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from grain_shard.threads.crew import Crew
from grain_shard.threads.pace import ReadPace
from grain_shard.threads.results import Results, ResultTasks
from grain_shard.threads.tasks import Items, Known, Producer, Raised, Task

S = TypeVar("S")
T = TypeVar("T")


class Background(Producer[T]):
    """The results of tasks that background threads run.

    Args:
        tasks: The work.
        name: Thread name prefix.
        num_threads: Number of threads that work side by side. Unused with `pace`.
        pace: Decides the number of threads, from the times of the tasks; None to keep the number.
        on_wait: Called about once a second during a wait for the next result, with the seconds that
            the wait has lasted; None for no call.
    """

    def __init__(
        self,
        tasks: ResultTasks[T],
        *,
        name: str,
        num_threads: int = 1,
        pace: ReadPace | None = None,
        on_wait: Callable[[float], None] | None = None,
    ):
        self._results = results = tasks.results
        self._on_wait = on_wait
        self._crew = Crew(
            tasks, name=name, progress=results.progress, num_threads=num_threads, pace=pace
        )

    @property
    def threads(self) -> list[threading.Thread]:
        """The threads that were started."""
        return self._crew.threads

    @property
    def taken(self) -> int:
        """Number of results that were taken."""
        return self._results.taken

    def start(self) -> None:
        """Starts the threads; a second call does nothing."""
        self._crew.start()

    def __next__(self) -> T:
        results = self._results
        if not self._crew.wait_for(results.has_next, bell=results.came, on_wait=self._on_wait):
            raise StopIteration
        return results.take()

    def known(self) -> Known:
        """Returns the number of results that are ready, and the error or end that follows them."""
        return self._results.known()

    def wait_for(
        self,
        has_come: Callable[[], bool],
        wait_s: float = math.inf,
        on_wait: Callable[[float], None] | None = None,
    ) -> bool | None:
        """Waits for an event that is not the next result. Any thread may call this.

        Args:
            has_come: Returns True once the event has happened. It is called again whenever a task
                is done, a result is ready or the threads end, and after `wake`. It must take no
                lock of another `Background`.
            wait_s: The longest wait, in seconds.
            on_wait: Called about once a second during the wait, with the seconds that the wait has
                lasted; None for no call.

        Returns:
            True if the event has happened; False if the threads were stopped; None after `wait_s`.

        Raises:
            BaseException: The error of a task, or StopIteration at the end, once all threads have
                ended without the event.
            ForkedError: This is a forked process, in which the threads do not run.
        """
        # An error does not end the wait at once: an unfinished task may still cause the event.
        came = self._crew.wait_for(lambda: has_come() or self._has_ended, wait_s, on_wait=on_wait)
        if came and not has_come():
            cast(Raised, self._results.final).throw()
        return came

    @property
    def _has_ended(self) -> bool:
        return self._crew.has_no_thread and self._results.final is not None

    def wake(self) -> None:
        """Makes the threads in `wait_for` check again if their event has happened."""
        self._results.progress.ring()

    def stop(self) -> None:
        """Tells the threads to end, without waiting. From then on ``next`` raises StopIteration."""
        self._crew.stop()

    def close(self) -> None:
        """Stops the threads and waits for them.

        A thread inside the user's code is waited for 5 seconds at most.

        Raises:
            BaseException: An error of closing the tasks or a producer above. A second call raises
                nothing.
        """
        self._crew.close()

    def log_close_error(self) -> None:
        """Logs the error of closing, now or when it happens, because close() will not be called."""
        self._crew.log_close_error()


def in_background(
    work: Callable[[S], T],
    source: Producer[S],
    *,
    buffer_size: int,
    num_threads: int = 1,
    name: str,
    on_wait: Callable[[float], None] | None = None,
) -> Background[T]:
    """Applies a function to the items of a producer, in background threads, and keeps their order.

    Args:
        work: The function. If `num_threads` is above 1, several threads call it at the same time.
        source: The producer of the items. One thread at a time asks it for an item, once there is
            room for a result. The producer is stopped with the threads. The last thread to end
            closes it, because only that thread can be sure that no other thread uses it.
        buffer_size: Most results that wait or are unfinished.
        num_threads: Number of threads that work side by side.
        name: Thread name prefix.
        on_wait: An argument of `Background`.
    """
    threads = min(num_threads, buffer_size)
    tasks = _Mapped(work, source, buffer_size, lingers=threads <= buffer_size // 2)
    return Background(tasks, name=name, num_threads=threads, on_wait=on_wait)


class _Mapped(ResultTasks[T], Generic[S, T]):
    """Tasks of which each makes one result from one item of a producer."""

    # A class attribute, because the names of this module may be gone at the interpreter's exit.
    _no_source = Items(iter(()))

    def __init__(
        self, work: Callable[[S], T], source: Producer[S], buffer_size: int, *, lingers: bool
    ):
        super().__init__(buffer_size)
        self._work, self._source, self._lingers = work, source, lingers

    def draw(self) -> Task | None:
        results = self.results
        has_room = results.wait_for_room(
            lambda room: room > 0 or results.has_end, lingers=self._lingers
        )
        if not has_room or results.has_end:
            return None
        try:
            item = next(self._source)
        except StopIteration:
            # A new StopIteration, because the traceback of the caught one would keep the frames of
            # the source in memory.
            results.end(Raised(StopIteration(), None))
        except BaseException as error:
            results.end(Raised(error, error.__traceback__))
        else:
            return _Call(self._work, item, results, results.begin())
        return None

    def stop(self) -> None:
        super().stop()
        self._source.stop()

    def abort(self, error: Raised) -> None:
        super().abort(error)
        self._source.stop()

    def close(self) -> None:
        # This also drops the reference to the source. A Grain iterator that is still alive when the
        # interpreter clears its modules (if a global variable refers to it) fails in its __del__.
        source, self._source = self._source, self._no_source
        source.close()


class _Call(Task, Generic[S, T]):
    """The call of a function for one item."""

    def __init__(self, work: Callable[[S], T], item: S, results: Results[T], number: int):
        self._work, self._item, self._results, self._number = work, item, results, number

    def run(self) -> None:
        try:
            result: T | Raised = self._work(self._item)
        except BaseException as error:
            result = Raised.of(error)
        self._results.put(self._number, result)
