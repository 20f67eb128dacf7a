"""Spans: the only events from which times are counted, marked by each stage itself.

A stage wraps its work in ``with span("read")``. The span names the work in JAX's profiler, adds its
time to the counter of the stage's iterator, and is recorded if a recording is active. A span costs
some microseconds. A measured training loop marks its own time, too: the wait for a batch, then the
step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import NamedTuple, Protocol

import jax

STAGES = READ, BATCH, PAD, PLACE = "read", "batch", "pad", "place"
LOOP = WAIT, STEP = "wait", "step"
# Reported by `ShardedIterator.stats` only. MAP is the part of "read" that the user's functions
# take, if it can be measured apart. AGREE is a stage's wait for the votes of other hosts.
MAP, AGREE = "map", "agree"
# The wait of a stage's threads for room in a full buffer.
ROOM = "room"
# The part of "read" that is the wait for a task of an executor, and the task's time at a worker.
TASK, WORK = "task", "work"


class Span(NamedTuple):
    """The work of one stage, or of the loop, for one batch; times by `time.perf_counter`, seconds.

    Attributes:
        stage: The stage's name.
        thread: Name of the thread that did the work.
        start: Start of the work.
        end: End of the work.
        processor_s: Seconds of that time in which a processor was busy with the work. The rest is
            waiting: for a source, for the interpreter's lock, or for a processor.
        part: The part of the stage's work, if it is counted separately.
    """

    stage: str
    thread: str
    start: float
    end: float
    processor_s: float = 0.0
    part: str | None = None


class Counter(Protocol):
    """A sum, by stage, of the time that the stages of one iterator spend."""

    def tally(self) -> dict[str, float]:
        """Returns seconds by stage, to which only the calling thread adds."""
        ...


_listeners: list[list[Span]] = []
# The calling thread's counter, and the thread's own tally in that counter.
_counting: ContextVar[tuple[Counter, dict[str, float]] | None] = ContextVar(
    "grain_shard_counting", default=None
)


def counter() -> Counter | None:
    """Returns the counter of the calling thread's spans."""
    counting = _counting.get()
    return None if counting is None else counting[0]


@contextmanager
def counted_by(counter: Counter | None) -> Iterator[None]:
    """Makes a counter count the spans of the calling thread.

    The counter also counts the background threads of stages that are made inside the context.
    """
    token = _counting.set(None if counter is None else (counter, counter.tally()))
    try:
        yield
    finally:
        _counting.reset(token)


class span:  # used as a function; written as a generator it would take half as long again
    """Marks the work of a stage. Spans inside a worker process do not reach this process.

    Args:
        stage: The stage's name.
        part: The part of the stage's work, if it is also counted separately.
    """

    __slots__ = ("_annotation", "_part", "_processor_start", "_stage", "_start")

    def __init__(self, stage: str, *, part: str | None = None):
        self._stage, self._part = stage, part

    def __enter__(self) -> None:
        self._annotation = jax.profiler.TraceAnnotation(f"grain_shard.{self._stage}")
        self._annotation.__enter__()
        self._processor_start = time.thread_time() if _listeners else None
        self._start = time.perf_counter()

    def __exit__(self, error: type[BaseException] | None, *exc_info: object) -> None:
        start, end = self._start, time.perf_counter()
        self._annotation.__exit__(error, *exc_info)
        if error is not None:
            return
        if (counting := _counting.get()) is not None:
            tally = counting[1]
            tally[self._stage] = tally.get(self._stage, 0.0) + end - start
            if self._part is not None:
                tally[self._part] = tally.get(self._part, 0.0) + end - start
        if _listeners and self._processor_start is not None:
            processor_s = time.thread_time() - self._processor_start
            thread = threading.current_thread().name
            record(Span(self._stage, thread, start, end, processor_s, self._part))


def record(done: Span) -> None:
    """Adds a span to the active recordings: one of this process, or one that a worker measured."""
    for listener in _listeners:
        listener.append(done)


@contextmanager
def recorded() -> Iterator[list[Span]]:
    """Records the spans of all this process's pipelines that begin and end within the context."""
    spans: list[Span] = []
    _listeners.append(spans)
    try:
        yield spans
    finally:
        _listeners.remove(spans)
