"""The least of the numbers that hosts have, asked for ahead of time.

There are two ways to find it. A few hosts tell each other by the key-value store (`by_store.py`),
in a background thread, beside whatever the training loop does. But the store is on the first host,
and slower the more hosts there are. Many hosts have their devices find it (`by_devices.py`), by a
collective, which takes its place among those of the training step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

import jax
import numpy as np

from grain_shard.background import Background
from grain_shard.errors import AgreementError
from grain_shard.tasks import Producer

# Largest number that can be asked about.
LARGEST = int(np.iinfo(np.int32).max)

# So many hosts ask the store. With 8 of them, all on one machine of 2 cores, an answer takes 4 ms
# (python -m benchmarks agreement), by default every fourth batch, and grows with their number.
MOST_BY_STORE = 8


def asks_devices(hosts: Sequence[int]) -> bool:
    """Whether so many hosts have their devices find the least, and not the store."""
    return len(hosts) > MOST_BY_STORE


class Way:
    """A way to find the least of what hosts say.

    Attributes:
        is_collective: Whether it must come in the same order, among the collectives of the training
            loop, on every host.
    """

    is_collective = False

    def least(self, numbers: Sequence[int], begins: Callable[[], None]) -> tuple[int, ...]:
        """Of each number the least on any host. Waits for all of them, for as long as it takes.

        Args:
            numbers: This host's.
            begins: To be called when other collectives may follow.
        """
        raise NotImplementedError

    def stop(self) -> None:
        """Ends a wait for other hosts, if it can be left; called in any thread, at any place."""


class Question:
    """Some numbers of this host, and once it is known, the least of those of all hosts.

    Attributes:
        numbers: Integers, as many on every host.
        begun: Set once the training loop may go on: of a collective, once it is in the queue of the
            devices.
        answered: Set once `least` or `error` is known.
        least: Of each number the least on any host.
        error: Why there is no answer.
        is_asked: Whether it was asked, and so need not be asked again.
    """

    def __init__(self, numbers: Sequence[int]):
        self.numbers = tuple(numbers)
        self.begun, self.answered = threading.Event(), threading.Event()
        self.least: tuple[int, ...] = ()
        self.error: Exception | None = None
        self.is_asked = False


class Minimum:
    """Asks for the least of what all hosts say, one question after the other.

    A thread waits for the answers. If it is a collective, the thread begins it, too, while the
    training loop waits for that and does nothing else. So it has its place in the order of the
    loop's program, and where it is done before the call returns, as on CPUs, the loop can still be
    told that the answer will not come.

    An interrupt, such as Ctrl-C, may come anywhere in these functions: each may be called again.

    Args:
        way: How it is found.
        at_end: Called by the thread that waits for answers, when it ends.
    """

    def __init__(self, way: Way, at_end: Callable[[], None]):
        self._is_collective = way.is_collective
        self._questions = _Questions(way, at_end)
        self._stage = Background(
            lambda nothing: nothing, self._questions, buffer_size=1, name="grain-shard-agreement"
        )

    def start(self) -> None:
        """Starts the thread; a second call does nothing."""
        self._stage.start()

    def ask(self, question: Question) -> None:
        """Asks, if it was not asked before; does not wait, not even until it has begun."""
        if not question.is_asked:
            if not self._is_collective:
                question.begun.set()
            self._questions.put(question)
            question.is_asked = True

    def least(self, question: Question) -> tuple[int, ...]:
        """The answer to a question that was answered.

        Raises:
            AgreementError: The hosts could not be asked.
        """
        error = question.error
        if isinstance(error, jax.errors.JaxRuntimeError | ValueError):  # the latter: a single CPU
            raise AgreementError(
                "not all hosts could be asked whether there is another batch; most likely one of"
                f" them is gone.\n  {error}\n  remedy: look at the other hosts' logs."
            ) from error
        if error is not None:
            raise error
        return question.least

    def stop(self) -> None:
        """Ends the thread as soon as its way can leave what it waits for; waits for nobody."""
        self._stage.stop()

    def close(self) -> None:
        """Stops, and waits some seconds for the thread."""
        self._stage.close()


class _Questions(Producer[None]):
    """Answers questions in the order in which they are asked, and makes nothing else of them."""

    def __init__(self, way: Way, at_end: Callable[[], None]):
        # No Queue: the garbage collector may call stop() in any thread at any place.
        self._queue: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._way, self._at_end = way, at_end
        self._last: Question | None = None

    def put(self, question: Question) -> None:
        self._queue.put(question)

    def __next__(self) -> None:
        while (question := self._queue.get()) is not None:
            # An interrupt may have put it there twice, and the other hosts answer it once.
            if question is not self._last:
                self._last = question
                self._answer(question)
        raise StopIteration

    def _answer(self, question: Question) -> None:
        try:
            question.least = self._way.least(question.numbers, question.begun.set)
        except Exception as error:
            question.error = error
        finally:
            question.begun.set()
            question.answered.set()

    def stop(self) -> None:
        self._way.stop()
        self._queue.put(None)

    def close(self) -> None:
        self._at_end()
