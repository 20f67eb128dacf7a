"""Which stage a training loop waits for, and what to change.

A stage holds the loop up if its threads need longer for a batch than the loop does for its own
work: no buffer could help then. If the loop waits and no stage does, then either batches differ
much in what they take, and the buffers are too small to even that out, or the time goes into
something that is not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from grain_shard.iteration.sharded_dataset import Settings
from grain_shard.measuring.measurement import Measurement
from grain_shard.spans import BATCH, PAD, PLACE, READ, STAGES, STEP, WAIT, Span

_MAKING = READ, BATCH, PAD  # one after the other, by the threads that make a host's batches

_LITTLE_WAIT = 0.1  # of the loop's time: no change to the pipeline could gain more than that
_BUSY = 0.5  # of its threads' time: with less, a stage mostly waits for something itself
_MOST = 0.5  # of the waiting


class Bottleneck(NamedTuple):
    """What holds the loop up, why one can tell, and what to change."""

    name: str
    reason: str
    advice: tuple[str, ...]


def find_bottleneck(measured: Measurement) -> Bottleneck:
    """What holds the loop up, with the advice that fits the pipeline."""
    pipeline = measured.pipeline or Settings()
    waits = f"the loop waits {measured.busy(WAIT):.0%} of the time"
    making = f"{measured.busy(*_MAKING):.0%} busy"
    if measured.busy(WAIT) < _LITTLE_WAIT and measured.total_s(STEP) > 0:
        return Bottleneck(
            STEP,
            f"{waits}; the pipeline keeps up with the step.",
            ("look for time in the step; no change to the pipeline makes the loop faster.",),
        )
    busiest = _busiest(measured)
    if busiest == PLACE:
        return Bottleneck(
            PLACE,
            f"the thread that hands batches to the devices is {measured.busy(PLACE):.0%} busy.",
            (
                "send less to the devices: uint8 images, made floats inside the step.",
                "have fewer and larger leaves: each one costs a call for every device.",
                "make the step bigger, by a larger global batch, if batches are small.",
            ),
        )
    if busiest is not None:
        doing = {READ: "reading and decoding records", BATCH: "stacking records", PAD: "padding"}
        return Bottleneck(
            busiest,
            f"the threads that make batches (seen: {measured.threads(*_MAKING)}) are {making},"
            f" mostly {doing[busiest]}.",
            _faster_making(busiest, pipeline),
        )
    if pipeline.num_workers:
        return Bottleneck(
            "workers",
            f"{waits}, no thread of this process holds it up, and batches are made in worker"
            f" processes (num_workers={pipeline.num_workers}), which are not seen from here.",
            (
                "raise num_workers, as far as there are idle processor cores.",
                "profile once with num_workers=0 to see which stage takes the time.",
            ),
        )
    if not measured.total_s(READ):
        return Bottleneck(
            "unseen",
            f"{waits}, and nothing tells when batches are read.",
            ("end the pipeline with .shard_to(mesh), whose stages tell their times.",),
        )
    idle = _idle_share(measured)
    if idle >= _MOST:
        once = 'compare with read="needed": devices exchange rows now.'
        return Bottleneck(
            "handover",
            f"during {idle:.0%} of the waiting no stage was at work: batches were ready, and"
            " something after them was not.",
            (
                "move a .map that follows .shard_to before .batch, or into the step.",
                *([once] if pipeline.reads_once else []),
                "send less to the devices: uint8 images, made floats inside the step.",
                "make the step bigger, by a larger global batch, if it is very short.",
            ),
        )
    return Bottleneck(
        "buffer",
        f"{waits}, and yet the threads that make batches are only {making}: some batches take much"
        " longer than others, and too few wait in the buffers.",
        (
            f"raise cpu_buffer_size ({pipeline.cpu_buffer_size} now) to cover a slow batch.",
            "or make the slow batches faster: the picture shows which they are.",
        ),
    )


def _faster_making(stage: str, pipeline: Settings) -> tuple[str, ...]:
    """Advice for a pipeline whose threads are busy in one of the stages that make a batch."""
    advice = []
    if stage == READ and pipeline.reads_other_rows:
        advice.append(
            "move the .map (or the batch_fn) that stands at or after .batch before it: this host"
            " makes whole batches now, to keep some of their rows."
        )
    if stage == READ and pipeline.amplification > 1 and not pipeline.is_stream:
        times = f"{pipeline.amplification:.3g}"
        advice.append(f'pass read="once": the hosts read every row {times} times now.')
    if stage == READ and pipeline.is_stream:
        advice.append(
            "one thread reads a stream: give it (more) workers by .mp_prefetch before .shard_to"
            " (feeds: by num_workers), or keep a MapDataset down to .batch."
        )
    if stage == BATCH:
        advice.append("make records smaller before .batch: crop, or keep uint8 until the step.")
    if stage == PAD:
        advice.append("choose a global batch that the shards divide: then only the last is padded.")
    if not pipeline.is_stream and not pipeline.num_workers:
        advice.append(
            "raise cpu_buffer_size if this waits for files or a network, so that more is read"
            " ahead; pass num_workers if it computes in Python, which runs one thread at a time."
        )
    return tuple(advice)


def _busiest(measured: Measurement) -> str | None:
    """The stage that takes longer for a batch than the loop's own work; None if none does.

    Of stages that share their threads, the longest.
    """
    placing, making = measured.busy(PLACE), measured.busy(*_MAKING)
    if max(placing, making) < max(_BUSY, 1 - measured.busy(WAIT)):
        return None
    return PLACE if placing > making else max(_MAKING, key=measured.total_s)


def _idle_share(measured: Measurement) -> float:
    """The part of the waiting, 0 to 1, during which no stage was seen at work."""
    waits = [s for s in measured.spans if s.stage == WAIT]
    works = [s for s in measured.spans if s.stage in STAGES]
    idle_s = _covered_s([*waits, *works]) - _covered_s(works)
    return idle_s / (_covered_s(waits) or 1)


def _covered_s(spans: Sequence[Span]) -> float:
    """Seconds during which at least one of the spans was going on."""
    covered_s, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        covered_s += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return covered_s
