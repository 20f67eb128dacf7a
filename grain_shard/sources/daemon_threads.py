"""`DaemonThreads`: threads that make calls which may never return."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

# A thread ends after it has waited this long for a call, in seconds.
_IDLE_S = 0.1
# At its end, the program waits for these threads this long at most, in seconds.
_EXIT_S = 5.0


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
        self.is_done: bool = False
        self.error: BaseException | None = None
        if beside is None:
            self._done = threading.Lock()
            self._done.acquire()
        else:
            self._done = beside._done

    def make(self) -> None:
        """Calls the function."""
        try:
            self._result = self._function(*self._args)
        except BaseException as error:
            # Without the entry of this frame in the traceback, the error does not refer to this
            # object, which refers to the error. The circle would keep all frames in memory.
            self.error = error.with_traceback(error.__traceback__ and error.__traceback__.tb_next)

    def tell(self) -> None:
        """Ends the wait for this call."""
        self.is_done = True
        with contextlib.suppress(RuntimeError):  # raised if the call beside it has told already
            self._done.release()

    def wait(self, most_s: float) -> bool:
        """Waits until this call, or the one beside it, is done. Only one thread may wait.

        Args:
            most_s: The longest wait, in seconds.

        Returns:
            False if neither call was done in this time.
        """
        return self._done.acquire(timeout=most_s)

    def result(self) -> Any:
        """Returns the result of a call that is done, or raises its error. May be called once."""
        # The traceback of the error will refer to the caller's frame, and so to this object. So
        # this object lets go of the error.
        error, self.error = self.error, None
        if error is None:
            return self._result
        try:
            raise error
        finally:
            del error


class DaemonThreads:
    """Threads that make calls, each call at once.

    A new thread is started if no thread is idle. A thread ends once it has been idle for a while.
    A call that never returns does not keep the program alive. When the program ends, it waits 5
    seconds at most for the calls under way: a thread that returned from C++ later, in the middle of
    the interpreter's end, would abort the program.

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
        # A forked process has none of the threads, so it begins anew.
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self._end)

    def _begin(self) -> None:
        # The threads, without one that is about to end. A thread is known by a lock, which is
        # released to wake the thread.
        self._threads = set[threading.Lock]()
        # The idle threads, and where each finds its next call. The last one is woken first.
        self._idle = dict[threading.Lock, deque[Call]]()

    def _end(self) -> None:
        until = time.monotonic() + _EXIT_S
        for thread in threading.enumerate():
            if thread.name == self._name:
                with contextlib.suppress(RuntimeError):  # raised if the thread has not begun
                    thread.join(max(0.0, until - time.monotonic()))

    def call(
        self, function: Callable[..., Any], *args: Any, beside: Call | None = None
    ) -> Call | None:
        """Lets a thread call a function.

        Args:
            function: The function.
            *args: Its arguments.
            beside: A call of which the wait also ends when this call is done.

        Returns:
            The call; None if every thread is busy, or if the system allows no more threads. Nothing
            is then called.
        """
        call = Call(function, args, beside)
        while True:
            try:
                wake, calls = self._idle.popitem()  # so no other call gets this thread
            except KeyError:
                break
            calls.append(call)
            with contextlib.suppress(RuntimeError):  # raised if the thread is awake already
                wake.release()
            if wake in self._threads:
                return call
            try:
                calls.remove(call)
            except ValueError:  # the thread has begun the call
                return call
            # The thread had waited long enough, and has ended. Another one is needed.
        if len(self._threads) >= self._most:
            return None
        run = threading.Thread(
            target=self._run, args=(deque([call]),), name=self._name, daemon=True
        )
        try:
            run.start()
        except RuntimeError:  # raised if the system allows no more threads
            return None
        return call

    def _run(self, calls: deque[Call]) -> None:
        wake = threading.Lock()
        wake.acquire()
        while True:
            self._idle.pop(wake, None)
            try:
                call = calls.popleft()
            except IndexError:
                if wake not in self._threads:
                    return
                # A caller that gives a call from now on sees that this thread is about to end. An
                # earlier call is found by one more look.
                self._threads.discard(wake)
                continue
            self._threads.add(wake)
            call.make()
            # The thread is idle before the caller learns of the result. So the caller's next call
            # needs no further thread.
            self._idle[wake] = calls
            call.tell()
            del call  # otherwise the result would stay in memory until the next call
            wake.acquire(timeout=_IDLE_S)
