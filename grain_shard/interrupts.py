"""Waits and work that an interrupt cannot leave half done.

Python raises KeyboardInterrupt in the main thread between any two instructions: also after a lock
is taken and before the ``with`` block begins, and inside `threading.Condition`, which then fails
itself. So the main thread, in which most training loops run, takes no lock of this package. It
waits by a `Bell`, and leaves work of several steps to another thread, by `Uninterrupted`.
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
    """Wakes the threads that wait for something that other threads bring about.

    It has no lock. So any thread may ring it at any point of its work: after an interrupt, in a
    forked process, and where the garbage collector runs a ``__del__``.
    """

    def __init__(self):
        # A lock for each thread that waits; `ring` releases it. Not a queue: before Python 3.13
        # `SimpleQueue.get(timeout=...)` may wait for ever.
        self._waiting: dict[int, threading.Lock] = {}

    def wait_for(self, has_come: Callable[[], S], wait_s: float = math.inf) -> S:
        """Waits until something has come.

        Args:
            has_come: Returns a true value once it has; called again after each `ring`.
            wait_s: The longest wait, in seconds.

        Returns:
            What `has_come` returned last.
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
        """Makes the threads that wait look again. Call it after the change that they wait for."""
        for rung in list(self._waiting.values()):
            try:
                rung.release()
            except RuntimeError:
                continue  # another thread has just rung, too


class Uninterrupted:
    """Work that is done once and as a whole, also if the caller is interrupted.

    Only the main thread is interrupted, so another thread works for it. An interrupted caller
    leaves that thread to its work; the next call waits for it, and raises its error.

    Args:
        work: The work.

    Attributes:
        is_begun: True once the work was asked for.
        is_over: True once the work is done, or has failed.
    """

    def __init__(self, work: Callable[[], None]):
        self._work, self._error = work, cast(BaseException | None, None)
        self._lock = threading.Lock()
        self.is_begun: bool = False
        self.is_over: bool = False

    def __call__(self) -> None:
        """Does the work and waits for it; a further call does nothing.

        Raises:
            BaseException: The error of the work, once.
        """
        self.is_begun = True
        if not threading:  # the interpreter has ended, and cleared this module
            return
        is_main = threading.get_ident() == threading.main_thread().ident
        # No other thread runs any more where the interpreter ends.
        if not self.is_over and is_main and not sys.is_finalizing():
            running = threading.Lock()
            running.acquire()
            with contextlib.suppress(RuntimeError):  # the system allows no more threads
                # Not `Thread.start`, inside which an interrupt may come, too.
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
