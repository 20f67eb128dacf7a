"""`Bell`: lets threads wait for an event that any thread may announce, also in a ``__del__``.

The garbage collector may stop the threads of an iterator at any point of any thread. So a bell has
no lock that this thread could hold, as a `threading.Condition` has.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import TypeVar

S = TypeVar("S")


class Bell:
    """Lets threads wait for a condition that other threads make true.

    Any thread may ring it at any point, also in a forked process.
    """

    def __init__(self):
        # A lock for each waiting thread, which `ring` releases. A queue would not do: before Python
        # 3.13 `SimpleQueue.get(timeout=...)` may wait for ever.
        self._waiting: dict[int, threading.Lock] = {}

    def wait_for(self, has_come: Callable[[], S], wait_s: float = math.inf) -> S:
        """Waits until a condition is true.

        Args:
            has_come: Returns a true value once the condition is true. It is called at once, and
                again after each `ring`.
            wait_s: The longest wait, in seconds.

        Returns:
            The last value of `has_come`. It is false if the condition did not become true in time.
        """
        if come := has_come():
            return come
        thread, until = threading.get_ident(), time.monotonic() + wait_s
        rung = self._waiting.setdefault(thread, threading.Lock())
        rung.acquire(blocking=False)
        while not (come := has_come()) and (left_s := until - time.monotonic()) > 0:
            rung.acquire(timeout=min(left_s, threading.TIMEOUT_MAX))
        self._waiting.pop(thread, None)
        return come

    def ring(self) -> None:
        """Makes all waiting threads check their conditions again.

        Call it after the change that may have made a condition true.
        """
        for rung in list(self._waiting.values()):
            try:
                rung.release()
            except RuntimeError:
                continue  # another call of `ring` has released the lock already
