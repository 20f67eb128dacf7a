"""The producers of a pipeline, and the tasks that background threads run.

Batches pass a chain of producers, from the source at the top to the training loop at the bottom. A
`Producer` is asked for its next item, and told to end, by the producer below it. The threads of a
crew (`crew.py`) draw `Task`s and run them. A task makes one result, or a part of one or several
results.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from types import TracebackType
from typing import NamedTuple, NoReturn, Protocol, TypeVar

from grain_shard.errors import notes_of

T = TypeVar("T")


class Producer(Iterator[T]):
    """An iterator over items that its consumer can stop and close."""

    @abstractmethod
    def __next__(self) -> T:
        """Returns the next item. Only one thread calls this at a time."""

    def stop(self) -> None:
        """Tells this producer, and the producers above it, to end. It does not wait for them.

        Any thread may call this. A ``next`` that waits in another thread soon returns or raises.
        """

    def close(self) -> None:
        """Ends the threads and processes of this producer, and of the producers above it.

        This waits until they have ended.
        """


class Items(Producer[T]):
    """An ordinary iterator as a producer. It has no threads or processes to end."""

    def __init__(self, iterator: Iterator[T]):
        self._iterator = iterator

    def __next__(self) -> T:
        return next(self._iterator)


class Raised(NamedTuple):
    """An error, or StopIteration for the end, in place of a result.

    Attributes:
        error: The error.
        traceback: The traceback with which the error is raised each time.
    """

    error: BaseException
    traceback: TracebackType | None

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Wraps an error that was just caught. A StopIteration becomes a RuntimeError.

        A StopIteration of the user's code would otherwise end the batches without an error.
        """
        if isinstance(error, StopIteration):
            wrapped = RuntimeError(
                "the pipeline raised StopIteration, which looks like the end of the data\n"
                "  remedy: give each next(...) in the source, in a .map or in make_feed a default,"
                " such as next(items, None)."
            )
            wrapped.__cause__ = error
            for note in notes_of(error):  # notes that name the record
                wrapped.add_note(note)
            return cls(wrapped, None)
        return cls(error, error.__traceback__)

    def throw(self) -> NoReturn:
        """Raises the error: the same object every time, except for StopIteration."""
        if isinstance(self.error, StopIteration):
            raise StopIteration
        # With the first traceback, because Python would make it longer with each raise.
        raise self.error.with_traceback(self.traceback)


class Known(NamedTuple):
    """The results that are ready by now.

    Attributes:
        results: Number of results that are ready or were taken, without a gap from the first one.
        end: The error that follows these results, or StopIteration if no more results follow. None
            if it is not known yet.
    """

    results: int
    end: BaseException | None


class Task(ABC):
    """A unit of work for one thread.

    Attributes:
        size: Number of records, or of other units, by which the speed of the threads is measured.
    """

    size: int = 1

    @abstractmethod
    def run(self) -> None:
        """Runs the task, and puts its results where they belong. An error is a result, too."""


class Tasks(Protocol):
    """Work that the threads of a `Crew` draw and run.

    One thread at a time calls `draw`. Other threads may call the other methods during a `draw`.
    """

    @abstractmethod
    def draw(self) -> Task | None:
        """Waits until a task can be drawn, and returns it; None if no task is left."""

    def stop(self) -> None:
        """Ends any wait inside `draw`, and does not wait for it. Any thread may call this."""

    def abort(self, error: Raised) -> None:
        """Ends the work after an error of the crew itself. By default like `stop`."""
        self.stop()

    def close(self) -> None:
        """Closes the producer of the tasks. Called once, after the last `draw`."""
