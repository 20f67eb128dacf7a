"""The size of a batch and the busiest stage, for live statistics and for recorded profiles."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from grain_shard.spans import BATCH, PAD, PLACE, READ

MAKING = READ, BATCH, PAD  # one after the other, by the threads that make a host's batches
BUSY = 0.5  # share of the time; a stage that is at work for less mostly waits for something itself


class ReadThreads(NamedTuple):
    """The threads that read a source side by side.

    Attributes:
        number: None if it is not found while the pipeline runs, as in streams, feeds and worker
            processes.
        why: The reason for this number, in words.
    """

    number: int | None = None
    why: str = ""

    def __str__(self) -> str:
        return "" if self.number is None else f"{self.number} ({self.why})"


def size_of(batch: Any, row_dims: int = 1) -> dict[str, int]:
    """Returns the rows of a batch, as "records", and its "bytes".

    Args:
        batch: A tree of arrays.
        row_dims: Number of leading dimensions that count rows.
    """
    leaves = jax.tree.leaves(batch)
    return {
        "records": next((math.prod(np.shape(x)[:row_dims]) for x in leaves if np.ndim(x)), 1),
        "bytes": sum(getattr(leaf, "nbytes", 0) for leaf in leaves),
    }


def mask_of(batch: Any, mask_key: str | None) -> Any:
    """Returns the mask of a batch; None if it has none."""
    return batch.get(mask_key) if isinstance(batch, Mapping) else None


def busiest(
    making: float, placing: float, stage_s: Callable[[str], float], least: float
) -> str | None:
    """Returns the stage whose threads are busiest; of stages that share threads, the longest.

    Args:
        making: Share of the time, 0 to 1, in which the threads that make batches are busy.
        placing: The same share for the thread that puts batches on the devices.
        stage_s: Returns the seconds of a stage that makes batches.
        least: None is busiest if both shares are below this one.
    """
    if max(making, placing) < least:
        return None
    return PLACE if placing > making else max(MAKING, key=stage_s)
