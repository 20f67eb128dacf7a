"""`Meter`: measures the work of one iterator. It is always on.

No method takes a lock. Only one thread writes each sum, and any thread may read it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging

from grain_shard.reading.faults import FaultCounts
from grain_shard.spans import STEP, WAIT
from grain_shard.stats.counts import ReadThreads, mask_of, size_of
from grain_shard.stats.figures import Figures

# The minimum time that recent figures cover, and the minimum time between two figures that are
# kept, in seconds.
RECENT_S, _KEEP_S = 60.0, 5.0
# The loop waits long for data if it waits for more than this share of the time.
_LONG = 0.1


class _Loop(NamedTuple):
    """The times and sums of the training loop, as one value.

    One assignment replaces the whole value, so that another thread never sees half of a change.
    `began`, `until` and `since` are times of the meter's clock, in seconds.
    """

    began: float = 0.0  # start of the first call of next
    until: float = 0.0  # end of the last call of next
    since: float | None = None  # start of the call of next that runs now; None between two calls
    wait_s: float = 0.0  # seconds in all finished calls of next
    sums: Mapping[str, int] = {}  # sums over the batches handed out; replaced, never mutated


class Meter:
    """Measures the work of one iterator.

    As a context manager it measures how long the training loop waits for a batch. If the loop
    waits much for this host's data, a warning is logged, at most once a minute.

    Args:
        clock: Returns the time in seconds.
        mask_key: Key of the mask in a batch, which is True for records and False for padding. None
            if batches have no mask.
    """

    def __init__(
        self,
        *,
        mask_key: str | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._clock, self._mask_key = clock, mask_key
        self._loop = _Loop()
        self._placed = 0  # number of batches placed on the devices
        self._tallies: dict[int, dict[str, float]] = {}  # thread -> stage -> seconds
        # Before the first run, the two classes return "not measured" and "no faults".
        self._reads: Callable[[], ReadThreads] = ReadThreads
        self._faults: Callable[[], FaultCounts] = FaultCounts
        self._faults_before = FaultCounts()  # of earlier runs
        self._kept: deque[tuple[float, Figures]] = deque()  # (time, figures until that time)
        self._logged = float("-inf")  # time of the last log line

    def tally(self) -> dict[str, float]:
        """Returns the calling thread's seconds by stage. Only this thread may add to them."""
        return self._tallies.setdefault(threading.get_ident(), {})

    def opens(
        self, reads: Callable[[], ReadThreads], faults: Callable[[], FaultCounts] = FaultCounts
    ) -> None:
        """Notes that the iterator has opened a run, the first one or another one.

        Args:
            reads: Returns the number of threads that read side by side, and its reason.
            faults: Returns the run's counts of failed reads. Those of earlier runs are kept and
                added.
        """
        self._reads, self._faults, self._faults_before = reads, faults, self.faults()

    def faults(self) -> FaultCounts:
        """Returns the counts of failed reads since the iterator was made."""
        return self._faults().after(self._faults_before)

    def __enter__(self) -> None:
        now, loop = self._clock(), self._loop
        began = loop.began if loop.until else now
        self._loop = loop._replace(began=began, since=now)

    def __exit__(self, *exc_info: object) -> None:
        now, loop = self._clock(), self._loop
        wait_s = loop.wait_s + now - (now if loop.since is None else loop.since)
        self._loop = loop._replace(until=now, since=None, wait_s=wait_s)

    def placed(self, batch: Any) -> Mapping[str, int]:
        """Counts a batch as placed on the devices.

        Args:
            batch: This host's rows of the batch, as a tree of NumPy arrays.

        Returns:
            The numbers of "records" and "bytes" in the host's rows. Without a mask every row counts
            as a record.
        """
        self._placed += 1
        size, mask = size_of(batch), mask_of(batch, self._mask_key)
        return size if mask is None else size | {"records": int(np.count_nonzero(mask))}

    def handed_out(self, size: Mapping[str, int]) -> None:
        """Counts a batch that was handed out to the loop.

        Args:
            size: The numbers of "records" and "bytes" that `placed` returned for the batch.
        """
        loop, now, more = self._loop, self._clock(), {"batches": 1, **size}
        sums = {name: loop.sums.get(name, 0) + number for name, number in more.items()}
        self._loop = loop._replace(until=now, sums=sums)
        # The first figures are kept after the first batch, so recent figures never include its
        # time, which has all work that is done only once.
        if not self._kept or now - self._kept[-1][0] >= _KEEP_S:
            self._kept.append((now, self.total()))
            while len(self._kept) > 1 and self._kept[1][0] <= now - RECENT_S:
                self._kept.popleft()
            if min(now - self._kept[0][0], now - self._logged) >= RECENT_S:
                self._log_long_wait(now)

    def _log_long_wait(self, now: float) -> None:
        recent = self.recent()
        if recent.wait_share > _LONG:
            self._logged = now
            logging.warning(
                "grain_shard: the training loop of host %d waited for this host's data %.0f %% of"
                " the last %.0f s%s.\n"
                "  remedy: grain_shard.profile(ds, step) says what would help.",
                jax.process_index(),
                recent.wait_share * 100,
                recent.seconds,
                "" if recent.busiest is None else f", mostly for {recent.busiest!r}",
            )

    def total(self) -> Figures:
        """Returns the figures since the first ``next``, up to now if a ``next`` is waiting."""
        loop, faults = self._loop, self.faults()
        until = loop.until if loop.since is None else self._clock()
        wait_s = loop.wait_s + (0.0 if loop.since is None else until - loop.since)
        sums = {
            **loop.sums,
            "seconds": until - loop.began,
            WAIT: wait_s,
            STEP: until - loop.began - wait_s,  # the time between calls of ``next``
            "placed": self._placed,
            "retries": faults.retries,
            "bad_records": faults.bad_records,
        }
        # Over copies, because threads add to these dicts meanwhile.
        stages_s: dict[tuple[int | str, str], float] = {
            (thread, stage): seconds
            for thread, tally in self._tallies.copy().items()
            for stage, seconds in tally.copy().items()
        }
        return Figures(sums, stages_s, self._reads())

    def recent(self) -> Figures:
        """Returns the figures of the last 60 to 65 seconds, without the first batch.

        Before the second batch, returns the figures since the first ``next``.
        """
        total = self.total()
        return total if total["batches"] < 2 else total.since(self._kept[0][1])
