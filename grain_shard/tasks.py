"""What a stage of the pipeline is given to do, and what comes of it.

Batches come down a line of producers: the source at the top, the training loop at the bottom. Each
`Producer` is asked for its next item by the one below it, and can be told to end by that one. The
threads of a stage that works ahead (`background.py`) draw `Task`s and run them; a task may make one
result or only contribute to some.
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
    """Something that makes items one after the other, and that whoever asks it can end."""

    @abstractmethod
    def __next__(self) -> T:
        """The next item. One thread asks at a time."""

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


class Raised(NamedTuple):
    """What is delivered instead of a result when there is none: an error, or the end."""

    error: BaseException
    traceback: TracebackType | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """The error that the work has just raised."""
        if isinstance(error, StopIteration):  # only the end of the tasks may end the stage
            wrapped = RuntimeError("the pipeline raised StopIteration")
            wrapped.__cause__ = error
            return cls(wrapped, None)
        return cls(error, error.__traceback__)

    def throw(self) -> NoReturn:
        """Raises the same object every time."""
        if isinstance(self.error, StopIteration):
            raise StopIteration
        # Without this its traceback would grow with each raise.
        raise self.error.with_traceback(self.traceback)


class Known(NamedTuple):
    """What can be told of the results of a stage by now.

    Attributes:
        results: How many there are that can be taken without waiting, with those that were taken.
        end: What comes after them, if it is known: an error, StopIteration where they end.
    """

    results: int
    end: BaseException | None


class Task(ABC, Generic[T]):
    """Something for one thread to do.

    Attributes:
        begins: How many results it is the first to work on. Results are numbered in this order.
        size: How much it is, in the unit in which the stage's pace is measured.
    """

    begins: int = 1
    size: int = 1

    @abstractmethod
    def run(self) -> Iterable[tuple[int, T | Raised]]:
        """Does it; gives the number of each result that is complete with it, and the result."""


class Tasks(ABC, Generic[T]):
    """What the threads of a stage have to do. All but `stop` is called by one thread at a time."""

    @property
    def room_wanted(self) -> int:
        """For how many new results there should be room before the next task is drawn.

        More than there can be, if none can be drawn before another is done.
        """
        return 1

    @abstractmethod
    def draw(self, room: int) -> Task[T]:
        """The next task, which begins no more than `room` results.

        Raises:
            StopIteration: There is none, and all results have been begun.
        """

    def done(self, task: Any) -> bool:
        """A thread has done a task; whether there may be something to draw now that was not before.

        Called by any thread.
        """
        return False

    @abstractmethod
    def end(self) -> None:
        """There has been an error: no more results are to be begun. Called by any thread."""

    def stop(self) -> None:
        """Asks whatever ``draw`` may be waiting for to end, from any thread, without waiting."""

    def close(self) -> None:
        """Called once, when no thread draws any more."""


@contextlib.contextmanager
def naming_closed(what: str) -> Iterator[None]:
    """Adds to an error what was being closed when it was raised."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"grain_shard: while closing {what}")
        raise


def log_unclosed(error: BaseException) -> None:
    """Tells of an error in closing something that cannot be raised where somebody sees it."""
    logging.error("grain_shard: something could not be closed", exc_info=error)
