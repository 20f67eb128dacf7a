"""A measured loop over batches: when it waits, when it is in the step, what the stages do."""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import jax
import numpy as np

from grain_shard.errors import require_int
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.sharded_dataset import Settings, sharded
from grain_shard.spans import LOOP, PAD, PLACE, ROOM, STAGES, STEP, WAIT, Span, recorded, span
from grain_shard.trees import MASK_KEY


@dataclass(frozen=True, repr=False)
class Measurement:
    """What happened while a loop took batches and did a step with each.

    Attributes:
        num_batches: Batches that were measured.
        num_batches_asked: Batches that were to be measured; more if the dataset ended early.
        warmup: Batches that were taken before these and left out.
        seconds: How long the loop took for the measured batches.
        recorded_spans: What each lane did for a batch, from the start of the warm-up on: `Span`s,
            in seconds after the start of the measured loop. The lanes are
            "read" (read and decode the records of a batch, or take it from its stream), "batch"
            (stack them), "pad", "place" (hand it to the devices); and those of the loop: "wait"
            (for a batch that is on the devices), "step" (until its result is). A span of "room"
            is that of a thread which rests since a buffer is full.
        pipeline: What is known of the pipeline; None if `shard_to` did not make it.
        num_examples: Rows of the measured global batches; where these have a "valid_mask", only
            those for which it is True, unless the step donated it.
        num_bytes: Of the measured global batches, padding included.
        read_threads: How many threads read side by side in the end, and why, and how many reads
            were asked for again; "" if not known.
    """

    num_batches: int
    num_batches_asked: int
    warmup: int
    seconds: float
    recorded_spans: tuple[Span, ...]
    pipeline: Settings | None = None
    num_examples: int = 0
    num_bytes: int = 0
    read_threads: str = ""

    @classmethod
    def of_loop(
        cls,
        ds: Iterable[Any],
        num_batches: int,
        warmup: int,
        step: Callable[[Any], Any] | None,
    ) -> Self:
        """Takes batches, and does the step with each; see `grain_shard.profile`."""
        require_int("num_batches", num_batches, 1)
        require_int("warmup", warmup, 0)
        batches: list[_Batch] = []
        pipeline = sharded(ds)
        row_dims = 1 if pipeline is None else pipeline.row_dims
        with recorded() as spans, _opened(ds) as iterator:
            while len(batches) < warmup + num_batches:
                try:
                    with span(WAIT):
                        batch = jax.block_until_ready(next(iterator))
                except StopIteration:
                    break
                batches.append(_Batch.of(batch, row_dims))
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
            is_ours = isinstance(iterator, ShardedIterator)
            read_threads = str(iterator.stats().reads) if is_ours else ""
        if not batches:
            raise ValueError("the dataset has no batch to measure.")
        warmup = min(warmup, len(batches) - 1)
        measured = batches[warmup:]
        loop_start = [s.start for s in spans if s.stage == WAIT][warmup]
        loop_end = max(s.end for s in spans if s.stage == (WAIT if step is None else STEP))
        # Clocks have a smallest step, and no figure may be one over nothing.
        least_s = time.get_clock_info("perf_counter").resolution
        return cls(
            num_batches=len(measured),
            num_batches_asked=num_batches,
            warmup=warmup,
            seconds=max(loop_end - loop_start, least_s),
            recorded_spans=tuple(
                s._replace(start=s.start - loop_start, end=s.end - loop_start)
                for s in sorted(spans, key=lambda s: s.start)
            ),
            pipeline=None if pipeline is None else pipeline.settings,
            num_examples=sum(batch.examples() for batch in measured),
            num_bytes=sum(batch.num_bytes for batch in measured),
            read_threads=read_threads,
        )

    @functools.cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the lanes within the measured loop, cut off at its start and its end."""
        return self._within(*STAGES, *LOOP)

    @functools.cached_property
    def rests(self) -> tuple[Span, ...]:
        """When a thread began nothing within the measured loop, since a buffer was full."""
        return self._within(ROOM)

    def _within(self, *stages: str) -> tuple[Span, ...]:
        return tuple(
            _cut(s, max(s.start, 0), min(s.end, self.seconds))
            for s in self.recorded_spans
            if s.stage in stages and s.end > 0 and s.start < self.seconds
        )

    @property
    def lanes_s(self) -> Mapping[str, float]:
        """Seconds of work in each lane that was seen, of all its threads together."""
        return {lane: s for lane in (*STAGES, *LOOP) if (s := self.total_s(lane))}

    def total_s(self, *lanes: str) -> float:
        """Seconds of work in these lanes, of all threads together."""
        return sum((s.end - s.start for s in self.spans if s.stage in lanes), 0.0)

    def threads(self, *lanes: str) -> int:
        """Threads that were seen at work in these lanes."""
        return len({s.thread for s in self.spans if s.stage in lanes})

    def busy(self, *lanes: str) -> float:
        """The part of the time, 0 to 1, during which any thread was at work in these lanes.

        It is not taken over the threads that were seen. Threads come and go as `pace.py` finds
        their number, and where the interpreter's lock lets one of them work at a time, the others
        rest however much there is to do.
        """
        return covered_s([s for s in self.spans if s.stage in lanes]) / self.seconds

    def side_by_side(self, *lanes: str) -> float:
        """How many threads were at work in these lanes at a time, on average."""
        return self.total_s(*lanes) / self.seconds

    def processor_s(self, *lanes: str) -> float:
        """Seconds for which processors were busy with these lanes, of all threads together."""
        return sum((s.processor_s for s in self.spans if s.stage in lanes), 0.0)

    @property
    def examples_per_second(self) -> float:
        """Valid rows of the global batches, by the wall clock over the whole loop."""
        return self.num_examples / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes of the global batches, padding included, by the wall clock."""
        return self.num_bytes / self.seconds

    @property
    def wait_share(self) -> float:
        """The part of waiting and step together that was waiting, 0 to 1; 1 without a step."""
        return self.total_s(WAIT) / (self.total_s(*LOOP) or 1)

    @property
    def wait_s(self) -> float:
        """From asking for a batch until it was on the devices, in seconds a batch."""
        return self.total_s(WAIT) / self.num_batches

    @property
    def step_s(self) -> float:
        """From there until the step's result was, in seconds a batch; 0 without a step."""
        return self.total_s(STEP) / self.num_batches

    @property
    def stages_s(self) -> Mapping[str, float]:
        """What the pipeline's threads spent on a batch, by stage, in seconds.

        Batches that were made during the warm-up count, too. Without a stage that does not exist,
        or that runs in worker processes.
        """
        seconds = {
            stage: [s.end - s.start for s in self.recorded_spans if s.stage == stage]
            for stage in STAGES
        }
        # A batch may be read and stacked in parts, and several may be read at once; but each batch
        # is padded once, so that this tells how many were made.
        made = len(seconds[PAD])
        batches = {stage: made or len(times) for stage, times in seconds.items()}
        batches[PLACE] = len(seconds[PLACE])
        return {stage: sum(times) / batches[stage] for stage, times in seconds.items() if times}


class _Batch(NamedTuple):
    """What is kept of a batch to count its examples after the loop.

    In the loop it would take time, in which the pipeline would get ahead.
    """

    mask: Any
    num_rows: int
    num_bytes: int

    @classmethod
    def of(cls, batch: Any, row_dims: int) -> _Batch:
        leaves = jax.tree.leaves(batch)
        return cls(
            mask=batch.get(MASK_KEY) if isinstance(batch, Mapping) else None,
            num_rows=next((math.prod(x.shape[:row_dims]) for x in leaves if np.ndim(x)), 1),
            num_bytes=sum(getattr(leaf, "nbytes", 0) for leaf in leaves),
        )

    def examples(self) -> int:
        """The valid rows; all of them if nothing tells which these are."""
        if self.mask is None or (isinstance(self.mask, jax.Array) and self.mask.is_deleted()):
            return self.num_rows  # the mask is gone if the step donated its batch
        return int(self.mask.sum())


def covered_s(spans: Sequence[Span]) -> float:
    """Seconds during which at least one of the spans was going on."""
    seconds, reached = 0.0, float("-inf")
    for one in sorted(spans, key=lambda s: s.start):
        seconds += max(0.0, one.end - max(one.start, reached))
        reached = max(reached, one.end)
    return seconds


def _cut(whole: Span, start: float, end: float) -> Span:
    """The part of a span between two times; of its processor time, as large a part."""
    length = whole.end - whole.start
    part = (end - start) / length if length else 1.0
    return whole._replace(start=start, end=end, processor_s=whole.processor_s * part)


@contextlib.contextmanager
def _opened(ds: Iterable[Any]) -> Iterator[Iterator[Any]]:
    """An iterator, which is closed at the end unless it is the caller's own."""
    iterator = iter(ds)
    try:
        yield iterator
    finally:
        if iterator is not ds and (close := getattr(iterator, "close", None)) is not None:
            close()
