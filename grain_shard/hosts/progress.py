"""`Progress`: the progress of this host's training loop, which hosts compare beside the loop.

Each host posts its place, and the times at which its loop asked for batches. The first host
compares the places and the times of all hosts. So it finds a host that has left the loop while
others go on, and a host that is one batch ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from grain_shard.hosts import exits
from grain_shard.hosts.asks import AT_END, IN_RUN, Asks, describe, one_ahead, step_s
from grain_shard.hosts.compare import hosts_text
from grain_shard.hosts.places import Place, left_early, may_work_alone, stand_apart
from grain_shard.hosts.rounds import Rounds

# Seconds between the close of an iterator and the report that the loop was left. An error that
# closed the iterator is reported meanwhile.
_ERROR_MAY_COME_S = 2.0
# The topics of the places of all hosts and of the times of their calls. The key exists once all
# hosts have left at the same batch.
_PLACES, _ASKS, _OVER = "places", "asks", "over"
# Seconds between two comparisons of the times. When a host has reached the end of the data, the
# others stand still if they take no batch for so many seconds, and for so many steps.
_COMPARE_S, _ENDS_TOGETHER_S, _STEPS_TO_END = 4.0, 5.0, 3.0
# After a clean end of one host, another host may work on alone, as to export a model, for so many
# seconds. In plain JAX, the exit of a process waits 300 seconds for the other processes.
_MAY_WORK_ALONE_S = 240.0


class Progress:
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
        self._asks, self._compare_at = Asks(), 0.0
        self._places, self._same_since = dict[int, Place](), 0.0
        self._warned = set[Any]()  # the functions whose warnings the log has
        self._steps_in_time = _StepsInTime(rounds)
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
        """Posts the place of this host. The first host also compares the places of all hosts.

        Args:
            still: The most likely place of a loop that has stood still for long; "" if it has not.
            at_exit: True if the process ends.

        Returns:
            The error that the first host has found; None if there is none.
        """
        place, rounds = self._place, self._rounds
        is_going = place.left is None
        place = place._replace(still=still * is_going, has_ended=at_exit and not is_going)
        if place != self._posted:
            if place.left and not at_exit and time.monotonic() < self._left_at + _ERROR_MAY_COME_S:
                return None
            why = exits.reason(place.left) if place.left else place.left
            has_failed = bool(place.left) and exits.status() != 0
            rounds.put(_PLACES, place._replace(left=why, has_failed=has_failed))
            self._posted = place  # the loop may have gone on meanwhile, so `_place` stays
        if time.monotonic() >= self._compare_at or place.left is not None:
            self._compare_at = time.monotonic() + _COMPARE_S
            rounds.put(_ASKS, list(self._asks.latest))
        if not rounds.is_leader:
            self.all_left = place.left is not None and bool(rounds.wait(_OVER, 1))
            return None
        places = {host: Place(*place) for host, place in rounds.get_all(_PLACES).items()}
        if places != self._places:
            self._places, self._same_since = places, time.monotonic()
        same_s = time.monotonic() - self._same_since
        of = "" if self._total is None else f" of {self._total:,}"
        error = left_early(places, len(rounds.hosts), self._first, of)
        # The loop of another host has stood still for half of `timeout_s` when it is told here.
        if error is None and same_s > rounds.timeout_s / 2:
            error = left_early(places, len(rounds.hosts), self._first, of, is_long=True)
            if error and may_work_alone(places) and same_s < _MAY_WORK_ALONE_S:
                alone_s = f"{_MAY_WORK_ALONE_S:.0f} s"
                text = f"{error}\n  Otherwise all hosts end {alone_s} after they stood still."
                self._warn(left_early, text)
                error = None
            elif apart := stand_apart(places, len(rounds.hosts), self._first, rounds.timeout_s):
                self._warn(stand_apart, apart)
        if error == "":
            rounds.put_once(_OVER, True)
            rounds.delete(f"{_PLACES}/")
            rounds.delete(f"{_ASKS}/")
            self.all_left = True
            return None
        return error or self._steps_in_time.error(places, same_s)

    def _warn(self, finder: Callable[..., str | None], problem: str) -> None:
        if finder not in self._warned:
            self._warned.add(finder)
            logging.warning("grain_shard: %s", problem)


class _StepsInTime:
    """Finds hosts that are one batch ahead of others, from the times of the calls of ``next``."""

    def __init__(self, rounds: Rounds):
        self._rounds, self._has_warned = rounds, False

    def error(self, places: Mapping[int, Place], same_s: float) -> str | None:
        """Warns once if hosts are one batch ahead of others.

        Args:
            places: The place of each host.
            same_s: Seconds for which the places have been the same.

        Returns:
            The error, if the hosts that are ahead have reached the end of the data, and the others
            have not; None otherwise.
        """
        at_end = {h for h, place in places.items() if place.left == ""}
        if self._has_warned and not (at_end and same_s > _ENDS_TOGETHER_S):
            return None
        asks = self._rounds.get_all(_ASKS)
        slow_steps_s = _STEPS_TO_END * max(map(step_s, asks.values()))
        is_end = bool(at_end) and same_s > max(_ENDS_TOGETHER_S, slow_steps_s)
        ahead, behind = one_ahead(asks, AT_END if is_end else IN_RUN)
        if not ahead:
            return None
        text = describe(ahead, behind)
        if is_end and at_end >= set(ahead) and not at_end & set(behind):
            return (
                f"{text}\n  {hosts_text(ahead)} reached the end of the data, and waits for nobody."
            )
        if not self._has_warned:
            self._has_warned = True
            logging.warning("grain_shard: %s", text)
        return None
