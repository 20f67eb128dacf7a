"""`Producer`: an iterator whose consumer can stop and close it.

Batches pass a chain of producers, from the source at the top to the training loop at the bottom.
Each producer asks the one above it for items, and tells it to end.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TypeVar

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
        """Ends the threads and processes of this producer and of those above it, and waits."""


class Items(Producer[T]):
    """An ordinary iterator as a producer. It has no threads or processes to end."""

    def __init__(self, iterator: Iterator[T]):
        self._iterator = iterator

    def __next__(self) -> T:
        return next(self._iterator)
