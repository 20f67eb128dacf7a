"""`DaemonThreads`: threads for calls that may never return, such as those into a network."""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

# A thread ends after it has waited this long for a call, in seconds.
_IDLE_S = 0.1


class Call:
    """A call of a function, which another thread makes.

    Args:
        function: The function.
        args: The arguments of the function.
        beside: Another call, which one thread may wait for. Its wait then ends when either of the
            two calls is done.

    Attributes:
        is_done: True once the function has returned or raised.
        error: The error that the function raised; None if it raised none, or is not done.
    """

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], beside: Call | None):
        self._function, self._args, self._result = function, args, None
        self.is_done = self._is_cancelled = False
        self.error: BaseException | None = None
        self._done = threading.Lock() if beside is None else beside._done
        self._done.acquire(blocking=False)

    def make(self) -> None:
        """Calls the function, unless the call is cancelled."""
        try:
            self._result = None if self._is_cancelled else self._function(*self._args)
        except BaseException as error:
            self.error = error

    def tell(self) -> None:
        """Ends the wait for this call."""
        self.is_done = True
        with contextlib.suppress(RuntimeError):  # raised if the call beside it has told already
            self._done.release()

    def wait(self, most_s: float = threading.TIMEOUT_MAX) -> bool:
        """Waits until this call, or the one beside it, is done. Only one thread may wait.

        Args:
            most_s: The longest wait, in seconds.

        Returns:
            False if neither call was done in this time.
        """
        return self._done.acquire(timeout=most_s)

    def cancel(self) -> None:
        """Leaves out the call if no thread has begun it."""
        self._is_cancelled = True

    def result(self) -> Any:
        """Returns the result of a call that is done, or raises its error."""
        if self.error is not None:
            raise self.error
        return self._result


class DaemonThreads:
    """Threads that make calls, in the order in which the calls are given.

    A thread is started for a call if all other threads are busy. Threads end soon after no call is
    left. When the program ends, it waits for none of these threads. So a call that never returns
    does not keep the program alive.

    No lock is held at any time, so neither an interrupt nor a fork can leave one taken. Each change
    is one step of a `dict`, a `deque` or a `set`, which Python makes atomic.

    Args:
        name: Name of the threads.
        most: The largest number of threads. Calls that are given at the same moment may start a few
            more.
    """

    def __init__(self, name: str, most: int):
        self._name, self._most = name, most
        self._begin()
        # A forked process has none of the threads, so it begins again without any.
        os.register_at_fork(after_in_child=self._begin)

    def _begin(self) -> None:
        self._calls = deque[Call]()  # that no thread has begun
        # A thread is known by a lock, which is released to wake it.
        self._threads = set[threading.Lock]()
        self._idle: dict[threading.Lock, None] = {}  # the last one is woken first

    def call(self, function: Callable[..., Any], *args: Any, beside: Call | None = None) -> Call:
        """Lets a thread call a function.

        Args:
            function: The function.
            *args: Its arguments.
            beside: A call of which the wait also ends when this call is done.
        """
        return self._give(Call(function, args, beside), self._idle_one())

    def call_at_once(
        self, function: Callable[..., Any], *args: Any, beside: Call | None = None
    ) -> Call | None:
        """Lets a thread call a function, unless every thread is busy.

        Returns:
            The call; None if every thread is busy, and nothing is then called.
        """
        wake = self._idle_one()
        if wake is None and len(self._threads) >= self._most:
            return None
        return self._give(Call(function, args, beside), wake)

    def _idle_one(self) -> threading.Lock | None:
        """Takes the lock of an idle thread, so that no other call has this thread."""
        try:
            return self._idle.popitem()[0]
        except KeyError:
            return None

    def _give(self, call: Call, wake: threading.Lock | None) -> Call:
        self._calls.append(call)
        if wake is not None:
            with contextlib.suppress(RuntimeError):  # raised if the thread is awake already
                wake.release()
        elif len(self._threads) < self._most:
            threading.Thread(target=self._run, name=self._name, daemon=True).start()
        return call

    def _run(self) -> None:
        wake = threading.Lock()
        wake.acquire()
        self._threads.add(wake)
        while True:
            try:
                call = self._calls.popleft()
            except IndexError:
                call = None
            else:
                call.make()
            # The thread is idle before the caller learns of the result. So the caller's next call
            # needs no further thread.
            self._idle[wake] = None
            if call is not None:
                call.tell()
            del call  # otherwise the result would stay in memory until the next call
            is_wanted = bool(self._calls) or wake.acquire(timeout=_IDLE_S)
            is_woken = self._idle.pop(wake, wake) is wake  # or is about to be
            if not (is_wanted or is_woken):
                self._threads.discard(wake)
                if not self._calls:
                    return
                # A call was given before this thread was counted out, so no other thread may come.
                self._threads.add(wake)
