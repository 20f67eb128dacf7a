"""P19: what it costs a loop that its iterator counts, always, what `stats()` says.

The same loop with steps of 5 ms, in which the devices would be at work, counted and not: that needs
a quiet machine. And what is counted for one step, in all threads, done again by itself, by the
processor's time: that does not. Of the latter, the loop's own thread does a few microseconds.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any
from unittest import mock

import grain
import jax
import numpy as np

import grain_shard  # noqa: F401
from benchmarks import peers
from benchmarks.measure import Comparison, Goal, Group, Round, Run, interleave
from grain_shard.iteration import iterator
from grain_shard.stats.counts import Size
from grain_shard.stats.meter import Meter
from grain_shard.trees import MASK_KEY

GLOBAL_BATCH_SIZE, STEP_S = 64, 5e-3
READS_MS = (0.0, 1.0)  # what one record takes

Call = Callable[[Meter], Any]


class NotCounting(Meter):
    """Only tells how long the loop waits, which voting needs."""

    def add(self, stage: str, seconds: float) -> None:
        pass

    def placed(self, batch: Any) -> Size:
        return Size(0, 0)

    def handed_out(self, size: Size) -> None:
        pass


class Noting(Meter):
    """Counts, and notes what it was asked to count."""

    def __init__(self, calls: list[Call], **options: Any):
        super().__init__(**options)
        self._calls = calls

    def add(self, stage: str, seconds: float) -> None:
        self._calls.append(lambda meter: meter.add(stage, seconds))
        super().add(stage, seconds)

    def __enter__(self) -> None:
        self._calls.append(lambda meter: meter.__enter__())
        super().__enter__()

    def __exit__(self, *exc_info: object) -> None:
        self._calls.append(lambda meter: meter.__exit__())
        super().__exit__(*exc_info)

    def placed(self, batch: Any) -> Size:
        self._calls.append(lambda meter: meter.placed(batch))
        return super().placed(batch)

    def handed_out(self, size: Size) -> None:
        self._calls.append(lambda meter: meter.handed_out(size))
        super().handed_out(size)


class Source:
    """Records that take a while each."""

    def __init__(self, steps: int, read_s: float):
        self._steps, self._read_s = steps, read_s

    def __len__(self) -> int:
        return GLOBAL_BATCH_SIZE * self._steps

    def __getitem__(self, index: int) -> int:
        if self._read_s:
            time.sleep(self._read_s)
        return index


def decode(index: int) -> dict[str, np.ndarray]:
    return {"image": np.full(3072, index % 256, np.uint8), "label": np.asarray(index)}


def ms_per_step(make: Callable[..., Meter], steps: int, read_ms: float) -> float:
    """Of a loop whose iterator is counted by this, after the first batches.

    Args:
        make: Makes the counter.
        steps: How many.
        read_ms: What reading one record takes.
    """
    records = grain.MapDataset.source(Source(steps, read_ms / 1e3)).map(decode)
    ready = []
    with (
        mock.patch.object(iterator, "Meter", make),
        iter(records.batch(GLOBAL_BATCH_SIZE).shard_to(peers.data_mesh())) as batches,
    ):
        for batch in batches:
            jax.block_until_ready(batch)
            ready.append(time.perf_counter())
            time.sleep(STEP_S)  # the step
    warm_up = len(ready) // 4  # until it has found how many threads read
    return (ready[-1] - ready[warm_up]) / (len(ready) - 1 - warm_up) * 1e3


def counting_us(steps: int, read_ms: float) -> float:
    """All that is counted for one step, one after the other."""
    calls: list[Call] = []
    ms_per_step(functools.partial(Noting, calls), steps, read_ms)
    meter = Meter(mask_key=MASK_KEY)
    start = time.thread_time()
    for call in calls:
        call(meter)
    return (time.thread_time() - start) / steps * 1e6


def measure(run: Run) -> Iterable[Round]:
    steps = run.rounds(quick=120, full=400)
    sides: dict[str, Callable[[], float]] = {"a step": lambda: STEP_S * 1e6}
    for ms in READS_MS:
        sides[f"counted {ms}"] = functools.partial(ms_per_step, Meter, steps, ms)
        sides[f"not counted {ms}"] = functools.partial(ms_per_step, NotCounting, steps, ms)
        sides[f"counting {ms}"] = functools.partial(counting_us, steps, ms)
    return interleave(sides, run.rounds(quick=3, full=9))


def _loop(read_ms: float) -> Comparison:
    return Comparison(
        "P19",
        what=f"steps of 5 ms, batches of 64, {read_ms:g} ms a record, counted for stats()",
        against="not counted",
        unit="ms",
        ours=f"counted {read_ms}",
        theirs=f"not counted {read_ms}",
        compared="ours - theirs",
        compared_unit="ms",
        goal=Goal("at most", 0.005 * STEP_S * 1e3),
    )


def _alone(read_ms: float) -> Comparison:
    return Comparison(
        "",
        what=f"what is counted for one of these steps, {read_ms:g} ms a record, in all threads",
        against="a step",
        unit="us",
        ours=f"counting {read_ms}",
        theirs="a step",
        compared="ours / theirs",
    )


GROUPS = [
    Group(
        "counting",
        measure,
        [*map(_loop, READS_MS), *map(_alone, READS_MS)],
    )
]
