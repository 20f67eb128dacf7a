"""`HedgedSource`: asks a source a second time for a record that comes late.

Most reads of a bucket take 50 ms, and one in a thousand takes seconds. A second request for the
same record is answered long before the first then ("backup requests", "hedged requests"). Where all
reads are slow, more of them would only make them slower. So a read beside others is late only if
one that began after it has been answered, and few are asked for again.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any

from grain_shard.errors import ShardingError

# The usual time is one that nineteen reads of twenty stay below. It is followed without a list of
# them: a longer read raises it by a tenth, a shorter one lowers it by a 19th of that, so that it
# rests where one read in twenty is longer.
_UP = 1.1
_DOWN = _UP ** (-1 / 19)
# A read that takes this many times the usual time is late.
_MANY_TIMES = 3
# No read is late before. A thread may wait this long for a processor, or the interpreter's lock.
_LEAST_S = 10e-3
# Reads whose threads compute for a larger share of the time are slow by what they compute.
_COMPUTES = 0.1
# The share of all reads that may be asked for again, and how many in a row.
_SHARE, _IN_A_ROW = 0.05, 8
# Threads of one source. A pipeline reads with at most 128; the others are for second requests.
_MOST_THREADS = 256
_BATCHED_READS = "_getitems", "__getitems__"

# Receives the answer of a request: a result and None, or None and an error.
_Answers = SimpleQueue[tuple[Any, BaseException | None]]


class HedgedSource:
    """A random-access source that is asked a second time for what comes late.

    The first answer counts. An error counts if the other request has failed, too. Every attribute
    but items and batched reads is that of the wrapped source, its class included, so that a
    pipeline, its states and its errors are the same with this source and without it.

    A read is asked for again once it has taken 10 ms, and three times as long as all but the
    slowest twentieth of reads, if it is alone or a later one has been answered. At most one read in
    twenty is.

    Example:
        >>> source = HedgedSource(range(100, 200))
        >>> source, len(source), source[17]
        (HedgedSource(range(100, 200)), 100, 117)

    Args:
        source: Has a length and items, which several threads may ask for at once. Its ``_getitems``
            or ``__getitems__``, if it has one, is hedged as well. In another process, the copy of
            this source has threads of its own.

    Raises:
        ShardingError: It has no length or no items.
    """

    def __init__(self, source: Any):
        self._source = source
        if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
            raise ShardingError(
                f"a {type(source).__name__} has no records by index to ask for a second time.",
                remedy="pass a source with __len__ and __getitem__, below grain.MapDataset.source.",
            )
        self._requests = self._new_requests()

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        return self._ask(functools.partial(operator.getitem, self._source, index))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _BATCHED_READS:
            raise AttributeError(name)
        found = getattr(self._source, name)
        return functools.partial(self._ask_many, found) if name in _BATCHED_READS else found

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # As of a `weakref.proxy`. Grain looks at the class for batched reads and for a name.
        return type(self._source)

    def __reduce__(self) -> Any:
        return HedgedSource, (self._source,)

    def __repr__(self) -> str:
        return f"HedgedSource({self._source!r})"

    @property
    def answered(self) -> int:
        """Requests of this process that were answered."""
        return self._of_this_process().lateness.answered

    @property
    def asked_again(self) -> int:
        """Reads of this process that were asked for a second time."""
        return self._of_this_process().lateness.asked_again

    def close(self) -> None:
        """Ends the threads, each when its read returns, and begins to count and to learn anew.

        They also end when nothing refers to the source. A later read starts others.
        """
        self._requests.end()
        self._requests = self._new_requests()

    def _of_this_process(self) -> _Requests:
        if self._requests.process != os.getpid():  # a fork has none of the threads
            self._requests = self._new_requests()
        return self._requests

    def _new_requests(self) -> _Requests:
        requests = _Requests()
        # Not at exit. Pipelines that have not ended yet would wait for answers of no thread.
        weakref.finalize(self, requests.end).atexit = False
        return requests

    def _ask_many(self, read: Callable[[Sequence[int]], Any], indices: Sequence[int]) -> Any:
        return self._ask(functools.partial(read, indices))

    def _ask(self, read: Callable[[], Any]) -> Any:
        requests, answers = self._of_this_process(), _Answers()
        start = time.perf_counter()
        if not requests.begin(read, answers):
            return read()  # all threads are inside reads
        asked, patience_s = 1, requests.lateness.patience_s
        while True:
            try:
                result, error = answers.get(timeout=patience_s)
            except Empty:
                if requests.begin_again(read, answers, start):
                    asked, patience_s = 2, None
                continue
            asked -= 1
            try:
                if error is None:
                    return result
                if not asked:
                    raise error
            finally:
                del error  # its traceback refers to this frame


class _Requests:
    """The requests of one source in one process, and the threads that make them.

    The threads refer to this object and not to the source, which can thus be collected.
    """

    def __init__(self):
        self.process = os.getpid()
        self.lateness = Lateness()
        self._lock = threading.RLock()
        self._tasks = SimpleQueue[tuple[Callable[[], Any], _Answers] | None]()
        self._threads = self._busy = 0

    def begin(self, read: Callable[[], Any], answers: _Answers) -> bool:
        """Has a thread read, if one is free or can be started."""
        with self._lock:
            if self._busy == self._threads:
                if self._threads == _MOST_THREADS:
                    return False
                threading.Thread(target=self._run, name="grain-shard-hedge", daemon=True).start()
                self._threads += 1
            self._busy += 1
            self._tasks.put((read, answers))
            return True

    def begin_again(self, read: Callable[[], Any], answers: _Answers, start: float) -> bool:
        """Has another thread read the same, if the read that began at `start` is late."""
        with self._lock:
            alone = self._busy == 1  # as in a worker process, which reads one record at a time
            late = self.lateness.is_late(start, time.perf_counter(), alone=alone)
            if not late or not answers.empty() or not self.begin(read, answers):
                return False
            self.lateness.asks_again()
            return True

    def end(self) -> None:
        """Ends the threads, each when its read returns. Takes no lock, as it is called anywhere."""
        for _ in range(self._threads):
            self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            read, answers = task
            start, processor_start = time.perf_counter(), time.thread_time()
            try:
                answer = read(), None
            except BaseException as error:
                answer = None, error
            with self._lock:
                self._busy -= 1
                if answer[1] is None:
                    processor_s = time.thread_time() - processor_start
                    self.lateness.took(start, time.perf_counter(), processor_s)
                answers.put(answer)
            del task, read, answers, answer  # the next task may come late, or never


class Lateness:
    """Learns from the reads that were answered. Times are in seconds, by `time.perf_counter`.

    Attributes:
        answered: Reads that were answered.
        asked_again: Reads that were asked for a second time.
    """

    def __init__(self):
        self.answered = self.asked_again = 0
        self._usual_s = 0.0
        self._computing = 0.0  # the share of the latest reads for which their threads computed
        self._last_start = 0.0  # the latest start of a read that was answered
        self._allowance = 0.0

    def took(self, start: float, end: float, processor_s: float) -> None:
        """A read was answered, for which its thread used a processor for some seconds."""
        seconds = max(end - start, 1e-9)  # a clock with large steps may not have moved at all
        if not self.answered:
            self._usual_s = seconds
        self._usual_s *= _UP if seconds > self._usual_s else _DOWN
        self._computing += (processor_s / seconds - self._computing) / (20 if self.answered else 1)
        self._last_start = max(self._last_start, start)
        self._allowance = min(_IN_A_ROW, self._allowance + _SHARE)
        self.answered += 1

    @property
    def patience_s(self) -> float:
        """The seconds after which a read is late."""
        return max(_LEAST_S, _MANY_TIMES * self._usual_s)

    def is_late(self, start: float, now: float, *, alone: bool = False) -> bool:
        """Returns whether to ask again for a read.

        Args:
            start: The time at which it began.
            now: The time.
            alone: Whether no other read is under way, which could show that the source answers.
        """
        return (
            now - start >= self.patience_s
            and (alone or start < self._last_start)
            and self._computing <= _COMPUTES
            and self._allowance >= 1
        )

    def asks_again(self) -> None:
        """A read is asked for again."""
        self._allowance -= 1
        self.asked_again += 1
