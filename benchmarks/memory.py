"""P9: peak memory with batches of 40 MB and a loop that is so slow that every buffer fills.

Each side runs in a process of its own (``python -m benchmarks.memory SIDE MB LIMIT_MB``). The
process prints the growth of its resident memory, divided by the size of a batch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Comparison, Goal, Group, Round, Run, Skip, interleave

ROWS = 16
CPU_BUFFER_SIZE, DEVICE_BUFFER_SIZE = 4, 2
# Most batches that a process may hold: batches that wait on the devices, batches on the host, one
# batch on its way from the host to the devices, and the batch that the loop holds.
BOUND = DEVICE_BUFFER_SIZE + CPU_BUFFER_SIZE + 1 + 1
STATUS = Path("/proc/self/status")


def memory_mb(field: str) -> float:
    """Returns the memory of this process in MiB: "VmRSS" for now, "VmHWM" for its peak."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


def wait_until_full(limit_mb: float) -> bool:
    """Sleeps until this process's memory stops growing; returns False if it passes the limit."""
    before = 0.0
    while (now := memory_mb("VmRSS")) > before * 1.005 + 1:
        if now > limit_mb:
            return False
        before = now
        time.sleep(1.0)
    return True


def child(side: str, batch_mb: float, limit_mb: float) -> None:
    import grain
    import jax
    import numpy as np

    import grain_shard  # noqa: F401
    from benchmarks import peers

    def pipeline(batches: int, features: int) -> Iterator[Any]:
        ds = (
            grain.MapDataset.range(batches * ROWS)
            .map(lambda i: {"x": np.full(features, i, np.float32)})
            .batch(ROWS, drop_remainder=True)
        )
        if side == "grain_shard":
            return iter(
                ds.shard_to(
                    peers.data_mesh(),
                    cpu_buffer_size=CPU_BUFFER_SIZE,
                    device_buffer_size=DEVICE_BUFFER_SIZE,
                )
            )
        options = grain.ReadOptions(2, 4) if side == "Grain tuned" else None
        return peers.device_put(ds.to_iter_dataset(options))

    jax.config.update("jax_num_cpu_devices", 8)
    for batch in pipeline(batches=8, features=8):  # code that is loaded here stays in memory
        jax.block_until_ready(batch)
    before_mb = memory_mb("VmRSS")
    placed = pipeline(batches=10_000, features=int(batch_mb * 1e6 / 4 / ROWS))
    for _, batch in zip(range(3), placed, strict=False):
        jax.block_until_ready(batch)
        if not wait_until_full(limit_mb):
            break
    print((memory_mb("VmHWM") - before_mb) * 1.048576 / batch_mb, flush=True)
    os._exit(0)  # closing a full pipeline takes long, and is not measured


def batches_at_peak(side: str, batch_mb: float, limit_mb: float) -> float:
    command = [sys.executable, "-m", "benchmarks.memory", side, str(batch_mb), str(limit_mb)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=300)
    return float(done.stdout)


def available_mb() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) / 1024
    raise KeyError("MemAvailable")


def measure(run: Run) -> Iterable[Round]:
    if not STATUS.exists():
        raise Skip("peak memory is read from /proc, which this system lacks")
    batch_mb = 10.0 if run.quick else 40.0
    # With its defaults Grain would hold 520 batches, which could fill the machine's memory.
    limit_mb = min(300 * batch_mb, available_mb() / 2)
    sides = {
        side: lambda side=side: batches_at_peak(side, batch_mb, limit_mb)
        for side in ("grain_shard", "Grain tuned", "Grain's guide")
    }
    sides["bound"] = lambda: float(BOUND)
    return interleave(sides, run.rounds(quick=1, full=2), warm_up=False)


GROUPS = [
    Group(
        "memory",
        "Peak memory with a slow consumer, batches of 40 MB (10 MB if quick)",
        measure,
        [
            Comparison(
                "P9",
                what="",
                against="the bound of C9, and the batch that the consumer holds",
                unit="batches",
                ours="grain_shard",
                theirs="bound",
                compared="ours / theirs",
                goal=Goal("at most", 1.0),
            ),
            Comparison(
                "P9",
                what="",
                against="Grain's guide, option C (stopped at 300 batches or half the memory)",
                unit="batches",
                ours="grain_shard",
                theirs="Grain's guide",
                compared="theirs / ours",
                goal=Goal("at least", 20),
            ),
            Comparison(
                "",
                what="",
                against="Grain, 2 threads, 4 batches",
                unit="batches",
                ours="grain_shard",
                theirs="Grain tuned",
                compared="theirs / ours",
            ),
        ],
    )
]

if __name__ == "__main__":
    child(sys.argv[1], float(sys.argv[2]), float(sys.argv[3]))
