"""`Bell`: lets threads wait in a way that an interrupt (Ctrl-C) cannot leave half done.

Python raises KeyboardInterrupt in the main thread between any two instructions. For example, it may
come after a lock is taken and before its ``with`` block begins, or inside `threading.Condition`,
whose own code then fails. Most training loops run in the main thread. So ``next`` and ``close`` of
an iterator take no lock of this package there, and wait by a `Bell`. A call that reads in the
calling thread, such as ``ds[i]`` or ``abstract_batch``, takes locks.
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

    A bell has no lock of its own that a thread could hold for ever. So any thread may ring it at
    any point: after an interrupt, in a forked process, or in a ``__del__`` that the garbage
    collector runs.
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
