"""P6: if a source sleeps h per batch and the step sleeps s, a step takes only max(h, s)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import grain
import jax
import numpy as np

import grain_shard  # noqa: F401
from benchmarks import peers
from benchmarks.measure import Comparison, Goal, Group, Round, Run, interleave

GLOBAL_BATCH_SIZE = 8
LONGER_S = 0.040  # the longer of h and s, in seconds
RATIOS = (0.25, 0.5, 1.0, 2.0)  # h / s


def times(ratio: float) -> tuple[float, float]:
    """Returns h and s in seconds, for a ratio h / s."""
    return LONGER_S * min(1.0, ratio), LONGER_S * min(1.0, 1 / ratio)


def source(batches: int, h: float) -> grain.MapDataset:
    """Returns a dataset of batches. The read of a batch's first record sleeps `h` seconds."""

    def record(index: int) -> dict[str, np.ndarray]:
        if index % GLOBAL_BATCH_SIZE == 0:
            time.sleep(h)
        return {"x": np.full(1024, index, np.float32)}

    return grain.MapDataset.range(batches * GLOBAL_BATCH_SIZE).map(record).batch(GLOBAL_BATCH_SIZE)


def ours(batches: int, h: float) -> Iterator[Any]:
    # With two threads, the sleeps of two batches would overlap.
    with iter(source(batches, h).shard_to(peers.data_mesh(), num_threads=1)) as placed:
        yield from placed


def grain_tuned(batches: int, h: float) -> Iterator[Any]:
    options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
    return peers.device_put(source(batches, h).to_iter_dataset(options))


def ms_per_step(batches: Iterator[Any], s: float) -> float:
    """Returns the milliseconds per step, from the first batch to the last.

    The wait for the first batch is not counted.
    """
    ready = []
    for batch in batches:
        jax.block_until_ready(batch)
        ready.append(time.perf_counter())
        time.sleep(s)  # in place of a training step
    return (ready[-1] - ready[0]) / (len(ready) - 1) * 1e3


def measure(run: Run) -> Iterable[Round]:
    steps = run.rounds(quick=26, full=51)
    sides: dict[str, Any] = {"max(h, s)": lambda: LONGER_S * 1e3}
    for ratio in RATIOS:
        h, s = times(ratio)
        for name, pipeline in (("grain_shard", ours), ("Grain", grain_tuned)):
            sides[f"{name} {ratio}"] = lambda pipeline=pipeline, h=h, s=s: ms_per_step(
                pipeline(steps, h), s
            )
    return interleave(sides, run.rounds(quick=1, full=5), warm_up=not run.quick)


def _comparison(ratio: float, number: str, name: str, goal: Goal | None) -> Comparison:
    h, s = times(ratio)
    whose = "" if goal else f", {name}'s device_put with one thread"
    return Comparison(
        number,
        what=f"source {h * 1e3:g} ms, step {s * 1e3:g} ms{whose}",
        against="the longer of the two",
        unit="ms",
        ours=f"{name} {ratio}",
        theirs="max(h, s)",
        compared="ours / theirs",
        goal=goal,
    )


GROUPS = [
    Group(
        "overlap",
        "Time per step, while the source works on the next batch",
        measure,
        [_comparison(ratio, "P6", "grain_shard", Goal("at most", 1.03)) for ratio in RATIOS]
        + [_comparison(ratio, "", "Grain", None) for ratio in RATIOS],
    )
]
