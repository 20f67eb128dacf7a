"""The number of threads of a stage that work side by side, found while they work.

Threads that wait for a read cost nothing, and threads that compute in Python get in each other's
way. The user need not say which of the two it is: `Pace` measures, window after window, how many
records a second come out and how many processors that takes, and `ThreadCount` decides by it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# More threads never helped, and the system may limit the threads of a process.
MOST_THREADS = 128

# A window lasts at least this many seconds and tasks: fewer say little on a busy machine. The first
# window is short, because a wrong attempt costs less than a wrong start. Each of the next lasts
# twice as long as the one before.
_WINDOW_S, _WINDOW_TASKS = 0.1, 8
_FIRST_WINDOW_S = _WINDOW_S / 8
# The loop is fed well enough if it waits for less than this share of the time.
_FED = 0.1
# If fewer processors than this are busy, no thread computes: all threads wait.
_IDLE_CORES = 0.25
# If reads use less of a processor than this, they surely wait for the source. Up to half a
# processor, they may also wait for processors that other processes use.
_SURELY_WAITS = 0.1
# The largest factor by which threads are added: facts about few reads may not hold for many.
_LARGEST_STEP = 16
# Factors of the rate: more threads are kept from _GAIN on, fewer threads from _LOSS on.
_GAIN, _LOSS = 1.05, 0.98
# If the rate changes by this factor with the same threads, the source has changed.
_CHANGED = 2.0
# How many windows to rest after the first attempt that did not help, and after many.
_REST, _LONGEST_REST = 3, 64


class Window(NamedTuple):
    """A measurement that was taken for a while.

    Attributes:
        rate: Records per second that the threads got through.
        thread_cores: Processors that they kept busy.
        process_cores: Processors that all of this process kept busy.
        starved: The share of the time for which the consumer waited for a result.
    """

    rate: float
    thread_cores: float
    process_cores: float
    starved: float


class ThreadCount:
    """Decides how many threads work side by side, from one window to the next.

    The count begins with one thread. If the reads wait, the count goes at once to as many threads
    as would keep a processor busy. Otherwise twice as many threads are tried, or half as many. A
    change that helped is kept. A change that did not help is taken back, and after a rest the other
    direction is tried. The rest is longer the more often nothing helped. If the source becomes
    slow, more threads are tried first; if the source becomes fast, fewer. Nothing is tried while
    the consumer has what it needs.

    Args:
        most: Number of threads there can be.
        cores: Number of processors.

    Attributes:
        threads: The decision.
        why: The reason for the decision, in words.
    """

    def __init__(self, most: int, cores: int):
        self.threads, self.why = 1, "the first read runs alone"
        self.most: int = most
        self._cores = cores
        self._is_first = True
        self._rate = self._spread = 0.0  # with these threads; mean distance of windows from it
        self._before: tuple[int, float, float] | None = None  # threads, rate, spread: of an attempt
        self._up = True
        self._rest, self._next_rest = 0, _REST
        self._is_other = False  # whether the last window was far from the rate

    def decide(self, window: Window) -> None:
        """Decides the next number of threads, from a window measured with the present number."""
        first, self._is_first = self._is_first, False
        if first and window.process_cores >= 0.5:
            self._rest = _REST  # a cold start's rate says little: no hurry
            self.why = "the first read mostly computed"
        elif window.starved < _FED:
            self._before, self._rate = None, 0.0  # the consumer set the rate, not the threads
        elif self._before is not None and not self._helped(*self._before, window.rate):
            pass  # `_helped` has taken the attempt back
        else:
            self._settle(window.rate)
            if self._rest:
                self._rest -= 1
            elif not self._is_other:
                self._try(window)

    def _helped(self, threads: int, rate: float, spread: float, now: float) -> bool:
        """Judges the last attempt, and takes it back if it did not help."""
        self._before, self._rate = None, 0.0
        enough = _GAIN * rate + spread if self.threads > threads else _LOSS * rate
        if now >= enough:
            self._next_rest = _REST
            return True
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._rate, self._spread, self._up = rate, spread, not self._up
        self._set(threads, f"{self.threads} threads were no better")
        return False

    def _settle(self, rate: float) -> None:
        """Learns the rate of this number of threads. If it has changed, the source has."""
        was_other, self._is_other = self._is_other, False
        if not self._rate:
            self._rate, self._spread = rate, 0.0
        elif not 1 / _CHANGED < rate / self._rate < _CHANGED:
            if not was_other:
                self._is_other = True  # once may be chance
                return
            self._up = rate < self._rate
            self._rate, self._spread = rate, 0.0
            self._rest, self._next_rest = 0, _REST
        self._spread = (3 * self._spread + abs(rate - self._rate)) / 4
        self._rate = (3 * self._rate + rate) / 4

    def _try(self, window: Window) -> None:
        """Tries another number of threads, if there is one to be tried."""
        waits, surely = window.process_cores < 0.5, window.process_cores < _SURELY_WAITS
        if surely:
            self._up = True
        elif window.thread_cores > 0.9 * self._cores:
            self._up = False  # no processor is left
        if self._up and self.threads == self.most:
            self._up = surely
            if waits:
                self._rest = _LONGEST_REST  # fewer are hardly better, so there is no hurry
                return
        elif not self._up and self.threads == 1:
            self._up = True
        step = min(_LARGEST_STEP, int(1 / max(window.process_cores, 0.01))) if waits else 2
        threads = min(self.most, step * self.threads) if self._up else self.threads // 2
        if threads != self.threads:
            self._before = self.threads, self._rate, self._spread
            self._set(threads, "reads wait" if waits else "an attempt")

    def _set(self, threads: int, why: str) -> None:
        self.threads, self.why = max(1, min(threads, self.most)), why


class Pace:
    """Says how many threads of a stage work side by side: always the same number.

    Called under the stage's lock, except `consumer_waits` and `consumer_goes_on`.

    Args:
        threads: The number.
    """

    def __init__(self, threads: int):
        self._threads = threads

    @property
    def threads(self) -> int:
        """The number of threads that are to work."""
        return self._threads

    def limit(self, most: int) -> None:
        """Sets the most threads that there can be."""
        self._threads = most

    def begun(self, now: float) -> None:
        """Notes that a thread has begun a task; times are in seconds, by `time.perf_counter`."""

    def done(self, start: float, now: float, processor_s: float, size: int) -> None:
        """Notes that a thread has done a task of `size` records that it began at `start`."""

    def consumer_waits(self, now: float) -> None:
        """Notes that the consumer begins to wait for a result."""

    def consumer_goes_on(self, now: float) -> None:
        """Notes that the consumer no longer waits."""


class ReadPace(Pace):
    """The pace of reads: the first comes alone, then as many go side by side as help, or `fixed`.

    By Little's law, the rate of a window is the average number of reads under way, divided by the
    time that one record takes. A count of the records that end within the window would be far off
    where many long reads end at once.

    Args:
        fixed: The number of threads after the first read; None to find it.
        most: The most threads.
        process_time: Processor time of this process, in seconds.
    """

    def __init__(
        self,
        fixed: int | None = None,
        *,
        most: int = MOST_THREADS,
        process_time: Callable[[], float] = time.process_time,
    ):
        self._fixed, self._process_time = fixed, process_time
        self.count: ThreadCount = ThreadCount(min(most, fixed or most), os.cpu_count() or 1)
        self.seconds_per_record: float | None = None  # wall time of recent reads
        self._active = 0
        self._waiting = 0  # consumers that wait
        self._waits: deque[tuple[float, int]] = deque()  # (time, +1 or -1): one more or fewer
        self._changed = 0.0  # when the number of threads last changed
        self._window: _Sums | None = None
        self._window_s = 0.0  # 0: the first window is the first read

    @property
    def threads(self) -> int:
        return self.count.threads

    def limit(self, most: int) -> None:
        self.count.most = most
        self.count.threads = min(most, self.count.threads)

    def begun(self, now: float) -> None:
        self._pass(now)
        if self._window is None and self.seconds_per_record is None:
            self._window = self._new_window(now)
        self._active += 1

    def done(self, start: float, now: float, processor_s: float, size: int) -> None:
        self._pass(now)
        self._active -= 1
        if not size:  # a read without records of its own: its time is left out
            if self._window is not None:
                self._window.active_s -= now - max(start, self._window.start)
            return
        each = (now - start) / size
        last = self.seconds_per_record
        self.seconds_per_record = each if last is None else (last + each) / 2
        if self._fixed is not None:
            self.count.threads, self.count.why = min(self._fixed, self.count.most), "num_threads"
            return
        if start < self._changed:
            return  # begun while there were more threads, or fewer
        if self._window is None:
            self._window = self._new_window(now)
            return
        window = self._window
        window.wall_s += now - start
        window.processor_s += processor_s
        window.records += size
        window.tasks += 1
        seconds = now - window.start
        if not self._is_over(window, seconds):
            return
        threads = self.threads
        self._window_s = min(max(_FIRST_WINDOW_S, 2 * self._window_s), _WINDOW_S)
        self.count.decide(self._measured(window, seconds))
        # If there are fewer now, threads that should rest may still be inside a read.
        self._window = None if self.threads < threads else self._new_window(now)
        if self.threads != threads:
            self._changed = now

    def consumer_waits(self, now: float) -> None:
        self._waits.append((now, 1))

    def consumer_goes_on(self, now: float) -> None:
        self._waits.append((now, -1))

    def _new_window(self, now: float) -> _Sums:
        return _Sums(now, self._process_time())

    def _pass(self, now: float) -> None:
        """Adds up the time until now."""
        waits = [self._waits.popleft() for _ in range(len(self._waits))]
        for until, more in (*waits, (now, 0)):
            if self._window is not None:
                self._window.until(until, self._active, self._waiting > 0)
            self._waiting += more

    def _is_over(self, window: _Sums, seconds: float) -> bool:
        if window.tasks < self.threads or not (seconds and window.wall_s):
            return False  # a clock with large steps may not have moved at all
        is_idle = self._process_time() - window.process_start < _IDLE_CORES * seconds
        if not self._window_s or is_idle:
            return True  # all threads wait, so there is nothing to weigh
        return seconds >= self._window_s and window.tasks >= _WINDOW_TASKS

    def _measured(self, window: _Sums, seconds: float) -> Window:
        rate = window.active_s / seconds * window.records / window.wall_s
        return Window(
            rate=rate,
            thread_cores=rate * window.processor_s / window.records,
            process_cores=(self._process_time() - window.process_start) / seconds,
            starved=window.starved_s / seconds,
        )


class _Sums:
    """Sums of a window."""

    def __init__(self, start: float, process_start: float):
        self.start, self.process_start = start, process_start
        self.active_s = self.starved_s = self.wall_s = self.processor_s = 0.0
        self.records = self.tasks = 0
        self._now = start

    def until(self, now: float, active: int, starved: bool) -> None:
        passed, self._now = now - self._now, now
        self.active_s += passed * active
        self.starved_s += passed * starved
