"""What the stages of a pipeline spend their time on, as they say themselves.

A stage wraps its work in ``with span("read")``. That names it in JAX's profiler, and records it
where somebody listens; otherwise it costs some microseconds. A loop that is measured does so, too:
it waits for a batch, and then it is in the step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import jax

STAGES = READ, BATCH, PAD, PLACE = "read", "batch", "pad", "place"
LOOP = WAIT, STEP = "wait", "step"


class Span(NamedTuple):
    """What one stage, or the loop, did for one batch; times by `time.perf_counter`, in seconds."""

    stage: str
    thread: str
    start: float
    end: float


_listeners: list[list[Span]] = []


@contextmanager
def span(stage: str) -> Iterator[None]:
    """Marks the work of a stage. What runs in a worker process is recorded there, for nobody."""
    with jax.profiler.TraceAnnotation(f"grain_shard.{stage}"):
        start = time.perf_counter()
        yield
        if _listeners:
            end = time.perf_counter()
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
