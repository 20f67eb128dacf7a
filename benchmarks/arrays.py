"""P22: `ArraySource` in memory and in memory maps, beside a loop of numpy and Grain's guide.

All sides use one device. To place an array on eight virtual devices takes longer than to gather its
rows, and would hide the difference.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

import grain_shard
from benchmarks.measure import Comparison, Goal, Group, Round, Run, alone, interleave

Batches = Iterator[Any]


class Size(NamedTuple):
    """A size of records and batches, with a goal.

    `goal` is the share of the numpy loop's speed that is wanted; None for no goal.
    """

    record_bytes: int
    global_batch_size: int
    records: int
    goal: float | None

    def __str__(self) -> str:
        return f"{self.global_batch_size} records of {self.record_bytes:,} B"


TINY = Size(32, 256, 200_000, None)
SIZES = [
    Size(3_072, 256, 20_000, 0.6),
    Size(24_576, 64, 4_000, 0.8),
    Size(245_760, 32, 800, 0.8),
    Size(602_112, 64, 640, 0.8),
]
MOST_MS_A_BATCH = 0.5  # goal for batches of TINY
SECONDS_A_SIDE = 0.5  # least time for which a side is measured


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])


def in_memory(size: Size, folder: Path) -> np.ndarray:
    rng = np.random.default_rng(0)
    return rng.integers(0, 256, (size.records, size.record_bytes), np.uint8)


def memory_mapped(size: Size, folder: Path) -> np.ndarray:
    path = folder / f"{size.record_bytes}.bin"
    if not path.exists():
        in_memory(size, folder).tofile(path)
    return np.memmap(path, np.uint8, mode="r", shape=(size.records, size.record_bytes))


def loop(array: np.ndarray, size: Size) -> Batches:
    """Yields batches by a loop of numpy: a permutation, the rows in its order, and `device_put`.

    The loop has no prefetch and no state, and runs on one host.
    """
    sharding = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec("data"))
    for epoch in itertools.count():
        order = np.random.default_rng(epoch).permutation(len(array))
        for start in range(0, len(array) - size.global_batch_size, size.global_batch_size):
            rows = array[order[start : start + size.global_batch_size]]
            yield jax.device_put({"x": rows}, sharding)


def shuffled(source: Any, size: Size) -> grain.MapDataset:
    ds = grain.MapDataset.source(source).seed(1).shuffle().repeat()
    return ds.batch(size.global_batch_size)


def ours(array: np.ndarray, size: Size) -> Batches:
    ds = shuffled(grain_shard.ArraySource({"x": array}), size)
    return iter(ds.shard_to(mesh(), mask_key=None))


class Rows:
    def __init__(self, array: np.ndarray):
        self._array = array

    def __len__(self) -> int:
        return len(self._array)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"x": self._array[index]}


def guide(array: np.ndarray, size: Size) -> Batches:
    """Returns an iterator over batches of Grain's guide, with ReadOptions that are fast here."""
    ds = shuffled(Rows(array), size).to_iter_dataset(grain.ReadOptions(2, 4))
    device = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec("data"))
    return iter(grain.experimental.device_put(ds, device, cpu_buffer_size=4, device_buffer_size=2))


def ms_a_batch(make: Callable[[np.ndarray, Size], Batches], array: np.ndarray, size: Size) -> float:
    """Returns the milliseconds per batch after the first five, over at least half a second.

    The loop waits until each batch is on the device.
    """
    batches = make(array, size)
    for _ in range(5):
        jax.block_until_ready(next(batches))
    start, count = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < SECONDS_A_SIDE:
        jax.block_until_ready(next(batches))
        count += 1
    getattr(batches, "close", lambda: None)()
    return seconds / count * 1e3


KINDS = {"in memory": in_memory, "memory-mapped": memory_mapped}
WAYS = {"ours": ours, "loop": loop, "guide": guide}


def measure(run: Run) -> Iterable[Round]:
    rounds = []
    for (kind, make), size in itertools.product(KINDS.items(), [TINY, *SIZES]):
        array = make(size, run.folder)
        sides = {
            f"{name} {kind} {size}": functools.partial(ms_a_batch, way, array, size)
            for name, way in WAYS.items()
        }
        rounds.append(list(interleave(sides, run.rounds(quick=3, full=9), warm_up=False)))
    return [dict(itertools.chain(*(r.items() for r in several))) for several in zip(*rounds)]  # noqa: B905


# For the time of an epoch with its start: two arrays of 1,000 records, each half of 240 kB.
EPOCH = Size(122_880, 32, 1_000, None)


def epoch_s(batches: Batches) -> float:
    start = time.perf_counter()
    for _ in range(EPOCH.records // EPOCH.global_batch_size):
        jax.block_until_ready(next(batches))
    seconds = time.perf_counter() - start
    getattr(batches, "close", lambda: None)()
    return seconds


def pairs_by_loop(arrays: dict[str, np.ndarray]) -> Batches:
    sharding = jax.sharding.NamedSharding(mesh(), jax.sharding.PartitionSpec("data"))
    order = np.random.default_rng(0).permutation(EPOCH.records)
    for start in range(0, EPOCH.records, EPOCH.global_batch_size):
        rows = order[start : start + EPOCH.global_batch_size]
        yield jax.device_put({name: array[rows] for name, array in arrays.items()}, sharding)


def pairs_of_ours(arrays: dict[str, np.ndarray]) -> Batches:
    return iter(
        grain.MapDataset.source(grain_shard.ArraySource(arrays))
        .shuffle(seed=0)
        .batch(EPOCH.global_batch_size)
        .shard_to(mesh(), mask_key=None)
    )


def measure_epoch(run: Run) -> Iterable[Round]:
    arrays = {name: in_memory(EPOCH, run.folder) for name in ("u", "v")}
    sides = {
        "loop": lambda: epoch_s(pairs_by_loop(arrays)),
        "ours": lambda: epoch_s(pairs_of_ours(arrays)),
    }
    return interleave(sides, run.rounds(quick=5, full=15))


GROUPS = [
    Group(
        "arrays",
        "Arrays: ArraySource beside a loop of numpy",
        measure,
        [
            *(
                alone(
                    "P22",
                    f"{TINY}, {kind}",
                    "ms/batch",
                    f"ours {kind} {TINY}",
                    Goal("at most", MOST_MS_A_BATCH),
                )
                for kind in KINDS
            ),
            *(
                Comparison(
                    "P22" if against == "loop" else "",
                    f"{size}, {kind}",
                    {"loop": "a loop of numpy", "guide": "Grain's guide"}[against],
                    "ms/batch",
                    f"ours {kind} {size}",
                    f"{against} {kind} {size}",
                    compared="theirs / ours",
                    goal=Goal("at least", size.goal) if against == "loop" and size.goal else None,
                )
                for against in ("loop", "guide")
                for kind in KINDS
                for size in SIZES
            ),
        ],
    ),
    Group(
        "arrays epoch",
        "An epoch of two arrays, 1,000 records of 240 kB, with its start",
        measure_epoch,
        [
            Comparison(
                "P22",
                "an epoch",
                "a loop of numpy",
                "s",
                "ours",
                "loop",
                compared="ours / theirs",
                goal=Goal("at most", 1.3),
            )
        ],
    ),
]
