"""`Meter`: counts one iterator's work, always.

No method takes a lock: each sum is written by one thread alone, and read by any.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from grain_shard.hosts.slowest import Waits
from grain_shard.reading.faults import FaultCounts
from grain_shard.spans import STEP, WAIT
from grain_shard.stats.counts import ReadThreads, mask_of, size_of
from grain_shard.stats.figures import Figures, waits

# Seconds that recent figures cover, and seconds between two kept sums.
RECENT_S, _KEEP_S = 30.0, 5.0


class _Loop(NamedTuple):
    """The training loop, in one value, so that no other thread sees half of a change.

    Times are clock times, in seconds.
    """

    began: float = 0.0  # with the first call of next
    until: float = 0.0  # when the last call returned
    since: float | None = None  # start of the call in which the loop waits now
    wait_s: float = 0.0
    sums: Mapping[str, int] = {}  # of batches that were handed out; replaced, never mutated


class Meter:
    """Counts an iterator's work. As a context it measures how long the loop waits for a batch.

    Args:
        clock: In seconds.
        mask_key: Leaf of a batch that marks its rows that are records; None if there is none.
    """

    def __init__(
        self,
        *,
        mask_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._clock, self._mask_key = clock, mask_key
        self._loop = _Loop()
        self._placed = 0
        self._tallies: dict[int, dict[str, float]] = {}  # by thread
        self._reads: Callable[[], ReadThreads] = ReadThreads
        self._faults: Callable[[], FaultCounts] = FaultCounts
        self._faults_before = FaultCounts()
        self._kept: deque[tuple[float, Figures]] = deque()  # sums, each with its time
        self._reported = Figures()

    def tally(self) -> dict[str, float]:
        """Returns the seconds by stage to which the calling thread, and no other, adds."""
        return self._tallies.setdefault(threading.get_ident(), {})

    def opens(
        self, reads: Callable[[], ReadThreads], faults: Callable[[], FaultCounts] = FaultCounts
    ) -> None:
        """Goes on at another position of the iterator, from which faults are counted anew."""
        self._reads, self._faults, self._faults_before = reads, faults, self.faults()

    def faults(self) -> FaultCounts:
        """Returns the counts of failed reads since the iterator was made."""
        return self._faults().after(self._faults_before)

    def __enter__(self) -> None:
        now, loop = self._clock(), self._loop
        began = loop.began if loop.until else now
        self._loop = _Loop(began, loop.until, now, loop.wait_s, loop.sums)

    def __exit__(self, *exc_info: object) -> None:
        now, loop = self._clock(), self._loop
        wait_s = loop.wait_s + now - (now if loop.since is None else loop.since)
        self._loop = _Loop(loop.began, now, None, wait_s, loop.sums)

    def placed(self, batch: Any) -> Mapping[str, int]:
        """Counts this host's NumPy part of a batch as placed; returns its sums."""
        self._placed += 1
        size, mask = size_of(batch), mask_of(batch, self._mask_key)
        return size if mask is None else size | {"records": int(np.count_nonzero(mask))}

    def handed_out(self, size: Mapping[str, int]) -> None:
        """Counts a batch that the loop has got, with the sums that `placed` returned."""
        loop, now, more = self._loop, self._clock(), {"batches": 1, **size}
        sums = {name: loop.sums.get(name, 0) + number for name, number in more.items()}
        self._loop = _Loop(loop.began, now, loop.since, loop.wait_s, sums)
        # The first batch is no part of "of late": it has the time of all that is done only once.
        if not self._kept or now - self._kept[-1][0] >= _KEEP_S:
            self._kept.append((now, self.total()))
            while len(self._kept) > 1 and self._kept[1][0] <= now - RECENT_S:
                self._kept.popleft()

    def total(self) -> Figures:
        """Returns the sums since the iterator began."""
        loop, faults = self._loop, self.faults()
        until = loop.until if loop.since is None else self._clock()
        wait_s = loop.wait_s + (0.0 if loop.since is None else until - loop.since)
        sums = {
            **loop.sums,
            "seconds": until - loop.began,
            WAIT: wait_s,
            STEP: until - loop.began - wait_s,
            "placed": self._placed,
            "retries": faults.retries,
            "bad_records": faults.bad_records,
        }
        # Copied at once, because the threads continue to write.
        stages_s: dict[tuple[int | str, str], float] = {
            (thread, stage): seconds
            for thread, tally in self._tallies.copy().items()
            for stage, seconds in tally.copy().items()
        }
        return Figures(sums, stages_s, self._reads())

    def recent(self) -> Figures:
        """Returns the sums of the last `RECENT_S` to `RECENT_S + _KEEP_S`.

        With fewer than two batches, these are all sums.
        """
        total = self.total()
        return total if total["batches"] < 2 else total.since(self._kept[0][1])

    def waits_of_late(self, least_s: float) -> Waits:
        """Returns how the loop has waited since the last call, at first since the first batch.

        Args:
            least_s: Least number of seconds since then.
        """
        total, before = self.total(), self._reported
        if not before["batches"] and self._kept:
            before = self._kept[0][1]
        self._reported = total
        return waits(total.since(before), least_s)
