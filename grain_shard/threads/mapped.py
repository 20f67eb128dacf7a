"""`mapped`: applies a function to the items of a producer, in background threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

from grain_shard.errors import Raised
from grain_shard.threads.pool import End, Pool, Task, Tasks
from grain_shard.threads.producer import Items, Producer

S = TypeVar("S")
T = TypeVar("T")


def mapped(
    work: Callable[[S], T],
    source: Producer[S],
    *,
    size: int,
    num_threads: int = 1,
    name: str,
    on_wait: Callable[[float], None] | None = None,
) -> Pool[T]:
    """Applies a function to the items of a producer, in background threads, and keeps their order.

    Args:
        work: The function. If `num_threads` is above 1, several threads call it at the same time.
        source: The producer of the items. One thread at a time asks it for an item, once there is
            room for a result. It is stopped together with the threads. The last thread that ends
            closes it, because then no other thread uses it.
        size: The maximum number of results that wait or are unfinished.
        num_threads: Number of threads that work side by side.
        name: Prefix of the names of the threads.
        on_wait: See `Pool`.
    """
    tasks = _Calls(work, source)
    return Pool(tasks, size, name=name, num_threads=min(num_threads, size), on_wait=on_wait)


class _Calls(Tasks[T], Generic[S, T]):
    """The tasks of `mapped`: each calls the function for one item of the producer."""

    # A class attribute, because the names of this module may be gone at the interpreter's exit.
    _no_source = Items(iter(()))

    def __init__(self, work: Callable[[S], T], source: Producer[S]):
        self._source, self._drawn = source, 0
        self._work: Callable[[S], T] = work

    def draw(self, limit: int) -> Task[T] | None:
        if self._drawn >= limit:
            return None
        number, self._drawn = self._drawn, self._drawn + 1
        try:
            return _Call(number, self._work, next(self._source))
        except StopIteration:
            # A new StopIteration, because the traceback of the caught one would keep the frames of
            # the source in memory.
            return End(number, Raised(StopIteration(), None))
        except BaseException as error:
            return End(number, Raised(error, error.__traceback__))

    def stop(self) -> None:
        self._source.stop()

    def close(self) -> None:
        # Also drops the reference to the source: a Grain iterator that is still alive when the
        # interpreter clears its modules fails in its __del__.
        source, self._source, self._work = self._source, self._no_source, self._ended
        source.close()

    @staticmethod
    def _ended(item: Any) -> NoReturn:
        raise AssertionError("no item comes after close")


class _Call(Generic[S, T]):
    """The call of a function for one item."""

    size = 1

    def __init__(self, number: int, work: Callable[[S], T], item: S):
        self._number, self._work, self._item = number, work, item

    def run(self) -> list[tuple[int, T | Raised]]:
        try:
            result: T | Raised = self._work(self._item)
        except BaseException as error:
            result = Raised.of(error)
        return [(self._number, result)]
