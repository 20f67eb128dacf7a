"""`Meter`: counts what one iterator does, always.

Nothing here takes a lock: each figure is written by one thread alone, and read by any.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from grain_shard.hosts.slowest import Waits
from grain_shard.stats.counts import Counts, ReadCounts, Size
from grain_shard.stats.figures import waits

# What was "of late" began so long ago; the sums are kept so often.
RECENT_S, _KEEP_S = 30.0, 5.0


class _Loop(NamedTuple):
    """The training loop, in one value, so that no other thread sees the half of a change.

    Times are those of the clock, in seconds.
    """

    began: float = 0.0  # with the first call of next
    until: float = 0.0  # when the last call returned
    since: float | None = None  # when the call began that it waits in now
    wait_s: float = 0.0
    batches: int = 0
    records: int = 0
    num_bytes: int = 0


class Meter:
    """Counts. As a context: the training loop waits for its next batch.

    Args:
        clock: In seconds.
        mask_key: Where batches say which of their rows are records; None if they do not.
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
        self._reads: Callable[[], ReadCounts] = ReadCounts
        self._reads_before = ReadCounts()
        self._kept: deque[tuple[float, Counts]] = deque()  # the sums, and when they were so
        self._reported = Counts()

    def tally(self) -> dict[str, float]:
        """Seconds by stage, to which the calling thread, and no other, adds."""
        return self._tallies.setdefault(threading.get_ident(), {})

    def opens(self, reads: Callable[[], ReadCounts]) -> None:
        """The iterator goes on elsewhere, where these reads are counted from 0 on."""
        self._reads_before, self._reads = self._reads().after(self._reads_before), reads

    def __enter__(self) -> None:
        now, loop = self._clock(), self._loop
        self._loop = loop._replace(since=now, began=loop.began if loop.until else now)

    def __exit__(self, *exc_info: object) -> None:
        now, loop = self._clock(), self._loop
        wait_s = loop.wait_s + now - (now if loop.since is None else loop.since)
        self._loop = loop._replace(since=None, until=now, wait_s=wait_s)

    def placed(self, batch: Any) -> Size:
        """This host's part of a batch, of NumPy arrays, goes to the devices; the size of it."""
        self._placed += 1
        leaves = jax.tree.leaves(batch)
        num_bytes = sum(getattr(leaf, "nbytes", 0) for leaf in leaves)
        mask = batch.get(self._mask_key) if isinstance(batch, Mapping) else None
        if mask is not None:
            return Size(int(np.count_nonzero(mask)), num_bytes)
        return Size(next((len(leaf) for leaf in leaves if np.ndim(leaf)), 1), num_bytes)

    def handed_out(self, size: Size) -> None:
        """The loop has got a batch."""
        loop = self._loop._replace(until=self._clock())
        self._loop = loop._replace(
            batches=loop.batches + 1,
            records=loop.records + size.records,
            num_bytes=loop.num_bytes + size.num_bytes,
        )
        # The first batch is no part of what is of late: all that takes place once comes before it.
        if not self._kept or loop.until - self._kept[-1][0] >= _KEEP_S:
            self._kept.append((loop.until, self.total()))
            while len(self._kept) > 1 and self._kept[1][0] <= loop.until - RECENT_S:
                self._kept.popleft()

    def total(self) -> Counts:
        """All since the iterator began."""
        loop = self._loop
        until = loop.until if loop.since is None else self._clock()
        waiting_s = 0.0 if loop.since is None else until - loop.since
        return Counts(
            seconds=until - loop.began,
            wait_s=loop.wait_s + waiting_s,
            batches=loop.batches,
            records=loop.records,
            num_bytes=loop.num_bytes,
            placed=self._placed,
            # Copied at once, as the threads go on to write.
            stages_s={
                (thread, stage): seconds
                for thread, tally in self._tallies.copy().items()
                for stage, seconds in tally.copy().items()
            },
            reads=self._reads().after(self._reads_before),
        )

    def recent(self) -> Counts:
        """Of the last `RECENT_S`, up to `_KEEP_S` more; all, as long as there is but one batch."""
        total = self.total()
        return total if total.batches < 2 else total.since(self._kept[0][1])

    def waits_of_late(self, least_s: float) -> Waits:
        """How the loop has waited since the last call; at first, since the first batch.

        Args:
            least_s: How long ago that is at least, in seconds.
        """
        total, before = self.total(), self._reported
        if not before.batches and self._kept:
            before = self._kept[0][1]
        self._reported = total
        return waits(total.since(before), least_s)
