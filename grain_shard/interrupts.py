"""`Bell` and `Uninterrupted`: waits and work that an interrupt (Ctrl-C) cannot leave half done.

Python raises KeyboardInterrupt in the main thread between any two instructions. For example, it may
come after a lock is taken and before its ``with`` block begins, or inside `threading.Condition`,
whose own code then fails. Most training loops run in the main thread. So ``next`` and ``close`` of
an iterator take no lock of this package there. They wait by a `Bell`, and leave work of several
steps to another thread, by `Uninterrupted`. A call that reads in the calling thread, such as
``ds[i]`` or ``abstract_batch``, takes locks.
"""

from __future__ import annotations

import _thread
import contextlib
import math
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

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


class Uninterrupted:
    """A function that runs only once and to its end, even if its caller is interrupted.

    Python interrupts only the main thread. So if the main thread calls this, another thread runs
    the function. If the main thread is interrupted while it waits, the other thread goes on. The
    next call waits for the function to end, and raises its error.

    Args:
        work: The function.

    Attributes:
        is_begun: True once this was called.
        is_over: True once the function has returned or raised.
    """

    def __init__(self, work: Callable[[], None]):
        self._work, self._error = work, cast(BaseException | None, None)
        self._lock = threading.Lock()
        self.is_begun: bool = False
        self.is_over: bool = False

    def __call__(self) -> None:
        """Runs the function and waits until it ends. A further call does not run it again.

        Raises:
            BaseException: The error of the function. Only one call raises it.
        """
        self.is_begun = True
        if not threading:  # the interpreter has ended, and cleared this module
            return
        is_main = threading.get_ident() == threading.main_thread().ident
        # While the interpreter ends, no other thread runs, so this thread runs the function.
        if not self.is_over and is_main and not sys.is_finalizing():
            running = threading.Lock()
            running.acquire()
            with contextlib.suppress(RuntimeError):  # raised if the system allows no more threads
                # Not `Thread.start`, which an interrupt may leave half done.
                _thread.start_new_thread(self._run, (running.release,))
                running.acquire()
        if not self.is_over:
            self._run()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, tell: Callable[[], None] = lambda: None) -> None:
        with self._lock:
            if not self.is_over:
                try:
                    self._work()
                except BaseException as error:
                    self._error = error
                self.is_over = True
        tell()
