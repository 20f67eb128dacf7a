"""The account of an iterator: running sums. Differences of two give the time between them."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from grain_shard.spans import BATCH, PAD, PLACE, READ

MAKING = READ, BATCH, PAD  # one after the other, by the threads that make a host's batches
BUSY = 0.5  # share of the time; a stage that is at work for less mostly waits for something itself

_Key = TypeVar("_Key", bound=Hashable)


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


@dataclass(frozen=True)
class Counts:
    """Sums over the life of an iterator or over a part of it.

    Attributes:
        sums: By name. "seconds" end when the last batch was handed out, or now if the loop waits
            for one; the loop spent "wait" and "step" seconds of them. "batches" were handed out,
            with this host's "records" and "bytes". "placed" batches are on the devices. "retries"
            and "bad_records" are as in `FaultCounts`. A missing sum is 0.
        stages_s: Seconds of each stage, by (thread, stage); a thread is its number or its name.
        reads: The threads that read now.
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    stages_s: Mapping[tuple[int | str, str], float] = field(default_factory=dict)
    reads: ReadThreads = field(default_factory=ReadThreads)

    def __getitem__(self, name: str) -> float:
        return self.sums.get(name, 0)

    def since(self, before: Counts) -> Counts:
        """Returns the sums over the time since then."""
        return replace(
            self,
            sums=_difference(self.sums, before.sums),
            stages_s=_difference(self.stages_s, before.stages_s),
        )

    def stage_s(self, *stages: str) -> float:
        """Returns the seconds of these stages, of all their threads together."""
        return sum((s for (_, stage), s in self.stages_s.items() if stage in stages), 0.0)

    def has_seen(self, stage: str) -> bool:
        """Returns whether a stage was ever at work in this process."""
        return any(name == stage for _, name in self.stages_s)

    def threads(self, *stages: str) -> int:
        """Returns the number of threads that were at work in these stages."""
        return len({at for (at, stage), s in self.stages_s.items() if stage in stages and s > 0})


def _difference(now: Mapping[_Key, float], before: Mapping[_Key, float]) -> dict[_Key, float]:
    return {key: value - before.get(key, 0) for key, value in now.items()}


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
        placing: The same share for the thread that puts them on the devices.
        stage_s: Returns the seconds of a stage that makes batches.
        least: None is busiest if both shares are below this one.
    """
    if max(making, placing) < least:
        return None
    return PLACE if placing > making else max(MAKING, key=stage_s)
