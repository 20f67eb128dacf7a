"""Spans: the only events from which times are counted.

A stage wraps its work in ``with span("read")``. The span names the work in JAX's profiler, is
counted for the stage's iterator, and is recorded if a profile listens. That takes some
microseconds. A measured loop has spans, too: it waits for a batch, and then it is in the step.
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
# Only `ShardedIterator.stats` shows these. The first is the part of "read" that the user's
# functions take, if it can be told apart. In the second a stage waits for the votes of other hosts.
MAP, AGREE = "map", "agree"
# The threads of a stage rest in this one: they may not begin another result, as the buffer is full.
ROOM = "room"


class Span(NamedTuple):
    """Work of one stage, or of the loop, for one batch; times by `time.perf_counter`, in seconds.

    Attributes:
        stage: The name of the stage.
        thread: The name of the thread that did it.
        start: Its beginning.
        end: Its end.
        processor_s: Seconds for which a processor was busy with it. In the other seconds it waited
            for a source, for the interpreter's lock, or for a processor.
        part: The part of the stage's work, if it can be told apart.
    """

    stage: str
    thread: str
    start: float
    end: float
    processor_s: float = 0.0
    part: str | None = None


class Counter(Protocol):
    """An account that adds up the spans of one iterator's stages."""

    def tally(self) -> dict[str, float]:
        """Returns the seconds by stage to which the calling thread, and no other, adds."""
        ...


_listeners: list[list[Span]] = []
# Each thread has its counter, and its tally there.
_counting: ContextVar[tuple[Counter, dict[str, float]] | None] = ContextVar(
    "grain_shard_counting", default=None
)


def counter() -> Counter | None:
    """Returns the account that counts the spans of the calling thread."""
    counting = _counting.get()
    return None if counting is None else counting[0]


@contextmanager
def counted_by(counter: Counter | None) -> Iterator[None]:
    """Has a counter count the spans of the calling thread.

    It also counts those of the background threads of stages that are made meanwhile.
    """
    token = _counting.set(None if counter is None else (counter, counter.tally()))
    try:
        yield
    finally:
        _counting.reset(token)


class span:  # used as a function; written as a generator it would take half as long again
    """Marks the work of a stage. Spans of a worker process stay there and are not counted.

    Args:
        stage: The name of the stage.
        part: The part of its work, if it is counted by itself, too.
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
            done = Span(self._stage, thread, start, end, processor_s, self._part)
            for listener in _listeners:
                listener.append(done)


@contextmanager
def recorded() -> Iterator[list[Span]]:
    """Lists the spans of all pipelines of this process that begin and end within the context."""
    spans: list[Span] = []
    _listeners.append(spans)
    try:
        yield spans
    finally:
        _listeners.remove(spans)
