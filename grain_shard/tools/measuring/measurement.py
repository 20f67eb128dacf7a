"""`Measurement`: a measured loop, with the figures of `stats()` computed from recorded spans."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.spans import LOOP, PAD, PLACE, ROOM, STAGES, WORK, Span
from grain_shard.stats.counts import MAKING
from grain_shard.stats.figures import Figures
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


@dataclass(frozen=True)
class _LoopFigures(Figures):
    """Figures of a measured loop, with the times of a batch from `Measurement.stages_s`.

    The sums cannot give these times: they leave out the warm-up, in which some of the batches were
    made.

    Attributes:
        batch_stages_s: Seconds per batch by stage.
    """

    batch_stages_s: Mapping[str, float] = field(default_factory=dict)

    def _a_batch(self, stage: str) -> float | None:
        return self.batch_stages_s.get(stage)


@dataclass(frozen=True, repr=False)
class Measurement:
    """A measured loop, which waited until each batch was on the devices and then ran a step.

    The figures have the same names as in `ShardedIterator.stats()`. They are computed from the
    recorded spans.

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

    @functools.cached_property
    def figures(self) -> Figures:
        """The figures of `ShardedIterator.stats()`, for the measured loop and global batches."""
        stages_s: dict[tuple[int | str, str], float] = defaultdict(float)
        for one in self.spans:
            stages_s[one.thread, one.stage] += one.end - one.start
        sums = {"batches": self.num_batches, "records": self.num_examples, "bytes": self.num_bytes}
        spent = {stage: Figures(stages_s=stages_s).stage_s(stage) for stage in LOOP}
        sums |= {**spent, "seconds": self.seconds}
        return _LoopFigures(sums, stages_s, batch_stages_s=self.stages_s)

    @property
    def examples_per_second(self) -> float:
        """Valid rows of the global batches per second, by the wall clock over the whole loop."""
        return self.figures.records_per_s

    @property
    def bytes_per_second(self) -> float:
        """Bytes of the global batches per second, padding included, by the wall clock."""
        return self.figures.bytes_per_s

    @property
    def wait_share(self) -> float:
        """Share of waiting in the time of waiting and training steps, 0 to 1; 1 without a step."""
        return self.figures.wait_share

    @property
    def wait_s(self) -> float:
        """Seconds per batch from the call of ``next`` until the batch was on the devices."""
        return self.figures.wait_s

    @property
    def step_s(self) -> float:
        """Seconds per batch from its arrival on the devices to the step's result; 0 for no step."""
        return self.figures.step_s

    @property
    def lanes_s(self) -> Mapping[str, float]:
        """Seconds that all threads together spent in each stage, in "wait" and in "step", by name.

        A name without any time is left out.
        """
        return {lane: s for lane in _LANES if (s := self.figures.stage_s(lane))}

    @property
    def stages_s(self) -> Mapping[str, float]:
        """Seconds per batch that the pipeline's threads spent in each stage, by name.

        Batches that were made during the warm-up count, too. A stage is left out if the pipeline
        does not have it, or if it runs in worker processes.
        """
        seconds = {
            stage: [s.end - s.start for s in self.recorded_spans if s.stage == stage]
            for stage in STAGES
        }
        # A batch may be read and stacked in parts, so one batch may have several spans of these
        # stages. Each batch is padded once, so the number of paddings is the number of batches.
        made = len(seconds[PAD])
        batches = {stage: made or len(times) for stage, times in seconds.items()}
        batches[PLACE] = len(seconds[PLACE])
        return {stage: sum(times) / batches[stage] for stage, times in seconds.items() if times}

    def busy(self, *lanes: str) -> float:
        """Returns the share of the time, 0 to 1, in which at least one thread was in these `lanes`.

        It is not an average over threads, because their number changes while the loop runs (see
        `pace.py`), and most of them may wait while one holds the interpreter's lock.

        Args:
            *lanes: Names of stages, "wait" or "step".
        """
        return covered_s([s for s in self.spans if s.stage in lanes]) / self.seconds

    def side_by_side(self, *lanes: str) -> float:
        """Returns the average number of threads that were in these `lanes` at the same time.

        Args:
            *lanes: Names of stages, "wait" or "step".
        """
        return self.figures.stage_s(*lanes) / self.seconds

    def processor_s(self, *lanes: str) -> float:
        """Returns the seconds of processor time that all threads together spent in these `lanes`.

        Args:
            *lanes: Names of stages, "wait" or "step".
        """
        return sum((s.processor_s for s in self.spans if s.stage in lanes), 0.0)
