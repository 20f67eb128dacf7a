"""`Measurement`: a measured loop, with figures that are computed from recorded spans."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.spans import LOOP, ROOM, STAGES, STEP, WAIT, WORK, Span
from grain_shard.stats.counts import MAKING
from grain_shard.tools.measuring.loop import covered_s, cut

_LANES = *STAGES, WORK, *LOOP


@dataclass(frozen=True)
class PipelineFacts:
    """The facts of a pipeline on which the advice for it depends.

    Attributes:
        cpu_buffer_size: Most batches on the host, ready or being made.
        num_workers: Number of worker processes that make the batches; 0 if threads make them.
        has_executor: True if an executor makes the batches.
        is_stream: True if batches can only be read in order, as in a stream or in feeds.
        reads_other_rows: True if this host reads whole batches, and keeps only some of their rows.
        amplification: Rows that all hosts read together, divided by the rows of the batch.
    """

    cpu_buffer_size: int = 4
    num_workers: int = 0
    has_executor: bool = False
    is_stream: bool = False
    reads_other_rows: bool = False
    amplification: float = 1.0

    @classmethod
    def of(cls, ds: ShardedDataset) -> PipelineFacts:
        """Returns the facts of a dataset that `shard_to` made."""
        return cls(
            cpu_buffer_size=ds.settings.cpu_buffer_size,
            num_workers=ds.settings.num_workers,
            has_executor=ds.settings.executor is not None,
            is_stream=ds.num_batches() is None,
            reads_other_rows=ds.host.reads_other_rows,
            amplification=ds.layout.amplification,
        )


@dataclass(frozen=True, repr=False)
class Measurement:
    """A measured loop, which waited until each batch was on the devices and then ran a step.

    Attributes:
        num_batches: Number of measured batches.
        num_batches_asked: Number of batches that should have been measured. It is larger than
            `num_batches` if the dataset ended early.
        warmup: Number of batches that were taken first and not measured.
        seconds: Seconds that the loop took for the measured batches.
        recorded_spans: `Span`s (timed pieces of work) since the start of the warm-up. Times are in
            seconds after the start of the measured loop, so they are negative in the warm-up. The
            stages of the pipeline are "read" (read and decode the records of a batch, or take the
            batch from its stream), "batch" (stack them), "pad", "place" (place the batch on the
            devices) and "work" (a task of an executor; its thread is the worker). The loop has
            "wait" (until a batch is on the devices) and "step" (until the step's result is
            computed). In a "room" span, a thread waits because a buffer is full.
        pipeline: The facts of the pipeline; None if `shard_to` did not make it.
        num_examples: Number of rows of the measured global batches. If a batch has a mask that the
            step did not donate, only the rows for which the mask is True are counted.
        num_bytes: Bytes of the measured global batches, padding included.
        read_threads: The number of reading threads at the end and the reason for it, as text; ""
            if not known.
    """

    num_batches: int
    num_batches_asked: int
    warmup: int
    seconds: float
    recorded_spans: tuple[Span, ...]
    pipeline: PipelineFacts | None = None
    num_examples: int = 0
    num_bytes: int = 0
    read_threads: str = ""

    @functools.cached_property
    def spans(self) -> tuple[Span, ...]:
        """Spans of stages, waiting and training steps, cut off at the loop's start and end."""
        return self._within(*_LANES)

    @functools.cached_property
    def rests(self) -> tuple[Span, ...]:
        """Spans in which a thread that makes batches rested because the buffer was full."""
        threads = {s.thread for s in self.spans if s.stage in MAKING}
        return tuple(s for s in self._within(ROOM) if s.thread in threads)

    def _within(self, *stages: str) -> tuple[Span, ...]:
        return tuple(
            cut(s, 0, self.seconds)
            for s in self.recorded_spans
            if s.stage in stages and s.end > 0 and s.start < self.seconds
        )

    @property
    def examples_per_second(self) -> float:
        """Valid rows of the global batches per second, by the wall clock over the whole loop."""
        return self.num_examples / self.seconds

    @property
    def bytes_per_second(self) -> float:
        """Bytes of the global batches per second, padding included, by the wall clock."""
        return self.num_bytes / self.seconds

    @property
    def wait_share(self) -> float:
        """Share of waiting in the time of waiting and training steps, 0 to 1; 1 without a step."""
        return self.lane_s(WAIT) / (self.lane_s(*LOOP) or 1)

    @property
    def wait_s(self) -> float:
        """Seconds per batch from the call of ``next`` until the batch was on the devices."""
        return self.lane_s(WAIT) / self.num_batches

    @property
    def step_s(self) -> float:
        """Seconds per batch from its arrival on the devices to the step's result; 0 for no step."""
        return self.lane_s(STEP) / self.num_batches

    @property
    def lanes_s(self) -> Mapping[str, float]:
        """Seconds that all threads together spent in each stage, in "wait" and in "step", by name.

        A name without any time is left out.
        """
        return {lane: s for lane in _LANES if (s := self.lane_s(lane))}

    def busy(self, *lanes: str) -> float:
        """Returns the share of the time, 0 to 1, in which at least one thread was in these `lanes`.

        It is not an average over threads, because their number changes while the loop runs (see
        `pace.py`), and most of them may wait while one holds the interpreter's lock.

        Args:
            *lanes: Names of stages, "wait" or "step".
        """
        return covered_s([s for s in self.spans if s.stage in lanes]) / self.seconds

    def lane_s(self, *lanes: str) -> float:
        """Returns the seconds that all threads together spent in these `lanes`."""
        return sum((s.end - s.start for s in self.spans if s.stage in lanes), 0.0)

    def processor_s(self, *lanes: str) -> float:
        """Returns the seconds of processor time that all threads together used in `lanes`."""
        return sum((s.processor_s for s in self.spans if s.stage in lanes), 0.0)
