"""`span`: measures the time of a piece of work. All times of a pipeline's stages come from spans.

A stage runs its work inside ``with span("read")``. The span names the work in JAX's profiler, and
adds its time to the counter of the iterator. While a recording is active, the span is recorded,
too. A span costs some microseconds. If a training loop is profiled, its own time is recorded as
spans, too: "wait" for a batch, and then "step".
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
# Only `ShardedIterator.stats` reports these two. MAP is the part of "read" that the user's
# functions take, if it can be measured separately. AGREE is the wait for votes of other hosts.
MAP, AGREE = "map", "agree"
# The wait of a stage's threads while the buffer of the stage is full.
ROOM = "room"
# TASK is the part of "read" in which a thread waits for a task of an executor. WORK is the time
# that a worker of the executor spends on the task.
TASK, WORK = "task", "work"


class Span(NamedTuple):
    """One piece of work of a stage or of the training loop.

    Attributes:
        stage: Name of the stage, or "wait" or "step" for the loop.
        thread: Name of the thread that did the work, or of the worker of an executor.
        start: Start of the work, in seconds, by `time.perf_counter`.
        end: End of the work, in seconds, by `time.perf_counter`.
        processor_s: Seconds of the work in which a processor was busy. In the other seconds the
            thread waited for a source, for the interpreter's lock or for a processor.
        part: Name of a part of the stage, such as "map", whose time is also counted separately;
            None if the work belongs to no such part.
    """

    stage: str
    thread: str
    start: float
    end: float
    processor_s: float = 0.0
    part: str | None = None


class Counter(Protocol):
    """Adds up the time of each stage of one iterator. `Meter` implements it."""

    def tally(self) -> dict[str, float]:
        """Returns a dict of the calling thread's seconds by stage, to which it alone may add."""
        ...


_listeners: list[list[Span]] = []  # the active recordings
# The calling thread's counter, and the thread's own tally in that counter.
_counting: ContextVar[tuple[Counter, dict[str, float]] | None] = ContextVar(
    "grain_shard_counting", default=None
)


def counter() -> Counter | None:
    """Returns the counter of the calling thread's spans; None if they are not counted."""
    counting = _counting.get()
    return None if counting is None else counting[0]


def count_apart() -> None:
    """Gives the calling thread its own tally of spans.

    A thread that runs in a copy of another thread's context calls this. Otherwise both threads
    would add to one tally.
    """
    if (found := counter()) is not None:
        _counting.set((found, found.tally()))


@contextmanager
def counted_by(counter: Counter | None) -> Iterator[None]:
    """Counts the spans of the calling thread inside the ``with`` block.

    The spans of background threads count, too, if their stage is made inside the block.

    Args:
        counter: The counter; None counts no spans.
    """
    token = _counting.set(None if counter is None else (counter, counter.tally()))
    try:
        yield
    finally:
        _counting.reset(token)


class span:  # a context manager; @contextmanager on a generator takes 1.5 times as long
    """Measures the work inside a ``with`` block as work of a stage.

    Work that raises an error is not counted. A span inside a worker process is not counted in the
    main process.

    Args:
        stage: Name of the stage.
        part: Name of a part of the stage, such as "map", whose time is also counted separately;
            None if the work belongs to no such part.
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
    """Adds a finished span, of this process or an executor's worker, to the active recordings."""
    for listener in _listeners:
        listener.append(done)


@contextmanager
def recorded() -> Iterator[list[Span]]:
    """Records the spans of all pipelines of this process.

    Yields:
        The list of spans that began and ended inside the ``with`` block so far.
    """
    spans: list[Span] = []
    _listeners.append(spans)
    try:
        yield spans
    finally:
        # `remove` could delete another recording, because lists with equal spans are equal.
        del _listeners[next(i for i, listener in enumerate(_listeners) if listener is spans)]
