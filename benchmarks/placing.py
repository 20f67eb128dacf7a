"""P7, P8: the time that `.shard_to` takes for a batch that is in memory as numpy arrays."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import Any

import grain
import jax
import numpy as np

import grain_shard  # noqa: F401
from benchmarks import peers
from benchmarks.measure import Comparison, Goal, Group, Round, Run, interleave

GLOBAL_BATCH_SIZE, BATCHES = 256, 200
Batch = Mapping[str, np.ndarray]


def image_and_label() -> Batch:
    return {
        "image": np.zeros((GLOBAL_BATCH_SIZE, 32, 32, 3), np.uint8),
        "label": np.zeros(GLOBAL_BATCH_SIZE, np.int32),
    }


def twenty_leaves() -> Batch:
    return {f"leaf_{n}": np.zeros((GLOBAL_BATCH_SIZE, 16), np.float32) for n in range(20)}


class Again:
    """A source of whole batches: each record is the same batch, which no side writes to."""

    def __init__(self, batch: Batch):
        self._batch = batch

    def __len__(self) -> int:
        return BATCHES

    def __getitem__(self, index: int) -> Batch:
        return self._batch


def chain_us(batch: Batch, mask_key: str | None) -> float:
    """Returns the microseconds per batch of `.shard_to`, without the first batch.

    The first batch starts the threads.
    """
    ds = grain.MapDataset.source(Again(batch)).shard_to(peers.data_mesh(), mask_key=mask_key)
    with iter(ds) as batches:
        jax.block_until_ready(next(batches))
        start = time.perf_counter()
        for placed in batches:
            jax.block_until_ready(placed)
        return (time.perf_counter() - start) / (BATCHES - 1) * 1e6


def bare_us(batch: Batch) -> float:
    """Returns the microseconds per batch of ``jax.device_put(tree, shardings)`` in the loop."""
    shardings = jax.tree.map(lambda _: peers.data_sharding(), batch)
    jax.block_until_ready(jax.device_put(batch, shardings))
    start = time.perf_counter()
    for _ in range(BATCHES - 1):
        jax.block_until_ready(jax.device_put(batch, shardings))
    return (time.perf_counter() - start) / (BATCHES - 1) * 1e6


def guide_us(batch: Batch) -> float:
    """Returns the microseconds per batch of ``grain.experimental.device_put``."""
    ds = grain.MapDataset.source(Again(batch)).to_iter_dataset(grain.ReadOptions(2, 4))
    batches = peers.device_put(ds)
    jax.block_until_ready(next(batches))
    start = time.perf_counter()
    for placed in batches:
        jax.block_until_ready(placed)
    return (time.perf_counter() - start) / (BATCHES - 1) * 1e6


def measure(run: Run) -> Iterable[Round]:
    sides: dict[str, Any] = {}
    for leaves, make in ((2, image_and_label), (20, twenty_leaves)):
        batch = make()
        sides |= {
            f"chain {leaves}": lambda batch=batch: chain_us(batch, None),
            f"bare {leaves}": lambda batch=batch: bare_us(batch),
            f"masked {leaves}": lambda batch=batch: chain_us(batch, "valid_mask"),
            f"Grain {leaves}": lambda batch=batch: guide_us(batch),
        }
    return interleave(sides, run.rounds(quick=5, full=15))


def _comparison(
    number: str, what: str, against: str, ours: str, theirs: str, goal: Goal | None
) -> Comparison:
    return Comparison(
        number, what, against, "us/batch", ours, theirs, compared="ours / theirs", goal=goal
    )


GROUPS = [
    Group(
        "placing",
        "The chain over batches that are in memory",
        measure,
        [
            comparison
            for leaves in (2, 20)
            for comparison in (
                _comparison(
                    "P7",
                    f"{leaves} leaves",
                    "Grain's device_put",
                    f"chain {leaves}",
                    f"Grain {leaves}",
                    Goal("at most", 0.85),
                ),
                _comparison(
                    "P8",
                    f"{leaves} leaves, full batches, with a mask",
                    "without a mask",
                    f"masked {leaves}",
                    f"chain {leaves}",
                    Goal("at most", 1.01),
                ),
                _comparison(
                    "",
                    f"{leaves} leaves",
                    "jax.device_put(tree, shardings)",
                    f"chain {leaves}",
                    f"bare {leaves}",
                    None,
                ),
            )
        ],
    )
]
