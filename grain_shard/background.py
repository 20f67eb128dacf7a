"""The background stage: threads that work ahead, a bounded buffer, and a clean life.

Batches come down a line of producers: the source at the top, the training loop at the bottom. Each
`Producer` is asked for its next item by the one below it, and can be told to end by that one. A
`Background` is the producer that works ahead of whoever asks it.

Grain's own background stage can hang on a BaseException, blocks in ``close`` for as long as its
source does, and can abort the interpreter at exit; hence this one. What it promises:

* Results come in the order of the tickets, whichever thread is first.
* At most `buffer_size` results exist at a time, those in the making included.
* What the work raises, of any class, reaches the consumer; from then on ``next`` keeps raising it.
* Nothing outlives its consumer: ``close``, garbage collection and the end of the interpreter stop
  the threads. One that is inside the user's code ends when that code returns.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Generic, NamedTuple, NoReturn, TypeVar

import jax

S = TypeVar("S")
T = TypeVar("T")

# How long close() and the interpreter's exit wait for a thread that is inside the user's code.
_JOIN_TIMEOUT_S = 5.0
# How often a waiting consumer looks up.
_WAKE_S = 1.0


class Producer(Iterator[T]):
    """Something that makes items one after the other, and that whoever asks it can end."""

    @abstractmethod
    def __next__(self) -> T:
        """The next item. One thread asks at a time."""

    @property
    def room_wanted(self) -> int:
        """How many items there should be room for, in the buffer below, before one is drawn."""
        return 1

    def draw(self, room: int) -> T:
        """The next item, for a buffer that has room for so many.

        A producer that reads for several items at once reads no more than there is room for.
        """
        return next(self)

    def stop(self) -> None:
        """Asks this and what stands above it to end, from any thread, and waits for nobody.

        A ``next`` that waits for something returns, or raises, soon afterwards.
        """

    def close(self) -> None:
        """Ends what this has at work above it, and waits for that."""


class Items(Producer[T]):
    """An ordinary iterator as a producer. It has nothing at work that would have to be ended."""

    def __init__(self, iterator: Iterator[T]):
        self._iterator = iterator

    def __next__(self) -> T:
        return next(self._iterator)


class Background(Producer[T], Generic[S, T]):
    """Maps `work` over what another producer makes, in background threads, in order.

    The threads start with the first ``next``, in the JAX context (mesh, x64) of the thread that
    made this object.

    Args:
        work: Called with each item, by several threads at once if there are several.
        source: Where the items come from. It is asked by one thread at a time, once there is room
            for a result, and is stopped with this stage. The last thread to end closes it, since
            nobody else can know that it is not in use any more.
        buffer_size: Results that may wait or be in the making.
        num_threads: Threads that work side by side.
        name: Of the threads.
    """

    def __init__(
        self,
        work: Callable[[S], T],
        source: Producer[S],
        *,
        buffer_size: int,
        num_threads: int = 1,
        name: str,
    ):
        # The threads refer to what is shared and not to this object, which can thus be collected.
        self._shared = _Shared(work, source, buffer_size)
        enter_context = jax_context()
        self._shared.threads = [
            threading.Thread(
                target=_run, args=(self._shared, enter_context), name=f"{name}-{i}", daemon=True
            )
            for i in range(min(num_threads, buffer_size))
        ]

    def __next__(self) -> T:
        self.start()
        return self._shared.take()

    def ready(self) -> int:
        """How many results can be taken without waiting; waits until there is one.

        Returns:
            At least 1; or 0 if there will be no more.

        Raises:
            BaseException: What ``next`` would raise, other than StopIteration.
        """
        self.start()
        return self._shared.ready()

    def start(self) -> None:
        """Starts working ahead; a second call does nothing."""
        self._shared.start()

    def stop(self) -> None:
        """Tells the threads to end, without waiting. From then on ``next`` ends at once."""
        self._shared.stop()

    def close(self) -> None:
        """Stops, and waits until the threads have ended, or some seconds for the user's code."""
        self._shared.stop()
        self._shared.join()

    def __del__(self):
        if (shared := getattr(self, "_shared", None)) is not None:  # __init__ may have failed
            shared.stop()


def jax_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """The calling thread's JAX context (mesh, x64), to be entered in another thread."""
    mesh, x64 = jax.sharding.get_mesh(), jax.config.jax_enable_x64  # pyright: ignore

    @contextlib.contextmanager
    def enter():
        with jax.enable_x64(x64), contextlib.ExitStack() as stack:
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            yield

    return enter


class _Raised(NamedTuple):
    """What stands in the place of a result when there is none."""

    error: BaseException
    traceback: TracebackType | None

    def throw(self) -> NoReturn:
        if isinstance(self.error, StopIteration):
            raise StopIteration
        # The same object every time; without this its traceback would grow with each raise.
        raise self.error.with_traceback(self.traceback)


class _Shared(Generic[S, T]):
    """What the threads and the consumer share, all of it under one lock."""

    # Of the class, since at the interpreter's exit the names of this module may be gone.
    _no_source = Items(iter(()))

    def __init__(self, work: Callable[[S], T], source: Producer[S], buffer_size: int):
        self.threads: list[threading.Thread] = []
        self._work, self._source, self._buffer_size = work, source, buffer_size
        # Reentrant: the garbage collector may run __del__, so stop(), in a thread that holds it.
        self._lock = threading.RLock()
        # Two conditions, since who waits for the one must not be woken for the other.
        # Signalled when the next result is there, be it an error, and when the stage is stopped.
        self._result_came = threading.Condition(self._lock)
        # Signalled when there is room for one more result, and when none will be made any more.
        self._room_came = threading.Condition(self._lock)
        self._one_asks = threading.Lock()  # held while an item is drawn, which may take long
        self._results: dict[int, T | _Raised] = {}
        self._drawn = 0  # items drawn so far; each carries its number
        self._taken = 0  # results handed out
        self._running = 0
        self._started = self._stopped = False
        self._drained = False  # no item will be drawn any more
        self._final: _Raised | None = None

    def start(self) -> None:
        with self._lock:
            if self._started or self._stopped:
                return
            self._started, self._running = True, len(self.threads)
        # At exit the threads must be gone before JAX and Python take apart what they use. Hooks
        # run last in, first out, and those of JAX have stood since it was imported.
        atexit.register(self._at_exit)
        for thread in self.threads:
            thread.start()

    def take(self) -> T:
        with self._lock:
            self._wait_for_next()
            if self._final is not None:
                self._final.throw()
            result = self._results.pop(self._taken)
            if isinstance(result, _Raised):
                self._final = result
                result.throw()
            self._taken += 1
            self._room_came.notify()  # who holds _one_asks: nobody else waits for it
            return result

    def ready(self) -> int:
        with self._lock:
            try:
                self._wait_for_next()
                final = self._final or self._results[self._taken]
                if isinstance(final, _Raised):
                    final.throw()
            except StopIteration:
                return 0
            numbers = itertools.count(self._taken)
            return sum(1 for _ in itertools.takewhile(self._is_there, numbers))

    def _wait_for_next(self) -> None:
        """Waits until the next result is there, or nothing more will come.

        Raises:
            StopIteration: The stage was stopped.
            RuntimeError: This is a forked process, which has none of the threads.
        """
        while self._final is None and self._taken not in self._results:
            if self._stopped:
                raise StopIteration
            # Not for ever: a KeyboardInterrupt just before the wait wakes nobody.
            woken = self._result_came.wait(_WAKE_S)
            gone = not any(thread.is_alive() for thread in self.threads)
            if gone and not woken and self._taken not in self._results and not self._stopped:
                raise RuntimeError(
                    "the background threads are gone, as they are in a process made by os.fork();"
                    " make the iterator in the process that uses it."
                )

    def _is_there(self, number: int) -> bool:
        return number in self._results and not isinstance(self._results[number], _Raised)

    def stop(self) -> None:
        with self._lock:
            first, self._stopped = not self._stopped, True
            self._results.clear()
            self._result_came.notify_all()
            self._room_came.notify()
        if first:
            self._source.stop()
        if first and not self._started:
            self._close_source()

    def join(self) -> None:
        # Of a stage that never began nothing is alive; it may be collected at the interpreter's
        # exit, when the modules that this file imports are gone.
        alive = [t for t in self.threads if t.is_alive() and t is not threading.current_thread()]
        if alive:
            deadline = time.monotonic() + _JOIN_TIMEOUT_S
            for thread in alive:
                thread.join(max(0.0, deadline - time.monotonic()))

    def step(self) -> bool:
        """Makes one result; False when there is nothing left to do.

        A function of its own so that no variable keeps a batch alive while the thread waits.
        """
        with self._one_asks:
            with self._lock:
                wanted = self._source.room_wanted
                while not self._over() and self._room() < wanted:
                    self._room_came.wait()
                if self._over():
                    return False
                number, room = self._drawn, self._room()
                self._drawn += 1
            try:
                item = self._source.draw(room)
            except StopIteration:
                # Not the one that was caught: its traceback keeps the frames of the source alive.
                self._deliver(number, _Raised(StopIteration(), None))
                return False
            except BaseException as error:
                self._deliver(number, _Raised(error, error.__traceback__))
                return False
        try:
            result = self._work(item)
        except StopIteration as error:
            result = _Raised(RuntimeError("the pipeline raised StopIteration"), None)
            result.error.__cause__ = error
        except BaseException as error:
            result = _Raised(error, error.__traceback__)
        self._deliver(number, result)
        return True

    def thread_ended(self) -> None:
        with self._lock:
            self._running -= 1
            last = self._running == 0
        if last:
            atexit.unregister(self._at_exit)
            self._close_source()

    def _room(self) -> int:
        return self._buffer_size - (self._drawn - self._taken)

    def _over(self) -> bool:
        return self._stopped or self._drained

    def _deliver(self, number: int, result: T | _Raised) -> None:
        with self._lock:
            if isinstance(result, _Raised):
                self._drained = True
                self._room_came.notify()
            if not self._stopped:
                self._results[number] = result
            if number == self._taken:
                self._result_came.notify_all()

    def _close_source(self) -> None:
        # Let go of it, too: what is still there when the interpreter takes its modules apart (an
        # iterator of Grain's, say, in a global variable's reach) fails in its __del__.
        source, self._source = self._source, self._no_source
        source.close()

    def _at_exit(self) -> None:
        self.stop()
        self.join()


def _run(
    shared: _Shared, enter_context: Callable[[], contextlib.AbstractContextManager[None]]
) -> None:
    try:
        with enter_context():
            while shared.step():
                pass
    finally:
        shared.thread_ended()
