"""`DaemonThreads`: threads for calls that may never return, such as those into a network."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

# A thread ends after it has waited this long for a call, in seconds.
_IDLE_S = 0.1


class DaemonThreads:
    """Threads that make calls, in the order in which the calls are given.

    A thread is started for a call if all other threads are busy. Threads end soon after no call is
    left. When the program ends, it waits for none of these threads. So a call that never returns
    does not keep the program alive.

    Args:
        name: Name of the threads.
        most: The largest number of threads.
    """

    def __init__(self, name: str, most: int):
        self._name, self._most = name, most
        self._begin()
        # A forked process has none of the threads, so it begins again without any.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        # The methods take this lock itself and not the condition. A condition takes its lock by
        # Python code, in which an interrupt could leave the lock taken. A `SimpleQueue` is not
        # used, because before Python 3.13 its `get(timeout=...)` may wait for ever.
        self._lock = threading.RLock()
        self._given = threading.Condition(self._lock)
        self._calls = deque[tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]]()
        self._threads = self._unfinished = 0

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Lets a thread call a function, and returns the future of the result."""
        future = Future[Any]()
        with self._lock:
            if self._threads <= self._unfinished and self._threads < self._most:
                threading.Thread(target=self._run, name=self._name, daemon=True).start()
                self._threads += 1
            self._unfinished += 1
            self._calls.append((future, function, args))
            self._given.notify()
        return future

    def call_at_once(self, function: Callable[..., Any], *args: Any) -> Future[Any] | None:
        """Lets a thread call a function, unless every thread is busy.

        Returns:
            The future of the result; None if every thread is busy, and nothing is then called.
        """
        with self._lock:
            return self.call(function, *args) if self._unfinished < self._most else None

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._given.wait_for(lambda: self._calls, _IDLE_S):
                    self._threads -= 1
                    return
                future, function, args = self._calls.popleft()
            is_wanted = future.set_running_or_notify_cancel()
            result = error = None
            try:
                result = function(*args) if is_wanted else None
            except BaseException as raised:
                error = raised
            with self._lock:
                self._unfinished -= 1
            if error is not None:
                future.set_exception(error)
            elif is_wanted:
                future.set_result(result)
            del future, function, args, result, error  # otherwise they live until the next call
