"""Which stage a training loop waits for, and what to change.

A stage holds the loop up if it takes more of the time than the loop needs for its own work. Batches
are in the making unless all threads that make them rest, since the buffer is full. How many threads
these are plays no part in it: they come and go, and where the interpreter's lock lets one of them
work at a time, the others stand still with or without something to do. If the loop waits and no
stage holds it up, then either batches differ much in what they take, and the buffers are too small
to even that out, or the time goes into something that is not seen.

Whether threads that are at work compute or wait, their processor time tells. One processor's worth
of it is the most that Python code can use in one process.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

from grain_shard.iteration.sharded_dataset import Settings
from grain_shard.spans import BATCH, MAP, PAD, PLACE, READ, STAGES, STEP, WAIT, Span
from grain_shard.tools.measuring.measurement import Measurement, covered_s

_MAKING = READ, BATCH, PAD  # one after the other, by the threads that make a host's batches

_LITTLE_WAIT = 0.1  # of the loop's time: no change to the pipeline could gain more than that
_BUSY = 0.5  # of the time: with less, a stage mostly waits for something itself
_MOST = 0.5  # of the waiting, or of a stage's time
_LITTLE_REST = 0.1  # of the time: if the buffer is full for no longer, a larger one is no use
_FEW = 0.25  # of the batches: if so few make up most of the waiting, batches come unevenly
# With more processors busy than this, the threads compute. With fewer they wait.
_COMPUTES = 0.5
# With less of the threads' time on processors they surely don't wait for one.
_SURELY_WAITS = 0.05
# With more processors busy than this, the work leaves the interpreter's lock: threads compute side
# by side.
_ONE_AT_A_TIME = 1.2
# Batches that tell something. With fewer, and most of those asked for missing, what is seen is how
# the pipeline begins and ends.
_ENOUGH = 10
_FUNCTIONS = "your functions"


class Bottleneck(NamedTuple):
    """What holds the loop up, why one can tell, and what to change."""

    name: str
    reason: str
    advice: tuple[str, ...]


def find_bottleneck(measured: Measurement) -> Bottleneck:
    """What holds the loop up, with the advice that fits the pipeline."""
    pipeline = measured.pipeline or Settings()
    if measured.num_batches < min(_ENOUGH, measured.num_batches_asked / 2):
        return Bottleneck(
            "unseen",
            f"the dataset ended after {measured.num_batches} of the {measured.num_batches_asked}"
            " batches that were to be measured, which is too few to tell.",
            ("put .repeat() before .batch, and profile again.",),
        )
    waits = f"the loop waits {measured.busy(WAIT):.0%} of the time"
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
        return _making(busiest, measured, pipeline)
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
    making = f"batches are in the making only {_making_share(measured):.0%} of it"
    few, least_s = _longest_waits(measured)
    if few > _FEW * measured.num_batches:
        return Bottleneck(
            "unseen",
            f"{waits}, and {making}, but the loop waits for most batches alike: this is no stage's"
            " time, nor that of a few slow batches.",
            (
                "profile more batches, while nothing else needs the processors.",
                "look for Python code beside the pipeline, in the step or in other threads: the"
                " threads that make batches can't run meanwhile.",
            ),
        )
    return Bottleneck(
        "buffer",
        f"{waits}, and {making}: half of the waiting is for {few} of {measured.num_batches} batches"
        f", {least_s * 1e3:,.1f} ms or more for each, and too few others wait in the buffers.",
        (
            f"raise cpu_buffer_size ({pipeline.cpu_buffer_size} now) to cover a slow batch.",
            "or make the slow batches faster: the picture shows which they are.",
        ),
    )


def _making(stage: str, measured: Measurement, pipeline: Settings) -> Bottleneck:
    """The threads that make batches hold the loop up, mostly in one of their stages."""
    doing = {READ: "reading and decoding records", BATCH: "stacking records", PAD: "padding"}
    cores = _making_cores(measured)
    computes = cores >= _COMPUTES
    who = _who(stage, measured, computes)
    what = _what_computes(who, measured) if computes else _what_waits(who, measured)
    return Bottleneck(
        stage,
        f"batches are in the making {_making_share(measured):.0%} of the time, by"
        f" {measured.side_by_side(*_MAKING):.1f} threads on average, mostly {doing[stage]}, which"
        f" keeps {cores:.2g} processors busy: {what}",
        (
            *_faster_making(stage, pipeline),
            *(_faster_computing(stage, pipeline) if computes else ()),
            *(() if computes or stage != READ else _faster_waiting(who, measured, pipeline)),
        ),
    )


def _who(stage: str, measured: Measurement, computes: bool) -> str:
    """What of a stage takes its time, as far as that can be told."""
    if stage != READ:
        return "this"
    if not any(s.part == MAP for s in measured.spans):
        return f"the source, or {_FUNCTIONS},"
    reads = [s for s in measured.spans if s.stage == READ]
    seconds = [s.processor_s if computes else s.end - s.start for s in reads]
    mapped_s = sum(s for read, s in zip(reads, seconds, strict=True) if read.part == MAP)
    return _FUNCTIONS if mapped_s > _MOST * sum(seconds) else "the source"


def _does(who: str, verb: str) -> str:
    return f"{who} {verb}" if _FUNCTIONS in who else f"{who} {verb}s"


def _what_computes(who: str, measured: Measurement) -> str:
    """What keeps the processors busy, and how fast that can be at best."""
    computes = _does(who, "compute")
    best = f"about {measured.num_examples / measured.processor_s(*_MAKING):,.0f} examples a second"
    if _making_cores(measured) > _ONE_AT_A_TIME:
        return f"{computes}: {best} for each processor."
    return (
        f"{computes}: {best} at best if that is Python code, which runs one thread at a time,"
        " whatever the buffers."
    )


def _what_waits(who: str, measured: Measurement) -> str:
    """What the threads wait for that are at work and need no processor."""
    waits = _does(who, "wait")
    if _surely_waits(measured):
        return f"{waits}."
    return f"{waits}, or would compute if other processes did not use the processors."


def _faster_making(stage: str, pipeline: Settings) -> tuple[str, ...]:
    """Advice on one of the stages that make a batch, whether they compute or wait."""
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
    return tuple(advice)


def _faster_computing(stage: str, pipeline: Settings) -> tuple[str, ...]:
    """Advice where the threads that make batches compute."""
    advice = []
    if not pipeline.is_stream and not pipeline.num_workers:
        advice.append(
            "pass num_workers, as far as there are idle processor cores: processes compute side by"
            " side, and threads do where the work leaves Python's lock."
        )
    if stage == READ:
        advice.append(
            "make the decoding cheaper, or move work into the step, where it is done for a whole"
            " batch at once."
        )
    return tuple(advice)


def _faster_waiting(who: str, measured: Measurement, pipeline: Settings) -> tuple[str, ...]:
    """Advice where reads wait: have more of them side by side."""
    if pipeline.is_stream or pipeline.num_workers:
        return ()
    full = covered_s(_rests(measured)) / measured.seconds
    if full >= _LITTLE_REST:
        waiting = (
            f"if this waits for files or a network, raise cpu_buffer_size"
            f" ({pipeline.cpu_buffer_size} now), so that more is read side by side: for {full:.0%}"
            " of the time there was no room to begin another batch."
        )
    elif who == _FUNCTIONS:
        waiting = (
            "if they wait for files or a network, leave num_threads out, so that the number of them"
            " side by side is found, or have them ask for less. Larger buffers would not help."
        )
    else:
        waiting = (
            "if this waits for files or a network, leave num_threads out, so that the number of"
            " reads side by side is found, or give the source a _getitems that asks for many"
            " records at once. Larger buffers would not help."
        )
    if _surely_waits(measured):
        return (waiting,)
    return waiting, "if it computes, pass num_workers, or profile while the machine is idle."


def _making_share(measured: Measurement) -> float:
    """The part of the time, 0 to 1, during which batches were in the making.

    At other times none could be begun for want of room, and none was still being worked on.
    """
    made = [s for s in measured.spans if s.stage in _MAKING]
    if not made:
        return 0.0
    either_s = covered_s([*made, *_rests(measured)])
    return 1 - (either_s - covered_s(made)) / measured.seconds


def _rests(measured: Measurement) -> list[Span]:
    """When a thread that makes batches could begin none, as the buffer was full."""
    threads = {s.thread for s in measured.spans if s.stage in _MAKING}
    return [s for s in measured.rests if s.thread in threads]


def _surely_waits(measured: Measurement) -> bool:
    """Whether the threads that make batches wait, and surely not for a processor."""
    return measured.processor_s(*_MAKING) < _SURELY_WAITS * measured.total_s(*_MAKING)


def _making_cores(measured: Measurement) -> float:
    """How many processors the threads that make batches kept busy, on average."""
    return measured.processor_s(*_MAKING) / measured.seconds


def _busiest(measured: Measurement) -> str | None:
    """The stage that takes longer for a batch than the loop's own work; None if none does.

    Of stages that share their threads, the longest; where they compute, by processor time, since
    those that wait for the interpreter's lock may do so in any stage.
    """
    placing, making = measured.busy(PLACE), _making_share(measured)
    if max(placing, making) < max(_BUSY, 1 - measured.busy(WAIT)):
        return None
    computes = _making_cores(measured) >= _COMPUTES
    seconds = measured.processor_s if computes else measured.total_s
    return PLACE if placing > making else max(_MAKING, key=seconds)


def _idle_share(measured: Measurement) -> float:
    """The part of the waiting, 0 to 1, during which no stage was seen at work."""
    waits = [s for s in measured.spans if s.stage == WAIT]
    works = [s for s in measured.spans if s.stage in STAGES]
    idle_s = covered_s([*waits, *works]) - covered_s(works)
    return idle_s / (covered_s(waits) or 1)


def _longest_waits(measured: Measurement) -> tuple[int, float]:
    """How many batches make up half of the waiting, the fewest; and for how long each, at least."""
    waits_s = sorted((s.end - s.start for s in measured.spans if s.stage == WAIT), reverse=True)
    sums = itertools.accumulate(waits_s)
    few = next(count for count, s in enumerate(sums, 1) if s >= _MOST * sum(waits_s))
    return few, waits_s[few - 1]
