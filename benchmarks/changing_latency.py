"""Draws how a pipeline adapts to a source whose reads take no time, then 50 ms, then no time.

    python -m benchmarks.changing_latency [PICTURE]

The script measures `.shard_to` with default options, and Grain's guide, for half a minute each. It
writes docs/changing_latency.png.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

PHASES_MS = (0, 50, 0)
PHASE_S = 10
SAMPLE_S = 0.1  # time between two counts of the threads that read; longer than a read
SMOOTHED_S = 0.5  # window for the averages in the picture


class Followed(NamedTuple):
    """The record of one pipeline. Times are in seconds after its start.

    Attributes:
        batches_s: The times at which batches arrived.
        samples_s: The times at which the threads that read were counted.
        threads: For each time in `samples_s`, the number of threads that had read since the last
            count.
    """

    batches_s: np.ndarray
    samples_s: np.ndarray
    threads: np.ndarray


def follow(pipeline: Callable[[Any], Iterator[Any]]) -> Followed:
    """Runs a pipeline through all phases of the source, and returns the record.

    Args:
        pipeline: Function that takes a dataset of records and returns an iterator over batches.
    """
    from benchmarks.waiting import Source, shuffled

    class Changing(Source):
        """A source that notes the threads that read. The time of a read depends on the phase."""

        start = time.perf_counter()
        readers: set[int] = set()  # noqa: RUF012, threads since the last count

        def wait(self, index: int) -> None:
            phase = int((time.perf_counter() - self.start) / PHASE_S)
            if latency_ms := PHASES_MS[min(phase, len(PHASES_MS) - 1)]:
                time.sleep(latency_ms / 1e3)
            self.readers.add(threading.get_ident())

    source, samples, batches = Changing(0), [], []
    over = threading.Event()

    def sample() -> None:
        while not over.wait(SAMPLE_S):
            readers, source.readers = source.readers, set()
            samples.append((time.perf_counter() - source.start, len(readers)))

    sampler = threading.Thread(target=sample)
    sampler.start()
    try:
        with closing(pipeline(shuffled(source))) as iterator:  # pyright: ignore
            while not batches or batches[-1] < PHASE_S * len(PHASES_MS):
                next(iterator)
                batches.append(time.perf_counter() - source.start)
    finally:
        over.set()
        sampler.join()
    samples_s, threads = np.array(samples).T
    return Followed(np.array(batches), samples_s, threads)


def draw(followed: dict[str, tuple[str, Followed]], path: Path) -> None:
    """Draws two plots over time: records per second, and below it the number of reading threads.

    Args:
        followed: For each name, the color of its line and the record of the pipeline.
        path: The file to write.
    """
    from matplotlib.figure import Figure

    from benchmarks.waiting import GLOBAL_BATCH_SIZE
    from grain_shard.tools.palette import EMPTY

    end = PHASE_S * len(PHASES_MS)
    times = np.arange(0, end, 0.1)
    figure = Figure(figsize=(9, 5.2), layout="constrained")
    rates, threads = figure.subplots(2, 1, sharex=True)
    for name, (color, seen) in followed.items():
        edges = times - SMOOTHED_S / 2, times + SMOOTHED_S / 2
        arrived = np.arange(1, len(seen.batches_s) + 1) * GLOBAL_BATCH_SIZE
        before, after = (np.interp(t, seen.batches_s, arrived, left=0) for t in edges)
        rates.plot(times, (after - before) / SMOOTHED_S, color=color, label=name)
        windows = [abs(seen.samples_s - t) <= SMOOTHED_S / 2 for t in times]
        threads.plot(times, [seen.threads[window].mean() for window in windows], color=color)
    for axes in (rates, threads):
        for phase, latency_ms in enumerate(PHASES_MS):
            if latency_ms:
                axes.axvspan(phase * PHASE_S, (phase + 1) * PHASE_S, color=EMPTY, zorder=0)
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:,g}")
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    rates.set_ylim(bottom=100)
    rates.set_ylabel("records a second")
    rates.legend(frameon=False, loc="lower left")
    rates.set_title(
        f"a read takes nothing, then {max(PHASES_MS)} ms (grey), then nothing", loc="left"
    )
    threads.set_ylim(bottom=0.8)
    threads.set_ylabel("threads that read")
    threads.set(xlabel="seconds", xlim=(0, end))
    figure.savefig(path, dpi=110, facecolor="white", metadata={"Software": None})


def main() -> None:
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_num_cpu_devices", 8)
    from benchmarks.waiting import GLOBAL_BATCH_SIZE, guide, ours
    from grain_shard.tools.palette import BLUE, VERMILION

    default = Path(__file__).parents[1] / "docs" / "changing_latency.png"
    followed = {
        ".shard_to(mesh)": (BLUE, follow(ours)),
        "Grain's guide (16 threads)": (VERMILION, follow(guide)),
    }
    draw(followed, Path(sys.argv[1]) if len(sys.argv) > 1 else default)
    for name, (_, seen) in followed.items():
        for phase, latency_ms in enumerate(PHASES_MS):
            start, stop = phase * PHASE_S, (phase + 1) * PHASE_S
            # In the first half of a phase, the pipeline still adapts its number of threads.
            settled = (seen.batches_s > start + PHASE_S / 2) & (seen.batches_s <= stop)
            rate = settled.sum() * GLOBAL_BATCH_SIZE / (PHASE_S / 2)
            print(f"{name}, {latency_ms} ms, from {start + PHASE_S / 2} s: {rate:,.0f} records/s")


if __name__ == "__main__":
    main()
