"""The least of the numbers that a few hosts have, found by the key-value store.

Every host posts its numbers and reads those of all others, in a background thread. No device has a
part in it, and the training loop waits for nothing. The last one or two answers of each host stay
in the store, since nobody can know that the others have read them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from grain_shard.hosts.minimum import Way
from grain_shard.hosts.rounds import Rounds


class ByStore(Way):
    """Asks the store.

    Args:
        rounds: The series of the hosts that take part.
    """

    def __init__(self, rounds: Rounds):
        self._rounds, self._asked, self._stopped = rounds, 0, False

    def least(self, numbers: Sequence[int], begins: Callable[[], None]) -> tuple[int, ...]:
        rounds, number = self._rounds, self._asked
        rounds.post(_name(number), list(numbers))
        answers = rounds.gather(_name(number), lambda: self._stopped)
        if answers is None:
            return ()  # nobody reads it
        if number:
            # All hosts have asked again, so none of them still reads the answers before.
            rounds.unsay(_name(number - 1))
        self._asked += 1
        return tuple(min(of_hosts) for of_hosts in zip(*answers.values(), strict=True))

    def stop(self) -> None:
        self._stopped = True


def _name(number: int) -> str:
    return f"least/{number}"
