"""The size of a batch and the busiest stage, for statistics and for profiles."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from grain_shard.spans import BATCH, PAD, PLACE, READ

# The stages of the threads that make host batches. A thread runs them one after the other.
MAKING = READ, BATCH, PAD
# A stage that works for a smaller share of the time than this mostly waits, so it is not busy.
BUSY = 0.5


class ReadThreads(NamedTuple):
    """The threads that read a source side by side.

    Attributes:
        number: Number of threads that read now. None in streams, feeds and worker processes, where
            the number is not measured.
        why: The reason for this number, in words.
    """

    number: int | None = None
    why: str = ""

    def __str__(self) -> str:
        return "" if self.number is None else f"{self.number} ({self.why})"


def size_of(batch: Any) -> dict[str, int]:
    """Returns the number of rows ("records") and of bytes ("bytes") of a tree of arrays."""
    leaves = jax.tree.leaves(batch)
    return {
        "records": next((np.shape(x)[0] for x in leaves if np.ndim(x)), 1),
        "bytes": sum([getattr(leaf, "nbytes", 0) for leaf in leaves]),
    }


def mask_of(batch: Any, mask_key: str | None) -> Any:
    """Returns the mask of a batch; None if the batch has no mask."""
    return batch.get(mask_key) if isinstance(batch, Mapping) else None


def busiest(
    making: float, placing: float, stage_s: Callable[[str], float], least: float
) -> str | None:
    """Returns the stage whose threads are busiest.

    The stages "read", "batch" and "pad" share threads. If these threads are busiest, the result is
    the stage that takes most of their time.

    Args:
        making: Share of the time, 0 to 1, in which the threads that make batches are busy.
        placing: Share of the time, 0 to 1, in which the thread that puts batches on the devices is
            busy.
        stage_s: Returns the seconds of a stage that makes batches.
        least: The minimum share of a busy thread. If both shares are smaller, the result is None.
    """
    if max(making, placing) < least:
        return None
    return PLACE if placing > making else max(MAKING, key=stage_s)
