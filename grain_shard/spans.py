"""What the stages of a pipeline spend their time on, as they say themselves.

A stage wraps its work in ``with span("read")``. That names it in JAX's profiler, counts it for the
iterator that it works for, and records it where somebody listens; that takes some microseconds. A
loop that is measured does so, too: it waits for a batch, and then it is in the step.
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
# Told by `ShardedIterator.stats` alone. The first is a part of "read": what the user's functions
# take, where that can be told apart. In the second a stage waits for what other hosts say.
MAP, AGREE = "map", "agree"


class Span(NamedTuple):
    """What one stage, or the loop, did for one batch; times by `time.perf_counter`, in seconds."""

    stage: str
    thread: str
    start: float
    end: float


class Counter(Protocol):
    """What adds up the time that the stages of one iterator spend."""

    def add(self, stage: str, seconds: float) -> None:
        """A stage has worked for so long, in the calling thread."""
        ...


_listeners: list[list[Span]] = []
_counter: ContextVar[Counter | None] = ContextVar("grain_shard_counter", default=None)


def counter() -> Counter | None:
    """What counts the spans of the calling thread."""
    return _counter.get()


@contextmanager
def counted_by(counter: Counter | None) -> Iterator[None]:
    """Has a counter count the spans of the calling thread.

    So it does with the spans of the background threads of stages that are made meanwhile.
    """
    token = _counter.set(counter)
    try:
        yield
    finally:
        _counter.reset(token)


@contextmanager
def span(stage: str, *, part: str | None = None) -> Iterator[None]:
    """Marks the work of a stage. What runs in a worker process is recorded there, for nobody.

    Args:
        stage: Which.
        part: Which part of its work this is, if that is counted by itself, too.
    """
    with jax.profiler.TraceAnnotation(f"grain_shard.{stage}"):
        start = time.perf_counter()
        yield
        end = time.perf_counter()
        if (counter := _counter.get()) is not None:
            counter.add(stage, end - start)
            if part is not None:
                counter.add(part, end - start)
        if _listeners:
            done = Span(stage, threading.current_thread().name, start, end)
            for listener in _listeners:
                listener.append(done)


@contextmanager
def recorded() -> Iterator[list[Span]]:
    """The spans of all pipelines of this process, as long as the context lasts."""
    spans: list[Span] = []
    _listeners.append(spans)
    try:
        yield spans
    finally:
        _listeners.remove(spans)
