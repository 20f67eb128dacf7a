"""`HedgedSource`: asks a source a second time for a record whose read is late.

Most reads of a bucket take 50 ms, and one in a thousand takes seconds. A second request for
such a record is usually answered long before the first request. This is known as "backup requests"
or "hedged requests". If all reads are slow, more requests would only slow down the source. So only
few reads are repeated.
"""

from __future__ import annotations

import functools
import operator
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import grain

from grain_shard.errors import ShardingError
from grain_shard.sources.daemon_threads import Call, DaemonThreads

# The usual time of a read is an estimate of the 95th percentile of read times, made without a list
# of times. A read that takes longer raises the estimate by a tenth. A shorter read lowers it a
# little, and 19 shorter reads undo one longer read. So the estimate settles once one read in
# twenty takes longer.
_UP = 1.1
_DOWN = _UP ** (-1 / 19)
# A read that takes this many times the usual time is late.
_MANY_TIMES = 3
# A read is never late before this time, in seconds, because a thread may wait this long for a
# processor or for the interpreter lock.
_LEAST_S = 10e-3
# The share of all reads that may be repeated, and the most reads that may be repeated in a row.
_SHARE, _IN_A_ROW = 0.05, 8
_BATCHED_READS = "_getitems", "__getitems__"
# A pipeline reads with at most 128 threads. Each of them waits for one first request, and for at
# most one second request. A request takes one of these 256 threads.
_THREADS = DaemonThreads("grain-shard-hedge", 256)
# Guards the times and counts of every `HedgedSource`. The thread that forks holds the lock during
# the fork. If another thread held it, the lock would stay locked in the child for ever. The lock is
# an RLock, because a signal's handler may fork in a thread that holds it.
_LOCK = threading.RLock()
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


class HedgedSource:
    """A wrapper of a random-access source, which asks the source again if a read is late.

    The first answer counts. If a second request was made, an error counts only if both requests
    fail. All attributes that are not listed here are attributes of the wrapped source, even the
    class. So a pipeline, its states and its errors are the same with and without this wrapper.

    A read is late once it has taken 10 ms, and three times the 95th percentile of read times. At
    most one read in twenty is repeated.

    Example:
        >>> source = HedgedSource(range(100, 200))
        >>> source, len(source), source[17]
        (HedgedSource(range(100, 200)), 100, 117)

    Args:
        source: A source with ``__len__`` and ``__getitem__``, which several threads may call at the
            same time. If it has ``_getitems`` or ``__getitems__``, late calls of these methods
            are repeated as well.

    Attributes:
        answered: Number of requests that were answered in this process.
        asked_again: Number of reads that were repeated in this process.

    Raises:
        ShardingError: The source has no length or no items, or is a dataset of Grain.
    """

    def __init__(self, source: Any):
        self._source = source
        can = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        if not can or isinstance(source, type | grain.MapDataset):
            raise ShardingError(
                f"HedgedSource got a {type(source).__name__}, which is no source of records by"
                " index.",
                remedy="pass HedgedSource a source with __len__ and __getitem__, and pass the"
                " result to grain.MapDataset.source.",
            )
        self.answered = self.asked_again = 0
        self._usual_s = self._allowance = 0.0

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: Any) -> Any:
        return self._ask(operator.getitem, self._source, index)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name not in _BATCHED_READS:
            raise AttributeError(name)
        found = getattr(self._source, name)
        return functools.partial(self._ask, found) if name in _BATCHED_READS else found

    @property
    def __class__(self) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        # Grain looks at the class of a source for its name and for batched reads. So the wrapper
        # has the class of the wrapped source, like a `weakref.proxy`.
        return type(self._source)

    def __reduce__(self) -> Any:
        return type(self), (self._source,)

    def __repr__(self) -> str:
        return f"HedgedSource({self._source!r})"

    def _ask(self, *read: Any) -> Any:
        """Makes a request to the source, and a second one if the first is late.

        Args:
            *read: A function, and its arguments.

        Returns:
            The answer that comes first. If no request succeeds, the error of the first request is
            raised.
        """
        first = _THREADS.call(self._timed, *read)
        if first is None:
            return read[0](*read[1:])
        requests = [first]
        while True:
            is_late = not first.wait(max(_LEAST_S, _MANY_TIMES * self._usual_s))
            if is_late and len(requests) == 1 and (second := self._repeated(first, read)):
                requests.append(second)
            done = [request for request in requests if request.is_done]
            answered = [request for request in done if request.error is None]
            if answered or len(done) == len(requests):
                return (answered or requests)[0].result()

    def _repeated(self, first: Call, read: Any) -> Call | None:
        """Makes a second request for a late read.

        Args:
            first: The first request.
            read: The function that reads, and its arguments.

        Returns:
            The second request; None if too many reads were repeated, or no thread is free.
        """
        with _LOCK:
            if self._allowance < 1:
                return None
            self._allowance -= 1
        second = _THREADS.call(self._timed, *read, beside=first)
        with _LOCK:
            if second is None:
                self._allowance += 1
            else:
                self.asked_again += 1
        return second

    def _timed(self, read: Callable[..., Any], *args: Any) -> Any:
        """Makes a request, and updates the usual time of a read; returns the answer."""
        start = time.perf_counter()
        result = read(*args)
        seconds = max(time.perf_counter() - start, 1e-9)  # a coarse clock may measure no time
        with _LOCK:
            if not self.answered:
                self._usual_s = seconds
            self._usual_s *= _UP if seconds > self._usual_s else _DOWN
            self._allowance = min(_IN_A_ROW, self._allowance + _SHARE)
            self.answered += 1
        return result
