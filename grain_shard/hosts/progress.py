"""`LoopProgress`: the progress of this host's training loop, which hosts compare beside the loop.

Each host posts its place, and the times at which its loop asked for batches. The first host looks
at the places and the times of all hosts (`all_places.py`).
"""

from __future__ import annotations

import time

from grain_shard.hosts import exits
from grain_shard.hosts.all_places import ASKS, OVER, PLACES, AllPlaces
from grain_shard.hosts.asks import Asks
from grain_shard.hosts.places import Place
from grain_shard.hosts.rounds import Rounds

# Seconds between the close of an iterator and the report that the loop was left. An error that
# closed the iterator is reported meanwhile.
_ERROR_MAY_COME_S = 2.0
# Seconds between two posts of the times of the calls.
_POST_S = 4.0


class LoopProgress:
    """The progress of the training loop of this host in the batches of one iterator.

    Args:
        rounds: The rounds of the iterator, which have its name and its hosts.
        first: Number of batches before the first one of the iterator.
        total: Number of all batches, with those before `first`; None if it is not known.

    Attributes:
        is_at_end: True once the training loop has got all batches.
        all_left: True once all hosts have left the loop at the same batch.
    """

    def __init__(self, rounds: Rounds, first: int, total: int | None):
        self._rounds, self._first, self._total = rounds, first, total
        self._place, self._posted, self._left_at = Place(0, None), Place(0, None), 0.0
        self._asks, self._post_at = Asks(), 0.0
        self._all = AllPlaces(rounds, first, total) if rounds.is_leader else None
        self.is_at_end = self.all_left = False

    def asks(self, taken: int) -> None:
        """Notes that the loop asks for a batch.

        Args:
            taken: Number of batches that the loop has got.
        """
        if self._place.left is None:
            self._place = Place(taken + (self._first + taken != self._total), None)
            self._asks.note(taken)

    def waits(self, taken: int) -> bool:
        """Returns True if the loop waits for a batch.

        Args:
            taken: Number of batches that the loop has got.
        """
        return self._place.left is None and self._place.batches > taken

    def leave(self, taken: int, why: str) -> None:
        """Notes that the loop takes no more batches; a second call does nothing.

        Args:
            taken: Number of batches that the loop has got.
            why: The reason; "" at the end of the data.
        """
        if self._place.left is None:
            self.is_at_end = not why or self._first + taken == self._total
            self._left_at = time.monotonic()
            self._place = Place(taken, "" if self.is_at_end else why)

    def look(self, still: str = "", *, at_exit: bool = False) -> str | None:
        """Posts the place of this host. The first host also looks at the places of all hosts.

        Args:
            still: The most likely place of a loop that has stood still for long; "" if it has not.
            at_exit: True if the process ends.

        Returns:
            The error that the first host has found; None if there is none.
        """
        place, rounds = self._place, self._rounds
        has_left = place.left is not None
        # A thread may also stand still after the end of the data, as where it reads a loss.
        still = "" if place.left or at_exit else still
        place = place._replace(still=still, has_ended=at_exit and has_left)
        if place != self._posted:
            if place.left and not at_exit and time.monotonic() < self._left_at + _ERROR_MAY_COME_S:
                return None
            why = exits.reason(place.left) if place.left else place.left
            has_failed = bool(place.left) and exits.status() != 0
            rounds.put(PLACES, place._replace(left=why, has_failed=has_failed))
            self._posted = place  # the loop may have gone on meanwhile, so `_place` stays
        if has_left or time.monotonic() >= self._post_at:
            self._post_at = time.monotonic() + _POST_S
            rounds.put(ASKS, list(self._asks.latest))
        if self._all is None:
            self.all_left = has_left and bool(rounds.wait(OVER, 1))
            return None
        found = self._all.look()
        self.all_left |= found == ""
        return found or None
