"""Runs a loop over batches and records its spans (timed pieces of work); arithmetic with spans."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.sharded_dataset import sharded
from grain_shard.spans import STEP, WAIT, Span, recorded, span
from grain_shard.stats.counts import mask_of, size_of
from grain_shard.trees import MASK_KEY


def run_loop(
    ds: Iterable[Any], num_batches: int, step: Callable[[Any], Any] | None
) -> tuple[list[Span], list[dict[str, int]], str]:
    """Runs a training loop, and records it.

    Args:
        ds: The dataset or an iterator. A given iterator is not closed.
        num_batches: Number of batches to take. The loop takes fewer if the dataset ends.
        step: The training step, called with each batch; None for no step.

    Returns:
        A triple (spans, sizes, read_threads). The spans are the work of all threads during the
        loop, in the order of their start. The sizes are a dict for each batch, with its numbers of
        "records" and "bytes". The text `read_threads` is the number of reading threads at the end
        of the loop, with the reason for it; "" if not known.

    Raises:
        ValueError: The step returned nothing.
    """
    sizes: list[dict[str, int]] = []
    masks: list[Any] = []
    pipeline = sharded(ds)
    mask_key = MASK_KEY if pipeline is None else pipeline.host.padding.mask_key
    with contextlib.ExitStack() as cleanup, recorded() as spans:
        iterator = iter(ds)
        if iterator is not ds:  # the user did not pass it, so it ends with this loop
            cleanup.callback(getattr(iterator, "close", lambda: None))
        while len(masks) < num_batches:
            try:
                with span(WAIT):
                    batch = jax.block_until_ready(next(iterator))
            except StopIteration:
                break
            sizes.append(size_of(batch))
            # Masks are summed after the loop. In the loop, the sum would give the pipeline time to
            # make more batches than in a real loop.
            masks.append(mask_of(batch, mask_key))
            if step is not None:
                _run_step(step, batch)
            # Without this the devices would hold one batch more than the pipeline allows.
            del batch
        is_ours = isinstance(iterator, ShardedIterator)
        read_threads = str(iterator.stats().reads) if is_ours else ""
    for size, mask in zip(sizes, masks, strict=True):
        # A step that donates its batch deletes the mask. Then all rows count as records.
        if mask is not None and not (isinstance(mask, jax.Array) and mask.is_deleted()):
            size["records"] = int(mask.sum())
    return sorted(spans, key=lambda s: s.start), sizes, read_threads


def _run_step(step: Callable[[Any], Any], batch: Any) -> None:
    with span(STEP):
        result = jax.block_until_ready(step(batch))
    if not jax.tree.leaves(result):
        raise ValueError(
            "the step returned nothing, so it is unknown when the devices have finished the step.\n"
            "  remedy: return a result from the step, such as the loss."
        )


def covered_s(spans: Sequence[Span]) -> float:
    """Returns the seconds that the spans cover together. Times that overlap count once."""
    seconds, covered_to = 0.0, float("-inf")
    for one in sorted(spans, key=lambda s: s.start):
        seconds += max(0.0, one.end - max(one.start, covered_to))
        covered_to = max(covered_to, one.end)
    return seconds


def cut(whole: Span, start: float, end: float) -> Span:
    """Returns the part of a span between two times.

    The processor time of the part is in proportion to its length.
    """
    start, end = max(whole.start, start), min(whole.end, end)
    length = whole.end - whole.start
    part = (end - start) / length if length else 1.0
    return whole._replace(start=start, end=end, processor_s=whole.processor_s * part)
