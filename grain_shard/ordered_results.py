"""`OrderedResults`: the bounded buffer between the threads that make results and one consumer."""

from __future__ import annotations

import contextlib
import threading
from abc import abstractmethod
from collections.abc import Callable
from typing import TypeVar, cast

from grain_shard.bell import Bell
from grain_shard.tasks import Known, Producer, Raised

T = TypeVar("T")


class OrderedResults(Producer[T]):
    """Results that several threads make in any order, and that one consumer takes in order.

    Only the threads that make results take the lock. The consumer takes no lock, because an
    interrupt (Ctrl-C) could leave it locked. The thread that stops the results takes no lock,
    either. Each change that is made without the lock is atomic. An interrupted consumer closes the
    results and takes no more of them, because a result may be lost between two instructions.

    Args:
        size: Most results that wait or are unfinished.

    Attributes:
        taken: Number of results taken; only the consumer changes it.
    """

    def __init__(self, size: int):
        self._size, self.taken = size, 0
        self._lock = threading.Lock()
        # There are several bells, so that an event wakes only the threads that wait for it.
        # Rung when the next result or its error is ready, and when the results are stopped.
        self._result_came = Bell()
        # Rung when any result or its error is ready, when a task is done, and when the results are
        # stopped.
        self._something_came = Bell()
        # Rung when there is room for one more result, and when no more results will begin.
        self._room_came = Bell()
        self._results: dict[int, T | Raised] = {}  # by number
        self._begun = 0  # number of results that tasks have begun
        self._ready = 0  # number of results before the first missing one, taken ones included
        self._final: Raised | None = None  # the error or the end after the ready results
        self._is_stopped = False

    @property
    def room(self) -> int:
        """Number of results that tasks may begin now, until the buffer is full."""
        return self._size - (self._begun - self.taken)

    @abstractmethod
    def _wait(self, bell: Bell, has_come: Callable[[], bool]) -> bool | None:
        """Waits until an event has happened.

        Args:
            bell: Rung when the event may have happened.
            has_come: Returns True once the event has happened.

        Returns:
            True if the event has happened; False or None if the wait ended before.
        """

    def _next_has_come(self) -> bool:
        return self.taken < self._ready or self._final is not None

    def __next__(self) -> T:
        if not self._wait(self._result_came, self._next_has_come):
            raise StopIteration
        if self.taken >= self._ready:
            cast(Raised, self._final).throw()
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
        final, ready = self._final, self._ready
        return Known(ready, final.error if final is not None else None)

    def wake(self) -> None:
        """Makes the threads in `TaskStage.wait_for` check again if their event has happened."""
        self._something_came.ring()

    def stop(self) -> None:
        """Ends the results, without waiting. From then on ``next`` raises StopIteration."""
        self._is_stopped = True
        self._results.clear()
        self._wake_all()

    def _wake_all(self) -> None:
        for bell in (self._result_came, self._something_came, self._room_came):
            bell.ring()

    def _put(self, number: int, result: T | Raised) -> None:
        """Adds a result or its error. If a result gets several errors, the first one counts.

        Args:
            number: The number of the result, from 0.
            result: The result, or its error.
        """
        with self._lock:
            if self._final is None:
                self._results.setdefault(number, result)
            before = self._ready
            with contextlib.suppress(KeyError):  # raised if the next result is missing or cleared
                while self._final is None:
                    after = self._results[self._ready]
                    if isinstance(after, Raised):
                        self._final = after
                    else:
                        self._ready += 1
            if self._is_stopped:  # `stop` may have cleared the results before this one was added
                self._results.clear()
        if self._ready > before or self._final is not None:
            self._result_came.ring()
        self._something_came.ring()
