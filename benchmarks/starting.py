"""P10, P11, P12: the time of a restore, of the import, and of the layout of a very large job."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from typing import Any

from benchmarks.measure import Comparison, Goal, Group, Round, Run, Skip, alone, interleave

GLOBAL_BATCH_SIZE = 256
NEAR, FAR = 10, 1_000_000  # steps at which a state is taken
REPEATS = 10  # restores for one figure

# A program that prints the milliseconds of `import grain, jax`, and of this with `grain_shard`.
IMPORTS = """
import time
start = time.perf_counter()
import grain, jax
between = time.perf_counter()
import grain_shard
end = time.perf_counter()
print([(between - start) * 1e3, (end - start) * 1e3])
"""

# A program that prints the milliseconds to compute a host's layout, for each of 16 hosts.
LAYOUT = """
import os, time
os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
os.environ["JAX_PLATFORMS"] = "cpu"
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from grain_shard import BatchLayout

slice_ = topologies.get_topology_desc(platform="tpu", topology_name="v5p:16x16x24")
devices = np.array(slice_.devices)
assert devices.size == 6144 and len({d.process_index for d in slice_.devices}) == 1536
mesh = Mesh(devices.reshape(768, 8), ("data", "model"))
times = []
for host in range(0, 1536, 96):
    start = time.perf_counter()
    layout = BatchLayout.of_hosts([NamedSharding(mesh, PartitionSpec("data"))])[host]
    times.append((time.perf_counter() - start) * 1e3)
    assert len(layout.rows(6144)) == 8 and layout.num_hosts == 1536, layout
print(times)
"""


def ms_to_restore(step: int) -> float:
    """Returns the milliseconds of a restore, the median of ten.

    The time is from `set_state` on a new iterator until its next batch is on the devices.
    """
    import grain
    import jax

    import grain_shard  # noqa: F401
    from benchmarks import peers

    ds = (
        grain.MapDataset.range((FAR + 100) * GLOBAL_BATCH_SIZE)
        .seed(peers.SEED)
        .shuffle()
        .map(lambda i: {"x": i})
        .batch(GLOBAL_BATCH_SIZE)
        .shard_to(peers.data_mesh())
    )

    with iter(ds) as batches:
        batches.seek(step)
        state = batches.get_state()

    def once() -> float:
        with iter(ds) as batches:
            start = time.perf_counter()
            batches.set_state(state)
            jax.block_until_ready(next(batches))
            return (time.perf_counter() - start) * 1e3

    return statistics.median(once() for _ in range(REPEATS))


def measure_restores(run: Run) -> Iterable[Round]:
    return interleave(
        {"far": lambda: ms_to_restore(FAR), "near": lambda: ms_to_restore(NEAR)},
        run.rounds(quick=7, full=25),
    )


def measure_imports(run: Run) -> Iterator[Round]:
    """Yields the import times with and without grain_shard.

    One process measures both, so that other work of the machine affects both.
    """
    for number in range(-1, run.rounds(quick=7, full=15)):
        without, both = _printed_by(IMPORTS)
        if number >= 0:  # the first import may read files from the disk, so it is left out
            yield {"with": both, "without": without}


def measure_layouts(run: Run) -> Iterator[Round]:
    try:
        import libtpu  # pyright: ignore[reportMissingImports] # noqa: F401
    except ImportError:
        raise Skip("libtpu is not installed (the plan extra has it)") from None
    for ms in _printed_by(LAYOUT):
        yield {"layout": ms}


def _printed_by(program: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    return json.loads(done.stdout.splitlines()[-1])


GROUPS = [
    Group(
        "restoring",
        "Restoring, until the first batch",
        measure_restores,
        [
            Comparison(
                "P10",
                what=f"at step {FAR:,}",
                against=f"at step {NEAR}",
                unit="ms",
                ours="far",
                theirs="near",
                compared="ours / theirs",
                goal=Goal("at most", 1.1),
            )
        ],
    ),
    Group(
        "importing",
        "Importing the package",
        measure_imports,
        [
            Comparison(
                "P11",
                what="import grain, jax, grain_shard",
                against="import grain, jax",
                unit="ms",
                ours="with",
                theirs="without",
                compared="ours - theirs",
                compared_unit="ms",
                goal=Goal("at most", 30),
            )
        ],
    ),
    Group(
        "layout",
        "One host's layout, for 6,144 TPU v5p chips on 1,536 hosts",
        measure_layouts,
        [alone("P12", "", "ms", "layout", Goal("at most", 50))],
    ),
]
