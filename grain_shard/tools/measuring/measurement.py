"""A measured loop: `Measurement`, the figures of `stats()` over recorded spans."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.spans import LOOP, PAD, PLACE, ROOM, STAGES, WORK, Span
from grain_shard.stats.figures import Figures
from grain_shard.tools.measuring.loop import covered_s, cut

_LANES = *STAGES, WORK, *LOOP


@dataclass(frozen=True)
class Pipeline:
    """The facts of a pipeline that decide on the advice for it.

    Attributes:
        cpu_buffer_size: Most batches on the host, including unfinished ones.
        num_workers: Worker processes that make the batches; 0 if threads do.
        has_executor: True if an executor makes the batches.
        is_stream: True if batches come in order only.
        reads_once: True if every row is read on one host and moved by the devices.
        reads_other_rows: True if whole batches are read, of which this host keeps some rows.
        amplification: Rows that all hosts read together, over the rows of the batch.
    """

    cpu_buffer_size: int = 4
    num_workers: int = 0
    has_executor: bool = False
    is_stream: bool = False
    reads_once: bool = False
    reads_other_rows: bool = False
    amplification: float = 1.0

    @classmethod
    def of(cls, ds: ShardedDataset) -> Pipeline:
        """Returns the facts of a dataset that `shard_to` made."""
        return cls(
            cpu_buffer_size=ds.settings.cpu_buffer_size,
            num_workers=ds.settings.num_workers,
            has_executor=ds.settings.executor is not None,
            is_stream=ds.num_batches() is None,
            reads_once=ds.settings.final_shardings is not None,
            reads_other_rows=ds.host.reads_other_rows,
            amplification=ds.layout.amplification,
        )


@dataclass(frozen=True, repr=False)
class Measurement:
    """A loop that took batches, waited for each until it was on the devices, and did its step.

    Its figures are named as in `stats()`, and computed from its own spans.

    Attributes:
        num_batches: Batches that were measured.
        num_batches_asked: Batches that were to be measured; more if the dataset ended early.
        warmup: Batches that were taken before these and left out.
        seconds: Time of the loop for the measured batches.
        recorded_spans: `Span`s from the start of the warm-up on, in seconds after the start of the
            measured loop. The pipeline's lanes are "read" (read and decode the records of a batch,
            or take the batch from its stream), "batch" (stack them), "pad", "place" (hand the batch
            to the devices) and "work" (a task of an executor; its thread is the worker). The loop's
            lanes are "wait" (until a batch is on the devices) and "step" (until the step's result
            is there). In a span of "room" a thread rests, because a buffer is full.
        pipeline: The facts of the pipeline; None if `shard_to` did not make it.
        num_examples: Rows of the measured global batches; where these have a "valid_mask", only
            those for which it is True, unless the step donated it.
        num_bytes: Bytes of the measured global batches, padding included.
        read_threads: Number of threads that read side by side in the end, and the reason; "" if
            not known.
    """

    num_batches: int
    num_batches_asked: int
    warmup: int
    seconds: float
    recorded_spans: tuple[Span, ...]
    pipeline: Pipeline | None = None
    num_examples: int = 0
    num_bytes: int = 0
    read_threads: str = ""

    @functools.cached_property
    def spans(self) -> tuple[Span, ...]:
        """The spans of the lanes within the measured loop, cut off at its start and its end."""
        return self._within(*_LANES)

    @functools.cached_property
    def rests(self) -> tuple[Span, ...]:
        """Times within the measured loop in which a thread rested, because a buffer was full."""
        return self._within(ROOM)

    def _within(self, *stages: str) -> tuple[Span, ...]:
        return tuple(
            cut(s, 0, self.seconds)
            for s in self.recorded_spans
            if s.stage in stages and s.end > 0 and s.start < self.seconds
        )

    @functools.cached_property
    def figures(self) -> Figures:
        """The figures of `stats()`, for the measured loop and its global batches."""
        stages_s: dict[tuple[int | str, str], float] = defaultdict(float)
        for one in self.spans:
            stages_s[one.thread, one.stage] += one.end - one.start
        sums = {"batches": self.num_batches, "records": self.num_examples, "bytes": self.num_bytes}
        spent = {stage: Figures(stages_s=stages_s).stage_s(stage) for stage in LOOP}
        return Figures({**sums, **spent, "seconds": self.seconds}, stages_s)

    @property
    def examples_per_second(self) -> float:
        """Valid rows of the global batches, by the wall clock over the whole loop."""
        return self.figures.records_per_s

    @property
    def bytes_per_second(self) -> float:
        """Bytes of the global batches, padding included, by the wall clock."""
        return self.figures.bytes_per_s

    @property
    def wait_share(self) -> float:
        """The part of waiting and step together that was waiting, 0 to 1; 1 without a step."""
        return self.figures.wait_share

    @property
    def wait_s(self) -> float:
        """Seconds per batch from the request until the batch was on the devices."""
        return self.figures.wait_s

    @property
    def step_s(self) -> float:
        """Seconds a batch from its arrival on the devices to the step's result; without one 0."""
        return self.figures.step_s

    @property
    def lanes_s(self) -> Mapping[str, float]:
        """Seconds of work in each lane that was seen, of all its threads together."""
        return {lane: s for lane in _LANES if (s := self.figures.stage_s(lane))}

    @property
    def stages_s(self) -> Mapping[str, float]:
        """Seconds that the pipeline's threads spent on a batch, by stage.

        Batches that were made during the warm-up count, too. A stage is left out if it does not
        exist or runs in worker processes.
        """
        seconds = {
            stage: [s.end - s.start for s in self.recorded_spans if s.stage == stage]
            for stage in STAGES
        }
        # A batch may be read and stacked in parts, and several may be read at once. Each batch is
        # padded once, so that the number of paddings is the number of batches.
        made = len(seconds[PAD])
        batches = {stage: made or len(times) for stage, times in seconds.items()}
        batches[PLACE] = len(seconds[PLACE])
        return {stage: sum(times) / batches[stage] for stage, times in seconds.items() if times}

    def busy(self, *lanes: str) -> float:
        """Returns the part of the time, 0 to 1, in which any thread was at work in these lanes.

        It is not taken over the threads that were seen. Threads come and go as `pace.py` finds
        their number, and if the interpreter's lock lets one of them work at a time, the others
        rest, however much there is to do.
        """
        return covered_s([s for s in self.spans if s.stage in lanes]) / self.seconds

    def side_by_side(self, *lanes: str) -> float:
        """Returns the number of threads that were at work in these lanes at a time, on average."""
        return self.figures.stage_s(*lanes) / self.seconds

    def processor_s(self, *lanes: str) -> float:
        """Returns the seconds for which these lanes kept processors busy, of all threads."""
        return sum((s.processor_s for s in self.spans if s.stage in lanes), 0.0)
