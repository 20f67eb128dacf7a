"""`ReadPace` and `ThreadCount`: the number of threads that read, adapted while the threads work.

Threads that wait for a read cost nothing, but threads that compute in Python slow each other down.
The user need not say whether the threads wait or compute. The first reads give a first number of
threads. From then on `ReadPace` measures one short period, called a window, after the other: how
many records per second the threads complete. From these rates `ThreadCount` decides the number.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

# The maximum number of threads of a pool. More never helped, and the system may limit the threads
# of a process.
MOST_THREADS = 128

# The minimum number of seconds of a window. A shorter window shows little on a busy machine. The
# first windows are shorter, and each lasts twice as long as the one before: at the start, a bad
# number of threads costs more than a wrong attempt.
_WINDOW_S = 0.1
_FIRST_WINDOW_S = _WINDOW_S / 8
# If records are read one by one, a task takes as many records as it can read in _TASK_S seconds.
# Shorter tasks would cost too much: a task costs 100 us of processor time. A task takes an equal
# share of a batch for each thread if that is more, but no more than it can read in _LONGEST_TASK_S
# seconds. In a longer task, slow records would wait for each other, although other threads could
# read them. If the source suddenly becomes slow, a task takes longer than was expected, which its
# number of records limits: 64 reads of 50 ms take 3 seconds.
_TASK_S, _LONGEST_TASK_S, _TASK_RECORDS = 4e-3, 40e-3, 64
# If the loop waits for batches less than this share of the time, the number of threads will do.
_FED = 0.1
# If the process keeps fewer processors busy than this, no thread computes: all threads wait.
_IDLE_CORES = 0.5
# More threads are kept if they multiply the rate by at least _GAIN. Fewer threads are kept if they
# multiply it by at least _LOSS.
_GAIN, _LOSS = 1.05, 0.98
# If the rate changes by this factor with the same number of threads, the source has changed.
_CHANGED = 2.0
# Number of windows without an attempt after an attempt that did not help: _REST at first, doubled
# by each further attempt that did not help, up to _LONGEST_REST.
_REST, _LONGEST_REST = 3, 64


class Window(NamedTuple):
    """The measurements of one period.

    Attributes:
        rate: Records per second that the threads of the pool completed.
        cores: Number of processors that the process kept busy.
        starved: Share of the time, 0 to 1, in which the consumer waited for a result.
    """

    rate: float
    cores: float
    starved: float


class ThreadCount:
    """Decides how many threads work side by side, from one window to the next.

    The number climbs while the rate rises: an attempt is made with twice as many threads, and kept
    if the rate is higher. An attempt that does not help is taken back, and after a rest of some
    windows the next attempt goes the other way, to half as many threads. With each attempt that
    does not help, the rest gets longer. If the source becomes slow, more threads are tried first.
    If it becomes fast, fewer threads are tried first. No attempt is made while the consumer hardly
    waits.

    Args:
        most: Largest number of threads.

    Attributes:
        threads: The number of threads that should work.
        why: The reason for this number, in words.
    """

    def __init__(self, most: int):
        self.threads, self.why = 1, "no read is done yet"
        self.most: int = most
        # The mean rate of windows with the present threads, and their mean distance from it.
        self._rate = self._spread = 0.0
        # (threads, rate, spread) before the present attempt; None without an attempt.
        self._before: tuple[int, float, float] | None = None
        self._up = True  # True if the next attempt is with more threads
        self._rest, self._next_rest = 0, _REST
        self._is_other = False  # True if the last window was far from the mean rate

    def begin(self, wall_s: float, processor_s: float) -> None:
        """Decides the first number of threads: as many as keep one processor busy.

        Args:
            wall_s: Seconds that the read of a record took.
            processor_s: Seconds of processor time in it.
        """
        threads = int(wall_s / max(processor_s, 1e-6))
        self._set(threads, "reads wait" if threads > 1 else "reads compute")
        self._rest = _REST  # the first windows may be slow, while threads start

    def decide(self, window: Window) -> None:
        """Judges the attempt of the last window, if there was one, and may begin another one."""
        if window.starved < _FED:
            # The consumer was slower than the threads, so the rate was the rate of the consumer.
            self._before, self._rate = None, 0.0
            return
        if self._before is not None and not self._keeps(*self._before, window.rate):
            return
        self._settle(window.rate)
        if self._rest:
            self._rest -= 1
        elif not self._is_other:
            self._try(all_wait=window.cores < _IDLE_CORES)

    def _keeps(self, threads: int, rate: float, spread: float, new_rate: float) -> bool:
        """Judges an attempt: returns True if it helped, and otherwise takes it back.

        Args:
            threads: Number of threads before the attempt.
            rate: Mean rate of the windows before the attempt.
            spread: Mean distance of those windows from that rate.
            new_rate: Rate of the window with the attempt.
        """
        self._before, self._rate = None, 0.0
        enough = _GAIN * rate + spread if self.threads > threads else _LOSS * rate
        if new_rate >= enough:
            self._next_rest = _REST
            return True
        self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, _LONGEST_REST)
        self._rate, self._spread, self._up = rate, spread, not self._up
        self._set(threads, f"{self.threads} threads were no better")
        return False

    def _settle(self, rate: float) -> None:
        """Updates the mean rate of the present number of threads by the rate of the last window.

        If the rates of two windows in a row differ from the mean by a factor of 2, the source has
        changed. The mean then starts again, and the next attempt need not wait.
        """
        was_other, self._is_other = self._is_other, False
        if not self._rate:
            self._rate, self._spread = rate, 0.0
        elif not 1 / _CHANGED < rate / self._rate < _CHANGED:
            if not was_other:
                self._is_other = True  # one such window may be chance
                return
            self._up = rate < self._rate
            self._rate, self._spread = rate, 0.0
            self._rest, self._next_rest = 0, _REST
        self._spread = (3 * self._spread + abs(rate - self._rate)) / 4
        self._rate = (3 * self._rate + rate) / 4

    def _try(self, *, all_wait: bool) -> None:
        """Begins an attempt with another number of threads.

        Args:
            all_wait: True if no thread computes. Then fewer threads would only be slower.
        """
        if all_wait or self.threads == 1:
            self._up = True
        elif self.threads == self.most:
            self._up = False
        threads = min(self.most, 2 * self.threads) if self._up else self.threads // 2
        if threads != self.threads:
            self._before = self.threads, self._rate, self._spread
            self._set(threads, "an attempt")

    def _set(self, threads: int, why: str) -> None:
        self.threads, self.why = max(1, min(threads, self.most)), why


class ReadPace:
    """The number of threads that read side by side, adapted while they read.

    Until the first read is done, each read that begins adds a thread. So reads that wait soon run
    side by side, while a read that takes less time than the start of a thread runs alone. After
    these first reads `ThreadCount` decides the number.

    The rate of a window is computed by Little's law: the mean number of unfinished reads, divided
    by the time that one record takes. A count of the records that were completed in the window
    would be far off if many long reads end at the same time.

    Args:
        fixed: The number of threads; None to adapt the number.
        most: The largest number of threads.
        alone: True if the first read runs alone, because it reads a whole batch.
        process_time: Returns the processor time of this process, in seconds.

    Attributes:
        threads: The number of threads that should work now.
        seconds_per_record: The wall-clock time of a record in recent reads; None before the first.
    """

    def __init__(
        self,
        fixed: int | None = None,
        *,
        most: int = MOST_THREADS,
        alone: bool = False,
        process_time: Callable[[], float] = time.process_time,
    ):
        self._fixed, self._alone, self._process_time = fixed, alone, process_time
        self.count: ThreadCount = ThreadCount(min(most, fixed or most))
        if fixed is not None:  # `count` then decides nothing
            self.count.threads, self.count.why = self.count.most, "num_threads"
        self.threads: int = self.count.threads
        self.seconds_per_record: float | None = None
        self._active = 0  # number of unfinished reads
        self._waiting = 0  # number of consumers that wait
        # (time, +1) when a consumer begins to wait, (time, -1) when it ends its wait.
        self._waits: deque[tuple[float, int]] = deque()
        self._is_decided = fixed is not None  # True once the first reads have given a number
        # Number of reads that must still end before the first decision: at first, as many as were
        # unfinished when the first one ended. 0 before that.
        self._first_reads = 0
        # Wall-clock and processor seconds of a record in the fastest of the first reads.
        self._fastest = math.inf, 0.0
        self._changed = 0.0  # time of the last change of the number of threads
        self._window: _Sums | None = None  # None until the threads are as many as should work
        self._window_s = _FIRST_WINDOW_S  # least length of the window

    def limit(self, most: int) -> None:
        """Lowers the largest number of threads, because the system allows no more threads.

        Args:
            most: The number of threads that have started.
        """
        self.count.most = most
        self.threads = self.count.threads = min(most, self.threads)

    def at_a_time(self, batch_size: int) -> int:
        """Returns how many of the next records a task should read, one after the other.

        Args:
            batch_size: Number of records of a batch.
        """
        seconds = self.seconds_per_record
        if not seconds:
            return 1
        share = min(batch_size // self.threads, int(_LONGEST_TASK_S / seconds))
        return min(max(1, share, int(_TASK_S / seconds)), _TASK_RECORDS)

    def begun(self, now: float) -> None:
        """Notes that a thread begins a task, at a time of `time.perf_counter`.

        One thread at a time calls this or `done`.
        """
        self._pass(now)
        self._active += 1
        if not self._is_decided:
            # A read that takes longer than it takes to start a thread most likely waits.
            if self.seconds_per_record is None and not self._alone:
                self.threads = min(max(self.threads, self._active + 1), self.count.most)
        elif self._fixed is None and self._window is None and self._active == self.threads:
            self._window = self._new_window(now)

    def done(self, start: float, now: float, processor_s: float, size: int) -> None:
        """Notes that a thread has finished a task, and may change the number of threads.

        Args:
            start: Time at which the task began, in seconds, by `time.perf_counter`.
            now: Time at which the task ended.
            processor_s: Seconds of processor time that the thread used for the task.
            size: Number of records of the task.
        """
        self._pass(now)
        self._active -= 1
        if not size:  # the task read no record of a batch, so its time is taken out again
            if self._window is not None:
                self._window.active_s -= now - max(start, self._window.start)
            return
        per_record_s = (now - start) / size
        last_s = self.seconds_per_record
        self.seconds_per_record = per_record_s if last_s is None else (last_s + per_record_s) / 2
        if self._fixed is not None:
            return
        if not self._is_decided:
            self._add_first(per_record_s, processor_s / size)
            self._changed = now
        elif start >= self._changed:  # else the task began with another number of threads
            self._add(now, now - start, size)

    def _add(self, now: float, wall_s: float, size: int) -> None:
        """Adds a task to the window. If the window is then over, the number of threads may change.

        Args:
            now: Time at which the task ended.
            wall_s: Seconds that the task took.
            size: Number of records of the task.
        """
        window = self._window
        if window is None:  # a whole task had the present number of threads
            self._window = self._new_window(now)
            return
        window.wall_s += wall_s
        window.records += size
        window.tasks += 1
        if window.tasks < self.threads:
            return
        seconds = now - window.start
        if not (seconds and window.wall_s):
            return  # a coarse clock has not moved
        cores = (self._process_time() - window.process_start) / seconds
        # If all threads wait, a longer window would show nothing new.
        if seconds < self._window_s and cores >= _IDLE_CORES:
            return
        # Little's law: (mean number of unfinished reads) / (seconds that a record takes).
        rate = window.active_s / seconds * window.records / window.wall_s
        self.count.decide(Window(rate, cores, starved=window.starved_s / seconds))
        self._window_s = min(2 * self._window_s, _WINDOW_S)
        if self.threads == self.count.threads:
            self._window = self._new_window(now)
        else:
            # The next window begins once that number of threads read: new threads take a while to
            # start, and threads that should rest may still read.
            self._window, self._changed, self.threads = None, now, self.count.threads

    def _add_first(self, wall_s: float, processor_s: float) -> None:
        """Adds one of the first reads; after as many as ran side by side at first, decides.

        The fastest read decides. Others may have waited for each other, or have run code for the
        first time, which takes longer.
        """
        self._first_reads = (self._first_reads or self._active + 1) - 1
        self._fastest = min(self._fastest, (wall_s, processor_s))
        if not self._first_reads:
            self.count.begin(*self._fastest)
            self.threads, self._is_decided = self.count.threads, True

    def consumer_waits(self, now: float) -> None:
        """Notes that a consumer begins to wait for a result. Any thread may call this."""
        self._waits.append((now, 1))

    def consumer_goes_on(self, now: float) -> None:
        """Notes that a consumer ends its wait for a result. Any thread may call this."""
        self._waits.append((now, -1))

    def _new_window(self, now: float) -> _Sums:
        return _Sums(now, self._process_time())

    def _pass(self, now: float) -> None:
        """Adds the time since the last call to the sums of the window.

        The consumers' notes since then are applied at their times, in order.
        """
        waits = [self._waits.popleft() for _ in range(len(self._waits))]
        for until, more in (*waits, (now, 0)):
            if (window := self._window) is not None:
                passed, window.now = until - window.now, until
                window.active_s += passed * self._active
                window.starved_s += passed * (self._waiting > 0)
            self._waiting += more


class _Sums:
    """Sums over the tasks and the time of one window."""

    def __init__(self, start: float, process_start: float):
        self.start, self.process_start = start, process_start
        self.active_s = self.starved_s = self.wall_s = 0.0
        self.records = self.tasks = 0
        self.now = start  # the time until which `active_s` and `starved_s` are added up
