"""`Results`: puts the numbered results of a pool's tasks in order."""

from __future__ import annotations

import sys
from typing import Generic, NamedTuple, TypeVar

from grain_shard.errors import Raised

T = TypeVar("T")


class Known(NamedTuple):
    """The results that are ready by now.

    Attributes:
        results: Number of results that are ready or were taken, from the first one without a gap.
        end: The error that follows these results, or StopIteration if no more results follow. None
            if neither is known yet.
    """

    results: int
    end: BaseException | None


class Results(Generic[T]):
    """Results, numbered from 0, which come in any order and are taken in order.

    An error ends the results. It comes after the results with lower numbers, and results with
    higher numbers are dropped. The end of the results is an error, too: StopIteration.

    One thread at a time may call a method. `taken`, `end` and `known` may be read at any time.

    Args:
        size: The maximum number of results that wait or are unfinished.

    Attributes:
        taken: Number of results that were taken.
        end: The error after the results that are ready; None until all of them are there.
    """

    def __init__(self, size: int):
        self._size, self.taken = size, 0
        self.end: Raised | None = None
        self._waiting: dict[int, T | Raised] = {}  # results that were not taken yet, by number
        self._ready = 0  # number of results before the first missing one, taken ones included
        self._failed = sys.maxsize  # number of the first error so far

    @property
    def is_next_here(self) -> bool:
        """True if the next result, or the error in its place, is here."""
        return self.taken < self._ready or self.end is not None

    def put(self, number: int, result: T | Raised) -> bool:
        """Adds a result or its error. If a result gets several errors, the first one counts.

        Returns:
            True if more results are ready now, or the end is known.
        """
        if self.end is not None or number < self._ready:
            return False
        if isinstance(self._waiting.setdefault(number, result), Raised):
            self._failed = min(self._failed, number)
        before = self._ready
        while self.end is None and self._ready in self._waiting:
            if isinstance(found := self._waiting[self._ready], Raised):
                self.end = found
            else:
                self._ready += 1
        return self._ready > before or self.end is not None

    def put_end(self, error: Raised) -> None:
        """Puts an error after the results that are ready now, unless they have an end already."""
        self.end = self.end or error

    def take(self) -> T:
        """Returns the next result.

        Raises:
            BaseException: The error in place of the result, or StopIteration.
        """
        if self.taken >= self._ready and self.end is not None:
            self.end.throw()
        result = self._waiting.pop(self.taken)
        self.taken += 1
        return result  # pyright: ignore[reportReturnType] (no error is before `_ready`)

    @property
    def limit(self) -> int:
        """The number of the first result that may not begin now."""
        return min(self.taken + self._size, self._failed)

    def known(self) -> Known:
        """Returns the number of results that are ready, and the error or end that follows them."""
        end, ready = self.end, self._ready  # in this order: once there is an end, `_ready` is final
        return Known(ready, None if end is None else end.error)

    def drop(self) -> None:
        """Forgets the results that were not taken."""
        self._waiting.clear()
