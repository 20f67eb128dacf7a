"""`HedgedSource`: asks a source a second time for a record whose read is late.

Most reads of a bucket take 50 ms, and one in a thousand takes seconds. A second request for the
same record is then answered long before the first ("backup requests", "hedged requests"). If all
reads are slow, more of them would only slow down the source. So a read beside others is late only
if a read that began after it has been answered, and only few reads are repeated.
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

# The usual time is an estimate of the 95th percentile of read times, without a list of them. A
# longer read raises it by a tenth, a shorter one lowers it by a 19th of that, so it settles where
# one read in twenty is longer.
_UP = 1.1
_DOWN = _UP ** (-1 / 19)
# A read that takes this many times the usual time is late.
_MANY_TIMES = 3
# Shorter reads are never late: a thread may wait this long for a processor or the interpreter lock.
_LEAST_S = 10e-3
# If threads compute for a larger share of the time, computing and not the source is slow.
_COMPUTES = 0.1
# The share of all reads that may be repeated, and how many in a row.
_SHARE, _IN_A_ROW = 0.05, 8
# Threads of one source. A pipeline reads with at most 128; the rest are for second requests.
_MOST_THREADS = 256
_BATCHED_READS = "_getitems", "__getitems__"

# Receives the answer of a request: a result and None, or None and an error.
_Answers = SimpleQueue[tuple[Any, BaseException | None]]


class HedgedSource:
    """A random-access source that is asked a second time if a read is late.

    The first answer counts. An error counts only if the other request has failed, too. Every
    attribute, except items and batched reads, is the wrapped source's attribute, including the
    class. So a pipeline, its states and its errors are the same with and without this wrapper.

    A read is late if it has taken 10 ms, and three times as long as the 95th percentile of reads,
    while no other read is under way or a later one has been answered. At most one read in twenty is
    repeated.

    Example:
        >>> source = HedgedSource(range(100, 200))
        >>> source, len(source), source[17]
        (HedgedSource(range(100, 200)), 100, 117)

    Args:
        source: Has a length and items; several threads may ask for items at once. Its ``_getitems``
            or ``__getitems__``, if present, is hedged as well. In another process, the copy of this
            source has its own threads.

    Raises:
        ShardingError: The source has no length or no items.
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
        # As in `weakref.proxy`: Grain looks at the class for batched reads and for a name.
        return type(self._source)

    def __reduce__(self) -> Any:
        return HedgedSource, (self._source,)

    def __repr__(self) -> str:
        return f"HedgedSource({self._source!r})"

    @property
    def answered(self) -> int:
        """Number of requests in this process that were answered."""
        return self._of_this_process().lateness.answered

    @property
    def asked_again(self) -> int:
        """Number of reads in this process that were repeated."""
        return self._of_this_process().lateness.asked_again

    def close(self) -> None:
        """Ends the threads, each when its read returns, and resets the counts and the usual time.

        The threads also end when the source is garbage-collected. A later read starts new threads.
        """
        self._requests.end()
        self._requests = self._new_requests()

    def _of_this_process(self) -> _Requests:
        if self._requests.process != os.getpid():  # a forked process has no threads
            self._requests = self._new_requests()
        return self._requests

    def _new_requests(self) -> _Requests:
        requests = _Requests()
        # Not at exit: pipelines that have not ended yet would wait for answers that never come.
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
                del error  # its traceback keeps this frame alive


class _Requests:
    """The requests of one source in one process, and the threads that make them.

    The threads hold this object and not the source, so the source can be garbage-collected.
    """

    def __init__(self):
        self.process = os.getpid()
        self.lateness = Lateness()
        self._lock = threading.RLock()
        self._tasks = SimpleQueue[tuple[Callable[[], Any], _Answers] | None]()
        self._threads = self._busy = 0

    def begin(self, read: Callable[[], Any], answers: _Answers) -> bool:
        """Lets a thread read, if one is free or can be started; returns whether it does."""
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
        """Lets another thread repeat the read that began at `start`, if that read is late."""
        with self._lock:
            alone = self._busy == 1  # e.g. in a worker process, which reads one record at a time
            late = self.lateness.is_late(start, time.perf_counter(), alone=alone)
            if not late or not answers.empty() or not self.begin(read, answers):
                return False
            self.lateness.asks_again()
            return True

    def end(self) -> None:
        """Ends the threads, each when its read returns. Takes no lock: finalizers call it."""
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
            del task, read, answers, answer  # or they stay alive until the next task, maybe forever


class Lateness:
    """Learns the usual time of reads. Times are in seconds, by `time.perf_counter`.

    Attributes:
        answered: Reads that were answered.
        asked_again: Reads that were repeated.
    """

    def __init__(self):
        self.answered = self.asked_again = 0
        self._usual_s = 0.0
        self._computing = 0.0  # the share of the latest reads' time that their threads computed
        self._last_start = 0.0  # the latest start of an answered read
        self._allowance = 0.0

    def took(self, start: float, end: float, processor_s: float) -> None:
        """Records an answered read, and the processor time of its thread, in seconds."""
        seconds = max(end - start, 1e-9)  # a coarse clock may measure no time at all
        if not self.answered:
            self._usual_s = seconds
        self._usual_s *= _UP if seconds > self._usual_s else _DOWN
        self._computing += (processor_s / seconds - self._computing) / (20 if self.answered else 1)
        self._last_start = max(self._last_start, start)
        self._allowance = min(_IN_A_ROW, self._allowance + _SHARE)
        self.answered += 1

    @property
    def patience_s(self) -> float:
        """Seconds after which a read is late."""
        return max(_LEAST_S, _MANY_TIMES * self._usual_s)

    def is_late(self, start: float, now: float, *, alone: bool = False) -> bool:
        """Returns whether a read should be repeated.

        Args:
            start: The time at which the read began.
            now: The current time.
            alone: True if no other read is under way, so none can show that the source answers.
        """
        return (
            now - start >= self.patience_s
            and (alone or start < self._last_start)
            and self._computing <= _COMPUTES
            and self._allowance >= 1
        )

    def asks_again(self) -> None:
        """Records that a read is repeated."""
        self._allowance -= 1
        self.asked_again += 1
