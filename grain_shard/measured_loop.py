"""A loop over batches that says when it waits and when it is in the step.

`measure_throughput` makes averages of it, `profile` a picture.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np

from grain_shard.errors import require_int
from grain_shard.spans import LOOP, STEP, WAIT, Span, recorded, span

_MASK_KEY = "valid_mask"  # the default of shard_to


class MeasuredBatch(NamedTuple):
    """What is kept of a batch."""

    mask: Any
    num_rows: int
    num_bytes: int

    def examples(self) -> int:
        """The valid rows; all of them if nothing tells which these are."""
        if self.mask is None or (isinstance(self.mask, jax.Array) and self.mask.is_deleted()):
            return self.num_rows  # it may be gone because the step donated its batch
        return int(self.mask.sum())


@dataclass(frozen=True)
class MeasuredLoop:
    """What happened in the loop.

    Attributes:
        warmup: Batches that were taken first, and left out.
        batches: Those that were measured.
        spans: Of the loop and of all stages, from the start of the warm-up on.
    """

    warmup: int
    batches: list[MeasuredBatch]
    spans: list[Span]

    @property
    def num_batches(self) -> int:
        """Batches that were measured."""
        return len(self.batches)

    @property
    def start(self) -> float:
        """When the loop asked for the first measured batch."""
        return self._of(WAIT)[0].start

    @property
    def end(self) -> float:
        """When the last step was done."""
        return max(self._of(lane)[-1].end for lane in LOOP if self._of(lane))

    def total_s(self, lane: str) -> float:
        """Seconds that the loop was waiting, or in the step; 0 without a step."""
        return sum((s.end - s.start for s in self._of(lane)), 0.0)

    def _of(self, lane: str) -> list[Span]:
        return [s for s in self.spans if s.stage == lane][self.warmup :]


def measured_loop(
    ds: Iterable[Any], num_batches: int, warmup: int, step: Callable[[Any], Any] | None
) -> MeasuredLoop:
    """Takes batches, and does the step with each.

    *Wait* ends when all of the batch is on the devices, *step* when the step's result is.

    Args:
        ds: Any iterable of batches. An iterator is the caller's own and is not closed.
        num_batches: Batches to measure.
        warmup: Batches to leave out before them; fewer, so that one is measured, if the dataset
            ends early.
        step: Called with each batch; None to do nothing but wait.

    Raises:
        ValueError: The dataset has no batch, or the step returns nothing.
        ShardingError: A number of batches is no whole number, or too small.
    """
    require_int("num_batches", num_batches, 1)
    require_int("warmup", warmup, 0)
    batches: list[MeasuredBatch] = []
    with recorded() as spans, _opened(ds) as iterator:
        while len(batches) < warmup + num_batches:
            try:
                with span(WAIT):
                    batch = jax.block_until_ready(next(iterator))
            except StopIteration:
                break
            # Summed after the loop: the pipeline would catch up while the step waits for it.
            batches.append(_measured(batch))
            if step is not None:
                with span(STEP):
                    result = jax.block_until_ready(step(batch))
                if not jax.tree.leaves(result):
                    raise ValueError(
                        "the step returned nothing, so nothing tells when the devices are done"
                        " with it.\n  remedy: return what it computes, such as the loss."
                    )
                del result
            del batch  # not to hold one more on the devices than the pipeline means to
    if not batches:
        raise ValueError("the dataset has no batch to measure.")
    warmup = min(warmup, len(batches) - 1)
    return MeasuredLoop(warmup, batches[warmup:], spans)


def _measured(batch: Any) -> MeasuredBatch:
    leaves = jax.tree.leaves(batch)
    return MeasuredBatch(
        mask=batch.get(_MASK_KEY) if isinstance(batch, Mapping) else None,
        num_rows=next((leaf.shape[0] for leaf in leaves if np.ndim(leaf)), 1),
        num_bytes=sum(getattr(leaf, "nbytes", 0) for leaf in leaves),
    )


@contextlib.contextmanager
def _opened(ds: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """An iterator, which is closed at the end unless it is the caller's own."""
    iterator = iter(ds)
    try:
        yield iterator
    finally:
        if iterator is not ds and (close := getattr(iterator, "close", None)) is not None:
            close()
