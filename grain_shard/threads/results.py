"""`Results`: the bounded buffer between the threads that make results and one consumer."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Generic, TypeVar, cast

from grain_shard.spans import ROOM, span
from grain_shard.threads.bell import Bell
from grain_shard.threads.tasks import Known, Raised, Tasks

T = TypeVar("T")

# After a wait for room, a thread waits at most this many seconds until half of the buffer is free.
# Several results in a row disturb the loop less than one at a time: a batch in memory takes 5 %
# less time. With many threads no thread waits, because unfinished results alone fill the half.
_LINGER_S = 5e-3


class Results(Generic[T]):
    """Results that several threads make in any order, and that one consumer takes in order.

    The threads that make results take the lock. `stop` takes none, because the garbage collector
    may call it in a thread that holds the lock. Each change without the lock is atomic. After an
    interrupt (Ctrl-C), the consumer stops the results and takes no more of them, because one may be
    lost.

    Args:
        size: Most results that wait or are unfinished.

    Attributes:
        begun: Number of results that were begun. Results are numbered in this order.
        ready: Number of results before the first missing one, taken ones included.
        taken: Number of results taken; only the consumer changes it.
        final: The error or the end after the ready results; None while it is not known.
        has_end: True once an error or the end stands in place of any result. No further result
            should begin.
        is_stopped: True after `stop`.
        came: Rung when the next result or its error is ready, and when the results are stopped.
        progress: Rung when any result or its error is ready.
    """

    def __init__(self, size: int):
        self.size: int = size
        self.begun = self.ready = self.taken = 0
        self.final: Raised | None = None
        self.has_end = self.is_stopped = False
        # There are several bells, so that an event wakes only the threads that wait for it.
        self.came, self.progress, self._room_came = Bell(), Bell(), Bell()
        self._lock = threading.Lock()
        self._results: dict[int, T | Raised] = {}  # by number

    @property
    def room(self) -> int:
        """Number of results that may begin now, until the buffer is full."""
        return self.size - (self.begun - self.taken)

    def wait_for_room(self, is_enough: Callable[[int], bool], *, lingers: bool) -> bool:
        """Waits until there is room for the next task.

        Args:
            is_enough: Returns True if the next task can be drawn. Its argument is the number of
                results that the task may begin. It is called again after each event.
            lingers: True waits up to 5 ms longer, until half of the buffer is free.

        Returns:
            False if no more results are needed: they were stopped, or their end is known.
        """

        def has_come(least: int = 0) -> bool:
            return not self._are_needed or is_enough(self.room if self.room >= least else 0)

        if not has_come():
            with span(ROOM):
                self._room_came.wait_for(has_come)
                if lingers:
                    self._room_came.wait_for(lambda: has_come(self.size // 2), _LINGER_S)
        return self._are_needed

    @property
    def _are_needed(self) -> bool:
        return not self.is_stopped and self.final is None

    def begin(self, count: int = 1) -> int:
        """Begins the next results, and returns the number of the first one, from 0.

        One thread at a time calls this.
        """
        self.begun += count
        return self.begun - count

    def put(self, number: int, result: T | Raised) -> None:
        """Adds a result or its error. If a result gets several errors, the first one counts.

        Args:
            number: The number of the result, from 0.
            result: The result, or its error.
        """
        with self._lock:
            # An error after `stop` may be an effect of the stop, and is no end.
            if self.final is None and number >= self.ready and not self.is_stopped:
                kept = self._results.setdefault(number, result)
                self.has_end = self.has_end or isinstance(kept, Raised)
            before = self.ready
            with contextlib.suppress(KeyError):  # raised if the next result is missing or cleared
                while self.final is None:
                    after = self._results[self.ready]
                    if isinstance(after, Raised):
                        self.final = after
                    else:
                        self.ready += 1
            if self.is_stopped:  # `stop` may have cleared the results before this one was added
                self._results.clear()
        if self.ready > before or self.final is not None:
            self.came.ring()
        if self.has_end:
            self._room_came.ring()
        self.progress.ring()

    def end(self, final: Raised) -> None:
        """Puts an error or the end after the last result that was begun."""
        self.put(self.begun, final)

    def abort(self, final: Raised) -> None:
        """Puts an error after the ready results, because the missing ones will not come."""
        with self._lock:
            self.final = self.final or final
        self._ring_all()

    def check_room_again(self) -> None:
        """Makes the thread in `wait_for_room` check again if the next task can be drawn."""
        self._room_came.ring()

    def has_next(self) -> bool:
        """Returns True if the next result, or the error or the end in its place, is known."""
        return self.taken < self.ready or self.final is not None

    def take(self) -> T:
        """Takes the next result. `has_next` must be true.

        Raises:
            StopIteration: The end, or the results were stopped.
            BaseException: The error that follows the results.
        """
        if self.taken >= self.ready and self.final is not None:
            self.final.throw()
        try:
            result = cast(T, self._results.pop(self.taken))
        except KeyError:  # raised if `stop` has cleared the results
            raise StopIteration from None
        self.taken += 1
        self._room_came.ring()
        return result

    def known(self) -> Known:
        """Returns the number of results that are ready, and the error or end that follows them."""
        # The end is read first. Once there is an end, the number of ready results is final.
        final, ready = self.final, self.ready
        return Known(ready, final.error if final is not None else None)

    def stop(self) -> None:
        """Ends the results, without waiting. From then on `take` raises StopIteration."""
        self.is_stopped = True
        self._results.clear()
        self._ring_all()

    def _ring_all(self) -> None:
        for bell in (self.came, self.progress, self._room_came):
            bell.ring()


class ResultTasks(Tasks, Generic[T]):
    """Tasks that put their results into a buffer.

    Args:
        size: Most results that wait or are unfinished.

    Attributes:
        results: The buffer.
    """

    def __init__(self, size: int):
        self.results: Results[T] = Results(size)

    def stop(self) -> None:
        self.results.stop()

    def abort(self, error: Raised) -> None:
        self.results.abort(error)
