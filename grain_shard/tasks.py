"""Tasks of a pipeline stage, and their results.

Batches pass a chain of producers, from the source at the top to the training loop at the bottom.
Each `Producer` is asked for its next item, and told to end, by the producer below it. The threads
of a stage that works ahead (`background.py`) draw `Task`s and run them. A task makes one result, or
contributes to several.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Any, Generic, NamedTuple, NoReturn, TypeVar

from absl import logging

T = TypeVar("T")


class Producer(Iterator[T]):
    """An object that makes items one after the other, and that its consumer can end."""

    @abstractmethod
    def __next__(self) -> T:
        """Returns the next item. Only one thread calls this at a time."""

    def stop(self) -> None:
        """Asks this producer and those above it to end, from any thread, without waiting.

        A ``next`` that is waiting returns, or raises, soon afterwards.
        """

    def close(self) -> None:
        """Ends the threads and processes above this producer, and waits for them."""


class Results(Producer[T]):
    """A producer that keeps its next item until it is told that the consumer has it.

    So a consumer that is interrupted on the way gets the same item again.
    """

    @property
    @abstractmethod
    def taken(self) -> int:
        """Number of items that the consumer has got."""

    @abstractmethod
    def peek(self) -> T:
        """Waits for the next item and returns it, but does not take it as ``next`` does."""

    @abstractmethod
    def release(self, taken: int) -> None:
        """Forgets the items that the consumer has got; a second call does no harm.

        Args:
            taken: Their number, from the first one on.
        """

    def __next__(self) -> T:
        item = self.peek()
        self.release(self.taken + 1)
        return item


class Items(Producer[T]):
    """An ordinary iterator as a producer. It has no threads or processes to end."""

    def __init__(self, iterator: Iterator[T]):
        self._iterator = iterator

    def __next__(self) -> T:
        return next(self._iterator)


class Raised(NamedTuple):
    """An error, or the end, delivered in place of a result."""

    error: BaseException
    traceback: TracebackType | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Wraps the error that the work has just raised."""
        if isinstance(error, StopIteration):  # only the end of the tasks may end the stage
            wrapped = RuntimeError(
                "the pipeline raised StopIteration, which looks like the end of the data\n"
                "  remedy: give each next(...) in the source, in a .map or in make_feed a default,"
                " such as next(items, None)."
            )
            wrapped.__cause__ = error
            for note in getattr(error, "__notes__", ()):  # notes that name the record
                wrapped.add_note(note)
            return cls(wrapped, None)
        return cls(error, error.__traceback__)

    def throw(self) -> NoReturn:
        """Raises the same exception object every time."""
        if isinstance(self.error, StopIteration):
            raise StopIteration
        # Otherwise the traceback would grow with each raise.
        raise self.error.with_traceback(self.traceback)


class Known(NamedTuple):
    """Results of a stage that are known by now.

    Attributes:
        results: Number of results that are ready or were taken already.
        end: The error that follows these results, or StopIteration if they end; None if unknown.
    """

    results: int
    end: BaseException | None


class Task(ABC, Generic[T]):
    """A unit of work for one thread.

    Attributes:
        begins: Number of results that this task is the first to work on. Results are numbered in
            this order.
        size: Size of the work, in the unit in which the stage's pace is measured.
    """

    begins: int = 1
    size: int = 1

    @abstractmethod
    def run(self) -> Iterable[tuple[int, T | Raised]]:
        """Runs the task; yields the number and value of each result that it completes."""


class Tasks(ABC, Generic[T]):
    """The work of a stage's threads. One thread at a time calls the methods, except `stop`."""

    @property
    def room_wanted(self) -> int:
        """Room, in new results, that should be free before the next task is drawn.

        Larger than the buffer if no task can be drawn before another one is done.
        """
        return 1

    @abstractmethod
    def draw(self, room: int) -> Task[T]:
        """Returns the next task, which begins at most `room` results.

        Raises:
            StopIteration: No task is left, and all results have been begun.
        """

    def done(self, task: Any) -> bool:
        """Records that a task is done; True if a task may now be drawn that could not be before.

        Called by any thread.
        """
        return False

    @abstractmethod
    def end(self) -> None:
        """Records that a task failed, so that no more results begin. Called by any thread."""

    def stop(self) -> None:
        """Ends any wait inside ``draw``, from any thread, without waiting itself."""

    def close(self) -> None:
        """Releases the tasks. Called once, when no thread draws any more."""


@contextlib.contextmanager
def naming_closed(what: str) -> Iterator[None]:
    """Adds a note to an error that names the object that was being closed."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"grain_shard: while closing {what}")
        raise


def log_unclosed(error: BaseException) -> None:
    """Logs an error of closing that cannot be raised to the user."""
    logging.error("grain_shard: closing a part of the pipeline failed", exc_info=error)
