"""The least of the numbers that hosts have, found by their devices.

It takes an all-reduce of a few bytes, which goes over the interconnect of the devices. So it does
not pass through the first host, whose key-value store is slower the more hosts there are.

It is a collective, and all collectives must come in the same order on every host. So a question is
asked in the order of the training loop's program, by the loop's thread, which waits until it has
begun. The thread that begins it, and that waits for the answer, is another one: where a collective
is done before the call returns, as on CPUs, the loop can still be told that the answer will not
come.
"""

from __future__ import annotations

import functools
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grain_shard.background import Background
from grain_shard.errors import AgreementError
from grain_shard.tasks import Producer

# Largest number that can be asked about.
LARGEST = int(np.iinfo(np.int32).max)


class Question:
    """Some numbers of this host, and once it is known, the least of those of all hosts.

    Attributes:
        numbers: Integers, as many on every host.
        begun: Set once the collective is in the queue of the devices.
        answered: Set once `least` is known, or the collective has failed.
        least: Of each number the least on any host.
        is_read: Whether it was asked for.
    """

    def __init__(self, numbers: Sequence[int]):
        self.numbers = tuple(numbers)
        self.begun, self.answered = threading.Event(), threading.Event()
        self.least: tuple[int, ...] = ()
        self.is_read = False


class Minimum:
    """Asks for the least of what all hosts say, one question after the other.

    Args:
        devices: Of all hosts that take part, in an order that is the same on each.
        at_end: Called by the thread that waits for answers, when it ends.
    """

    def __init__(self, devices: Sequence[Any], at_end: Callable[[], None]):
        self._questions = _Questions(at_end)
        least = functools.partial(_least, Mesh(np.array(devices), ("devices",)))
        self._stage = Background(
            least, self._questions, buffer_size=2, name="grain-shard-agreement"
        )

    def start(self) -> None:
        """Starts the thread; a second call does nothing."""
        self._stage.start()

    def ask(self, numbers: Sequence[int]) -> Question:
        """Asks; does not wait, not even until it has begun."""
        question = Question(numbers)
        self._questions.put(question)
        return question

    def least(self, question: Question) -> tuple[int, ...]:
        """The answer to a question that was answered; the questions before it were read already.

        Raises:
            AgreementError: The collective has failed.
        """
        try:
            if not question.is_read:
                next(self._stage)  # so that there is room for the next one
                question.is_read = True
        except (jax.errors.JaxRuntimeError, ValueError) as error:  # the second of a single CPU
            raise AgreementError(
                "the devices could not ask all hosts whether there is another batch; most likely"
                f" one of the hosts is gone.\n  {error}\n  remedy: look at the other hosts' logs."
            ) from error
        return question.least

    def stop(self) -> None:
        """Ends the thread once what it waits for has come; waits for nobody."""
        self._stage.stop()

    def close(self) -> None:
        """Stops, and waits some seconds for the thread."""
        self._stage.close()


class _Questions(Producer[Question]):
    """The questions, in the order in which they are asked."""

    def __init__(self, at_end: Callable[[], None]):
        # No Queue: the garbage collector may call stop() in any thread at any place.
        self._queue: queue.SimpleQueue[Question | None] = queue.SimpleQueue()
        self._at_end = at_end

    def put(self, question: Question) -> None:
        self._queue.put(question)

    def __next__(self) -> Question:
        question = self._queue.get()
        if question is None:
            raise StopIteration
        return question

    def stop(self) -> None:
        self._queue.put(None)

    def close(self) -> None:
        self._at_end()


# The questions of this process that its devices work on.
_under_way: set[Question] = set()


def is_waiting() -> bool:
    """Whether a thread of this process waits for an answer of the devices."""
    return bool(_under_way)


def _least(mesh: Mesh, question: Question) -> None:
    _under_way.add(question)
    try:
        # The mesh of the training loop is in force in this thread, too, and has other axes.
        with jax.set_mesh(mesh):
            least = _all_reduce(mesh)(_on_devices(mesh, question.numbers))
            question.begun.set()
            question.least = tuple(int(number) for number in np.asarray(least))
    finally:
        _under_way.discard(question)
        question.begun.set()
        question.answered.set()


def _on_devices(mesh: Mesh, numbers: Sequence[int]) -> jax.Array:
    """An array of which each device holds one row, each of this host's the same."""
    sharding = NamedSharding(mesh, P("devices"))
    row = np.array([numbers], np.int32)
    rows = [jax.device_put(row, device) for device in mesh.local_devices]
    return jax.make_array_from_single_device_arrays((mesh.size, len(numbers)), sharding, rows)


@functools.lru_cache(maxsize=8)
def _all_reduce(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda rows: rows.min(axis=0), out_shardings=NamedSharding(mesh, P()))
