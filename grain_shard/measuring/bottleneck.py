"""Which stage a training loop waits for, and what to change: two tables of rules.

A stage holds the loop up if its threads need longer for a batch than the loop does for its own
work: no buffer could help then. If the loop waits and no stage does, then either batches differ
much in what they take, and the buffers are too small to even that out, or the time goes into
something that is not seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
    """The first rule that holds, with the advice that fits the pipeline."""
    rule = next(rule for rule in _RULES if rule.holds(measured))
    pipeline = measured.pipeline or Settings()
    advice = [text for name, fits, text in _ADVICE if name == rule.name and fits(pipeline)]
    lanes = (PLACE,) if rule.name == PLACE else _MAKING
    values = {
        **dataclasses.asdict(pipeline),
        "wait": f"{measured.busy(WAIT):.0%}",
        "idle": f"{_idle_share(measured):.0%}",
        "busy": f"{measured.busy(*lanes):.0%}",
        "threads": measured.threads(*_MAKING),
    }
    reason, *texts = [text.format(**values) for text in (rule.reason, *advice)]
    return Bottleneck(rule.name, reason, tuple(texts))


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


class _Rule(NamedTuple):
    name: str
    holds: Callable[[Measurement], bool]
    reason: str


# The first that holds is the verdict.
_RULES = (
    _Rule(
        STEP,
        lambda m: m.busy(WAIT) < _LITTLE_WAIT and m.total_s(STEP) > 0,
        "the loop waits {wait} of the time; the pipeline keeps up with the step.",
    ),
    _Rule(
        PLACE,
        lambda m: _busiest(m) == PLACE,
        "the thread that hands batches to the devices is {busy} busy.",
    ),
    _Rule(
        READ,
        lambda m: _busiest(m) == READ,
        "the threads that make batches (seen: {threads}) are {busy} busy, mostly reading and"
        " decoding records.",
    ),
    _Rule(
        BATCH,
        lambda m: _busiest(m) == BATCH,
        "the threads that make batches (seen: {threads}) are {busy} busy, mostly stacking records.",
    ),
    _Rule(
        PAD,
        lambda m: _busiest(m) == PAD,
        "the threads that make batches (seen: {threads}) are {busy} busy, mostly padding.",
    ),
    _Rule(
        "workers",
        lambda m: m.pipeline is not None and m.pipeline.num_workers > 0,
        "the loop waits {wait} of the time, no thread of this process holds it up, and batches are"
        " made in worker processes (num_workers={num_workers}), which are not seen from here.",
    ),
    _Rule(
        "unseen",
        lambda m: not m.total_s(READ),
        "the loop waits {wait} of the time, and nothing tells when batches are read.",
    ),
    _Rule(
        "handover",
        lambda m: _idle_share(m) >= _MOST,
        "during {idle} of the waiting no stage was at work: batches were ready, and something"
        " after them was not.",
    ),
    _Rule(
        "buffer",
        lambda m: True,
        "the loop waits {wait} of the time, and yet the threads that make batches are only {busy}"
        " busy: some batches take much longer than others, and too few wait in the buffers.",
    ),
)

_MORE_THREADS = (
    "raise num_threads (and cpu_buffer_size to at least as much) if this waits for files or a"
    " network; pass num_workers if it computes in Python, which runs one thread at a time."
)
_ONE_THREAD = (
    "one thread reads a stream: give it (more) workers by .mp_prefetch before .shard_to, or keep a"
    " MapDataset down to .batch."
)


def _always(p: Settings) -> bool:
    return True


def _is_stream(p: Settings) -> bool:
    return p.is_stream


def _in_threads(p: Settings) -> bool:
    return not p.is_stream and not p.num_workers


# For each bottleneck: whether a piece of advice fits the pipeline, and what it says.
_ADVICE: tuple[tuple[str, Callable[[Settings], bool], str], ...] = (
    (STEP, _always, "look for time in the step; no change to the pipeline makes the loop faster."),
    ("workers", _always, "raise num_workers, as far as there are idle processor cores."),
    ("workers", _always, "profile once with num_workers=0 to see which stage takes the time."),
    ("handover", _always, "move a .map that follows .shard_to before .batch, or into the step."),
    ("handover", lambda p: p.reads_once, 'compare with read="needed": devices exchange rows now.'),
    ("handover", _always, "send less to the devices: uint8 images, made floats inside the step."),
    ("handover", _always, "make the step bigger, by a larger global batch, if it is very short."),
    ("unseen", _always, "end the pipeline with .shard_to(mesh), whose stages tell their times."),
    (PLACE, _always, "send less to the devices: uint8 images, made floats inside the step."),
    (PLACE, _always, "have fewer and larger leaves: each one costs a call for every device."),
    (PLACE, _always, "make the step bigger, by a larger global batch, if batches are small."),
    (
        READ,
        lambda p: p.reads_other_rows,
        "move the .map (or the batch_fn) that stands at or after .batch before it: this host makes"
        " whole batches now, to keep some of their rows.",
    ),
    (
        READ,
        lambda p: p.amplification > 1 and not p.is_stream,
        'pass read="once": the hosts read every row {amplification:.3g} times now.',
    ),
    (READ, _in_threads, _MORE_THREADS),
    (READ, _is_stream, _ONE_THREAD),
    (BATCH, _always, "make records smaller before .batch: crop, or keep uint8 until the step."),
    (BATCH, _in_threads, _MORE_THREADS),
    (PAD, _always, "choose a global batch that the shards divide: then only the last is padded."),
    (PAD, _in_threads, _MORE_THREADS),
    ("buffer", _always, "raise cpu_buffer_size ({cpu_buffer_size} now) to cover a slow batch."),
    ("buffer", _always, "or make the slow batches faster: the picture shows which they are."),
)


def _covered_s(spans: Sequence[Span]) -> float:
    """Seconds during which at least one of the spans was going on."""
    covered_s, reached = 0.0, float("-inf")
    for span in sorted(spans, key=lambda s: s.start):
        covered_s += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    return covered_s
