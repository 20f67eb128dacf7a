"""P21: the processor time that an iterator takes to count the figures of `stats()`.

First the spans of a loop with steps of 5 ms are recorded, in all threads. Then the same spans are
opened and closed again without the work inside them, once counted and once not. The counted side
also counts the rows and bytes of each batch. In a real loop, the loop's own thread takes only some
microseconds of this time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable

import grain
import numpy as np

import grain_shard  # noqa: F401
from benchmarks import peers
from benchmarks.measure import Comparison, Goal, Group, Round, Run, interleave
from grain_shard.spans import counted_by, recorded, span
from grain_shard.stats.meter import Meter
from grain_shard.trees import MASK_KEY

GLOBAL_BATCH_SIZE, STEP_S = 64, 5e-3
MOST_SHARE = 0.005  # goal: the share of a step that counting may take
READS_MS = (0.0, 1.0)  # milliseconds to read one record


class Source:
    """A source in which the read of a record sleeps for `read_s` seconds."""

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


def stages_of_loop(steps: int, read_ms: float) -> list[str]:
    """Runs a loop, and returns the stage of each span that was recorded in it."""
    records = grain.MapDataset.source(Source(steps, read_ms / 1e3)).map(decode)
    with recorded() as spans:
        for _ in records.batch(GLOBAL_BATCH_SIZE).shard_to(peers.data_mesh()):
            time.sleep(STEP_S)  # in place of a training step
    return [s.stage for s in spans]


def spans_us(stages: list[str], steps: int) -> float:
    """Returns the microseconds of processor time per step for spans without work in them."""
    start = time.thread_time()
    for stage in stages:
        with span(stage):
            pass
    return (time.thread_time() - start) / steps * 1e6


def counted_us(stages: list[str], steps: int) -> float:
    """Returns the microseconds of processor time per step for counted spans and counted batches."""
    meter = Meter(mask_key=MASK_KEY)
    batch = {
        "image": np.zeros((GLOBAL_BATCH_SIZE, 3072), np.uint8),
        "label": np.zeros(GLOBAL_BATCH_SIZE, np.int32),
        MASK_KEY: np.ones(GLOBAL_BATCH_SIZE, bool),
    }
    start = time.thread_time()
    for _ in range(steps):
        size = meter.placed(batch)
        with meter:
            pass
        meter.handed_out(size)
    of_batches = (time.thread_time() - start) / steps * 1e6
    with counted_by(meter):
        return of_batches + spans_us(stages, steps)


def measure(run: Run) -> Iterable[Round]:
    steps = run.rounds(quick=120, full=400)
    sides: dict[str, Callable[[], float]] = {}
    for ms in READS_MS:
        stages = stages_of_loop(steps, ms)
        sides[f"counted {ms}"] = functools.partial(counted_us, stages, steps)
        sides[f"not counted {ms}"] = functools.partial(spans_us, stages, steps)
    return interleave(sides, run.rounds(quick=9, full=25))


GROUPS = [
    Group(
        "counting",
        "What stands around the work of a step, counted for stats()",
        measure,
        [
            Comparison(
                "P21",
                what=f"batches of {GLOBAL_BATCH_SIZE}, {ms:g} ms a record",
                against="not counted",
                unit="us",
                ours=f"counted {ms}",
                theirs=f"not counted {ms}",
                compared="ours - theirs",
                compared_unit="us",
                goal=Goal("at most", MOST_SHARE * STEP_S * 1e6),
            )
            for ms in READS_MS
        ],
    )
]
