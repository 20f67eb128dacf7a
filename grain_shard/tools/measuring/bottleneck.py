"""Finds the stage that a training loop waits for, and the changes that help.

A stage holds the loop up if it is busy for at least half of the time, and for at least the share of
the time that the loop needs for its own work. The threads that make batches count as busy, except
while the buffer is full and none of them works on a batch. Their number does not matter, because it
changes while the loop runs, and a thread may only be waiting for the interpreter's lock.

If the loop waits although no stage holds it up, there are two possible reasons. Either a few
batches take much longer than most, and the buffers are too small to even that out. Or the time goes
into code that is not measured.

The processor time of the threads shows whether they compute or wait. Python code in one process can
keep at most one processor busy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from grain_shard.spans import BATCH, MAP, PAD, PLACE, READ, STAGES, STEP, TASK, WAIT, WORK
from grain_shard.stats.counts import BUSY, MAKING, busiest
from grain_shard.tools.measuring.loop import covered_s
from grain_shard.tools.measuring.measurement import Measurement, PipelineFacts

# If the loop waits for less than this share of its time, the pipeline keeps up. No change to the
# pipeline could gain more than this share.
_LITTLE_WAIT = 0.1
# From this share on, something takes "most" of the waiting, or of a stage's time.
_MOST = 0.5
# If the buffer is full for less than this share of the time, a larger buffer would not help.
_OFTEN_FULL = 0.1
# If at most this share of the batches makes up half of the waiting, batches arrive unevenly.
_FEW = 0.25
# If the threads that make batches keep this many processors busy together, on average, they
# compute. With fewer they wait.
_COMPUTES = 0.5
# If threads compute for less than this share of their time, they do not wait for a processor.
_SURELY_WAITS = 0.05
# If threads keep more processors busy than this, their work releases the interpreter's lock, and
# several threads compute at the same time.
_ONE_AT_A_TIME = 1.2
# There is no verdict if the dataset ended before this many batches, and before half of the batches
# asked for: the loop then saw little more than the start and the end of the pipeline.
_ENOUGH = 10
_DOING = {READ: "reading and decoding records", BATCH: "stacking records", PAD: "padding"}
_FUNCTIONS = " in your functions"
_ASK_FOR_MANY = "give the source a _getitems that asks for many records at once"
_SEND_LESS = "send less to the devices: uint8 images, converted to floats inside the training step."


class Bottleneck(NamedTuple):
    """The verdict on a measured loop.

    Attributes:
        name: The stage that holds the loop up, or another word; `Profile.bottleneck` lists them.
        reason: The evidence, in words.
        advice: The changes that would make the loop faster, one text each.
    """

    name: str
    reason: str
    advice: tuple[str, ...]


def _verdict(name: str, reason: str, *advice: str) -> Bottleneck:
    return Bottleneck(name, reason, advice)


def find_bottleneck(measured: Measurement) -> Bottleneck:
    """Returns the stage that holds the loop up, with the advice that fits the pipeline."""
    pipeline = measured.pipeline or PipelineFacts()  # the defaults, for a foreign dataset
    if measured.num_batches < min(_ENOUGH, measured.num_batches_asked / 2):
        return _verdict(
            "unseen",
            f"the dataset ended after {measured.num_batches} of the {measured.num_batches_asked}"
            " batches to measure, too few to find the bottleneck.",
            "put .repeat() before .batch, and profile again.",
        )
    waits = f"the loop waits {measured.busy(WAIT):.0%} of the time"
    # Without a step there is only the pipeline, so its own slowest stage is the bottleneck.
    if measured.busy(WAIT) < _LITTLE_WAIT and STEP in measured.lanes_s:
        return _verdict(
            STEP,
            f"{waits}; the pipeline keeps up with the step.",
            "make the training step faster: no change to the pipeline makes the loop faster.",
        )
    stage = _busiest(measured)
    if stage == PLACE:
        return _verdict(
            PLACE,
            f"the thread that hands batches to the devices is {measured.busy(PLACE):.0%} busy.",
            _SEND_LESS,
            "merge leaves into fewer, larger ones: each leaf costs one call per device.",
            "use a larger global batch if batches are small.",
        )
    if stage is not None and pipeline.has_executor:
        return _tasks(measured, pipeline)
    if stage is not None:
        return _making(stage, measured, pipeline)
    return _no_stage(waits, measured, pipeline)


def _no_stage(waits: str, measured: Measurement, pipeline: PipelineFacts) -> Bottleneck:
    """Returns the verdict for a loop that waits although no stage holds it up.

    The reason begins with `waits`, the share of the time that the loop waits, in words.
    """
    if pipeline.num_workers:
        return _verdict(
            "workers",
            f"{waits}, but not for a thread of this process. Worker processes make the batches"
            f" (num_workers={pipeline.num_workers}), and the profile does not see their stages.",
            "raise num_workers, as long as processor cores are idle.",
            "profile once with num_workers=0 to see which stage takes the time.",
        )
    if READ not in measured.lanes_s:
        return _verdict(
            "unseen",
            f"{waits}, but the pipeline does not report when it reads batches.",
            "end the pipeline with .shard_to(mesh), whose stages report their times.",
        )
    idle = _idle_share(measured)
    if idle >= _MOST:  # batches were ready while the loop waited
        return _verdict(
            "handover",
            f"during {idle:.0%} of the waiting no stage was at work: batches were ready, but"
            " something after the pipeline was not.",
            "move a .map that follows .shard_to before .batch, or into the step.",
            _SEND_LESS,
            "use a larger global batch if the training step is very short.",
        )
    making = f"{waits}, and batches are in the making only {_making_share(measured):.0%} of it"
    # The `few` longest waits make up half of the waiting. The shortest of them is `least_s`.
    few, least_s = _longest_waits(measured)
    if few > _FEW * measured.num_batches:  # batches arrive evenly
        return _verdict(
            "unseen",
            f"{making}, but the loop waits about as long for most batches: neither a stage nor a"
            " few slow batches explain that.",
            "profile more batches, while nothing else needs the processors.",
            "look for Python code beside the pipeline, in the step or in other threads: while"
            " that code runs, the threads that make batches cannot run.",
        )
    return _verdict(
        "buffer",
        f"{making}: half of the waiting is for {few} of {measured.num_batches} batches"
        f", {least_s * 1e3:,.1f} ms or more for each, and the buffers hold too few ready batches.",
        f"raise cpu_buffer_size ({pipeline.cpu_buffer_size} now) to cover a slow batch.",
        "or make the slow batches faster: .plot() shows which batches are slow.",
    )


def _making(stage: str, measured: Measurement, pipeline: PipelineFacts) -> Bottleneck:
    """Returns the verdict for a loop that is held up by the threads that make batches.

    These threads spend most of their time in `stage`: "read", "batch" or "pad".
    """
    cores = _making_cores(measured)
    rate = measured.num_examples / (measured.processor_s(*MAKING) or 1)
    if cores > _ONE_AT_A_TIME:
        finding = f"compute: about {rate:,.0f} examples a second for each processor."
    elif cores >= _COMPUTES:
        finding = (
            f"compute: about {rate:,.0f} examples a second at best if that is Python code, of which"
            " one thread runs at a time. A larger buffer does not help."
        )
    elif _surely_waits(measured):
        finding = "wait."
    else:
        finding = "wait, or would compute if other processes did not use the processors."
    threads = measured.lane_s(*MAKING) / measured.seconds
    where = _where(measured) if stage == READ else ""
    return _verdict(
        stage,
        f"batches are in the making {_making_share(measured):.0%} of the time, by {threads:.1f}"
        f" threads on average, mostly {_DOING[stage]}{where}. They keep {cores:.2g} processors"
        f" busy, so they {finding}",
        *_advice(stage, where, measured, pipeline),
    )


def _tasks(measured: Measurement, pipeline: PipelineFacts) -> Bottleneck:
    """Returns the verdict for a loop that is held up by the tasks of an executor."""
    # A task takes from its submission to its result. Its work is the part at a worker.
    tasks = [s for s in measured.spans if s.part == TASK]
    works = [s for s in measured.spans if s.stage == WORK]
    task_s, work_s = (sum(s.end - s.start for s in spans) for spans in (tasks, works))
    workers = len({s.thread for s in works})
    size = pipeline.cpu_buffer_size  # the maximum number of tasks under way
    busy = work_s / max(1, workers) / measured.seconds
    task_ms, work_ms = 1e3 * task_s / max(1, len(tasks)), 1e3 * work_s / max(1, len(works))
    reason = (
        f"{task_s / measured.seconds:.1f} tasks are under way on average. A task takes"
        f" {task_ms:,.1f} ms: {work_ms:,.1f} ms at a worker, and {max(0, task_ms - work_ms):,.1f}"
        f" ms on the network and in a queue. The workers ({workers} seen) are {busy:.0%} busy."
    )
    # A worker works for `work_ms` of the `task_ms` that a task takes. So it always has work if
    # `task_ms / work_ms` tasks are under way for it.
    enough = math.ceil(workers * task_ms / (work_ms or 1))
    if busy >= _MOST and workers >= size:
        advice = [f"raise cpu_buffer_size ({size} now): more workers would have no task."]
    elif busy >= _MOST:  # the workers have enough tasks, and compute
        advice = [f"add workers, and raise cpu_buffer_size ({size} now) with them."]
    elif enough > size:
        advice = [
            f"raise cpu_buffer_size ({size} now) to {enough} or more: workers wait for tasks."
        ]
    else:  # workers wait, although enough tasks may be under way
        advice = [
            "check the network between the workers and this host: more workers would not help.",
            "let the workers send less: uint8 images, converted to floats inside the step.",
        ]
    return _verdict("executor", reason, *advice)


def _where(measured: Measurement) -> str:
    """Returns whether the source or the user's functions take most of the stage "read", in words.

    The words name both if their times are not measured separately.
    """
    reads = [s for s in measured.spans if s.stage == READ]
    if not any(s.part == MAP for s in reads):
        return " in the source, or in your functions"
    seconds = [s.processor_s if _computes(measured) else s.end - s.start for s in reads]
    mapped_s = sum(s for read, s in zip(reads, seconds, strict=True) if read.part == MAP)
    return _FUNCTIONS if mapped_s > _MOST * sum(seconds) else " in the source"


def _advice(
    stage: str, where: str, measured: Measurement, pipeline: PipelineFacts
) -> Iterator[str]:
    """Yields advice for a loop that is held up by the threads that make batches.

    These threads spend most of their time in `stage`, and there in the code that `where` names.
    """
    in_threads = not pipeline.is_stream and not pipeline.num_workers
    computes = _computes(measured)
    if stage == READ and pipeline.reads_other_rows:
        yield (
            "move the .map after .batch (or the work of its batch_fn) before .batch: this host now"
            " makes whole batches, and keeps only some rows of each."
        )
    if stage == READ and pipeline.amplification > 1 and not pipeline.is_stream:
        yield (
            f"make the mesh so that each host has all devices of a model axis: the hosts now read"
            f" every row {pipeline.amplification:.3g} times."
        )
    if stage == READ and pipeline.is_stream:
        yield (
            "add workers: for a stream by .mp_prefetch before .shard_to, for feeds by num_workers."
            " One thread runs all functions after .to_iter_dataset(), so call .map before it. Or"
            " keep the pipeline a MapDataset down to .batch."
        )
    if stage == BATCH:
        yield "make records smaller before .batch: crop, or keep uint8 until the step."
    if stage == PAD:
        yield "use a batch size that is divisible by the shards: then only the last is padded."
    if computes and in_threads:
        yield (
            "pass num_workers, as long as processor cores are idle: worker processes compute side"
            " by side, but threads do so only where the work releases Python's lock."
        )
    if computes and stage == READ:
        yield (
            "make the decoding cheaper, or move work into the training step, which computes a whole"
            " batch at once."
        )
    if not computes and stage == READ and in_threads:
        yield _more_side_by_side(where, measured, pipeline)
        if not _surely_waits(measured):
            yield "pass num_workers if they compute, or profile while the machine is idle."


def _more_side_by_side(where: str, measured: Measurement, pipeline: PipelineFacts) -> str:
    """Returns the advice for threads that wait: how more reads can run at the same time."""
    full_share = covered_s(measured.rests) / measured.seconds  # share of the time
    if full_share >= _OFTEN_FULL:
        return (
            f"raise cpu_buffer_size ({pipeline.cpu_buffer_size} now) if they wait for files or a"
            f" network, so that more is read side by side: for {full_share:.0%} of the time there"
            " was no room to begin another batch."
        )
    ask = "make fewer or smaller requests" if where == _FUNCTIONS else _ASK_FOR_MANY
    return (
        "if they wait for files or a network, leave num_threads out, so that the number of reads"
        f" side by side adapts. If num_threads is left out already, {ask}. Larger buffers would not"
        " help."
    )


def _making_share(measured: Measurement) -> float:
    """Returns the share of the time, 0 to 1, during which batches were being made.

    At all other times the buffer was full, and no thread worked on a batch. The result is 0 if no
    thread of this process makes batches.
    """
    made = [s for s in measured.spans if s.stage in MAKING]
    if not made:
        return 0.0
    either_s = covered_s([*made, *measured.rests])
    return 1 - (either_s - covered_s(made)) / measured.seconds


def _surely_waits(measured: Measurement) -> bool:
    """Returns True if the threads that make batches wait, and not only for a free processor.

    They compute for so little of their time that busy processors cannot be the reason.
    """
    return measured.processor_s(*MAKING) < _SURELY_WAITS * measured.lane_s(*MAKING)


def _making_cores(measured: Measurement) -> float:
    """Returns the average number of processors kept busy by the threads that make batches."""
    return measured.processor_s(*MAKING) / measured.seconds


def _computes(measured: Measurement) -> bool:
    """Returns True if the threads that make batches compute, and False if they wait."""
    return _making_cores(measured) >= _COMPUTES


def _busiest(measured: Measurement) -> str | None:
    """Returns the stage that holds the loop up; None if no stage does.

    Such a stage is busy for at least half of the time, and for at least the share of the time that
    the loop needs for its own work.

    Reading, stacking and padding share their threads. If these threads compute, the three stages
    are compared by processor time, because a thread may wait for the interpreter's lock in any of
    them. Otherwise they are compared by elapsed time.
    """
    placing, making = measured.busy(PLACE), _making_share(measured)
    stage_s = measured.processor_s if _computes(measured) else measured.lane_s
    return busiest(making, placing, stage_s, least=max(BUSY, 1 - measured.busy(WAIT)))


def _idle_share(measured: Measurement) -> float:
    """Returns the share of the loop's waiting, 0 to 1, during which no stage was at work."""
    waits = [s for s in measured.spans if s.stage == WAIT]
    works = [s for s in measured.spans if s.stage in STAGES]
    idle_s = covered_s([*waits, *works]) - covered_s(works)
    return idle_s / (covered_s(waits) or 1)


def _longest_waits(measured: Measurement) -> tuple[int, float]:
    """Returns how many of the longest waits make up half of the waiting, and the shortest of these.

    A wait is the loop's wait for one batch. The second value is in seconds.
    """
    waits_s = sorted((s.end - s.start for s in measured.spans if s.stage == WAIT), reverse=True)
    sums = itertools.accumulate(waits_s)
    few = next(count for count, s in enumerate(sums, 1) if s >= _MOST * sum(waits_s))
    return few, waits_s[few - 1]
