"""`AllPlaces`: on the first host, finds hosts that hold up the others, from the places of all."""

from __future__ import annotations

import functools
import time
from collections.abc import Mapping

from absl import logging

from grain_shard.hosts.asks import ahead_at_end, ahead_in_run
from grain_shard.hosts.places import (
    Place,
    Places,
    all_left,
    left_early,
    left_in_last_step,
    stand_apart,
    still_after_a_leave,
)
from grain_shard.hosts.rounds import Rounds

# The topics of the places of all hosts and of the times of their calls. The key exists once all
# hosts have left at the same batch.
PLACES, ASKS, OVER = "places", "asks", "over"
# Functions that look for a problem, in this order. An error ends all hosts. If there is none, a
# warning is logged, once.
_ERRORS = (left_early, left_in_last_step, ahead_at_end)
_WARNINGS = (still_after_a_leave, stand_apart, ahead_in_run)


class AllPlaces:
    """The places of the training loops of all hosts in one iterator.

    Args:
        rounds: The rounds of the iterator, which have its hosts.
        first: Number of batches before the first one of the iterator.
        total: Number of all batches, with those before `first`; None if it is not known.
    """

    def __init__(self, rounds: Rounds, first: int, total: int | None):
        self._rounds, self._first, self._total = rounds, first, total
        self._places: Mapping[int, Place] = {}
        self._same_since = 0.0  # time at which `_places` was new
        self._warnings = list(_WARNINGS)  # those that the log does not have yet

    def look(self) -> str | None:
        """Looks at the places that the hosts have posted.

        Returns:
            The error that was found; "" if all hosts have left the loop at the same batch; None
            otherwise.
        """
        rounds = self._rounds
        of = {host: Place(*place) for host, place in rounds.get_all(PLACES).items()}
        if of != self._places:
            self._places, self._same_since = of, time.monotonic()
        places = Places(
            of,
            num_hosts=len(rounds.hosts),
            first=self._first,
            total=self._total,
            timeout_s=rounds.timeout_s,
            same_s=time.monotonic() - self._same_since,
            asks=functools.cache(lambda: rounds.get_all(ASKS)),
        )
        if all_left(places):
            rounds.put_once(OVER, True)
            rounds.delete(f"{PLACES}/")
            rounds.delete(f"{ASKS}/")
            return ""
        if error := next(filter(None, (find(places) for find in _ERRORS)), None):
            return error
        for find in self._warnings.copy():
            if warning := find(places):
                self._warnings.remove(find)
                logging.warning("grain_shard: %s", warning)
        return None
