"""`HedgedSource`: asks a source a second time for a record whose read is late.

Most reads of a bucket take 50 ms, and one in a thousand takes seconds. A second request for the
same record is then answered long before the first ("backup requests", "hedged requests"). If all
reads are slow, more of them would only slow down the source. So only few reads are repeated.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, as_completed
from typing import Any

from grain_shard.errors import ShardingError
from grain_shard.sources.daemon_threads import DaemonThreads

# The usual time is an estimate of the 95th percentile of read times, without a list of them. A
# longer read raises it by a tenth, a shorter one lowers it by a 19th of that, so it settles where
# one read in twenty is longer.
_UP = 1.1
_DOWN = _UP ** (-1 / 19)
# A read that takes this many times the usual time is late.
_MANY_TIMES = 3
# Shorter reads are never late: a thread may wait this long for a processor or the interpreter lock.
_LEAST_S = 10e-3
# The share of all reads that may be repeated, and how many in a row.
_SHARE, _IN_A_ROW = 0.05, 8
_BATCHED_READS = "_getitems", "__getitems__"
# A pipeline reads with at most 128 threads; the rest are for second requests.
_THREADS = DaemonThreads("grain-shard-hedge", 256)
# Guards the times and counts of all sources. A fork takes the lock first; otherwise the copy in the
# child could stay locked for ever.
_LOCK = threading.Lock()
os.register_at_fork(
    before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_LOCK.release
)


class HedgedSource:
    """A random-access source that is asked a second time if a read is late.

    The first answer counts. An error counts only if the other request has failed, too. Every
    attribute, except items and batched reads, is the wrapped source's attribute, including the
    class. So a pipeline, its states and its errors are the same with and without this wrapper.

    A read is late if it has taken 10 ms, and three times as long as the 95th percentile of reads.
    At most one read in twenty is repeated.

    Example:
        >>> source = HedgedSource(range(100, 200))
        >>> source, len(source), source[17]
        (HedgedSource(range(100, 200)), 100, 117)

    Args:
        source: Has a length and items; several threads may ask for items at once. Its ``_getitems``
            or ``__getitems__``, if present, is hedged as well.

    Attributes:
        answered: Number of requests that were answered. A copy in another process counts anew.
        asked_again: Number of reads that were repeated.

    Raises:
        ShardingError: The source has no length or no items.
    """

    def __init__(self, source: Any):
        self._source = source
        can = hasattr(source, "__len__") and hasattr(source, "__getitem__")
        if not can or isinstance(source, type):
            raise ShardingError(
                f"a {type(source).__name__} has no records by index to ask for a second time.",
                remedy="pass a source with __len__ and __getitem__, below grain.MapDataset.source.",
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
        # As in `weakref.proxy`: Grain looks at the class for batched reads and for a name.
        return type(self._source)

    def __reduce__(self) -> Any:
        return HedgedSource, (self._source,)

    def __repr__(self) -> str:
        return f"HedgedSource({self._source!r})"

    def _ask(self, *read: Any) -> Any:
        """Calls a function, perhaps again if the call is late; returns the first answer."""
        first = _THREADS.call_at_once(self._timed, *read)
        if first is None:
            return read[0](*read[1:])
        while not first.done():
            with contextlib.suppress(TimeoutError):
                first.exception(max(_LEAST_S, _MANY_TIMES * self._usual_s))
                break
            if (second := self._repeated(read)) is not None:
                for answer in as_completed((first, second)):
                    if answer.exception() is None:
                        return answer.result()
        return first.result()

    def _repeated(self, read: Any) -> Future[Any] | None:
        """Makes a second request for a late read, if there may be one."""
        with _LOCK:
            if self._allowance < 1:
                return None
            second = _THREADS.call_at_once(self._timed, *read)
            if second is not None:
                self._allowance -= 1
                self.asked_again += 1
            return second

    def _timed(self, read: Callable[..., Any], *args: Any) -> Any:
        """Reads, and learns from the time that it took."""
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
