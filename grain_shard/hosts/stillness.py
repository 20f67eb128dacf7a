"""`Stillness`: finds a training loop that stands still for long, in a collective or in a save."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator

from grain_shard.callers import program_line
from grain_shard.hosts.places import IN_SAVE, IN_STEP

# Returns the clock of the processor time of a thread. macOS has none, and no loop is still there.
_clock_of = getattr(time, "pthread_getcpuclockid", None)
# The most processor time that a still thread uses, in seconds and in parts of the time. XLA looks
# a few times a second if a collective on its CPU devices is done.
_MAY_RUN_S, _MAY_RUN_PART = 0.002, 0.001


class Stillness:
    """Tells if the thread of a training loop has stood still for long.

    The thread then waits for other hosts in a save, or it stays at one instruction and uses almost
    no processor time. It does not count as still inside Python's standard library, where it waits
    for data, for a lock, for a subprocess or for the network. No collective waits there.

    Args:
        long_s: Number of seconds that are long.
    """

    def __init__(self, long_s: float):
        self._long_s, self._saves = long_s, False
        self._thread, self._clock = threading.get_ident(), None
        self._where, self._ran_s, self._since = None, 0.0, 0.0

    def is_here(self) -> None:
        """Notes that the calling thread is the thread of the loop, and does not stand still."""
        thread, self._where = threading.get_ident(), None
        if _clock_of is not None and (self._clock is None or self._thread != thread):
            self._thread, self._clock = thread, _clock_of(thread)

    @contextlib.contextmanager
    def in_save(self) -> Iterator[None]:
        """Notes that the loop waits for other hosts in the ``with`` block."""
        self._saves, self._where = True, None
        try:
            yield
        finally:
            self._saves, self._where = False, None

    def still(self) -> str:
        """Returns the place of a thread that has stood still for long; "" if it has not.

        The place is `IN_STEP` or `IN_SAVE`, with the innermost line of the user's program.
        """
        if self._seconds() <= self._long_s:
            return ""
        line = program_line(sys._current_frames().get(self._thread))
        return (IN_SAVE if self._saves else IN_STEP) + (line and f", {line}")

    def _seconds(self) -> float:
        """Returns the seconds for which the thread has stood still, as calls of this method saw."""
        frame, clock, now = sys._current_frames().get(self._thread), self._clock, time.monotonic()
        if frame is None or clock is None:
            return 0.0
        ran_s, where = time.clock_gettime(clock), (id(frame), frame.f_lasti)
        may_run_s = _MAY_RUN_S + _MAY_RUN_PART * (now - self._since)
        module = frame.f_globals.get("__name__", "").partition(".")[0]
        is_still = where == self._where and ran_s - self._ran_s < may_run_s
        is_still &= module not in sys.stdlib_module_names
        if self._where is None or not (is_still or self._saves):
            self._where, self._ran_s, self._since = where, ran_s, now
        return now - self._since
