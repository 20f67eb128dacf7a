"""Who will not come to a vote: hosts say so themselves, for those that would wait in vain.

A host without data, or without an iterator, is waited for as long as `timeout_s`. One whose loop is
busy with something else is waited for ten times as long: the others would wait for it in the
collectives of the training step just as well. Those that give up say so, as it may come yet.
"""

from __future__ import annotations

import contextlib
import json

import jax

from grain_shard.hosts.rounds import Rounds

# Topics of their own, since a host that has no data looks for those that gave up alone: where a
# bucket does not answer, all hosts have no data.
_NO_DATA, _WAITING, _GAVE_UP = "no data", "waiting", "gave up"
# Of each host, the series that it has left before their end; the last few, as the store keeps all.
_LEFT, _MOST_LEFT = "grain_shard/left/", 16
_left_here: list[str] = []


class Absences:
    """What the hosts of a series say of why they do not vote.

    Args:
        rounds: The series.

    Attributes:
        is_over: Whether nobody waits for this host any more, as all have ended or know of an error.
    """

    def __init__(self, rounds: Rounds):
        self._rounds, self.is_over = rounds, False
        self._said: str | None = None  # the topic under which this host has said something

    def look(self, waits_for_own: bool, gives_up: bool = False) -> None:
        """Ends a wait that has taken too long, if it is in vain.

        Args:
            waits_for_own: Whether this host waits for data of its own, and not for other hosts.
            gives_up: Whether it waits no longer for hosts that say nothing.

        Raises:
            HostTimeoutError: Another host does not come; or has waited in vain for this one.
        """
        rounds = self._rounds
        topic = _NO_DATA if waits_for_own else _WAITING
        if self._said != topic:  # an interrupt may have left the other one
            self._unsay()
            rounds.say(topic, "")
            self._said = topic
        if not waits_for_own:
            absent = dict.fromkeys(rounds.said(_NO_DATA), "had no data")
            absent |= {
                host: "closed its iterator"
                for host, left in rounds.of_hosts(_LEFT).items()
                if rounds.name in left
            }
            if gives_up and not absent:
                waiting = rounds.said(_WAITING)
                silent = [host for host in rounds.hosts if host not in waiting]
                absent = dict.fromkeys(silent, "did not ask for its next batch")
            if absent:
                rounds.say(_GAVE_UP, "")
                rounds.raise_silent(absent)
        if rounds.said(_GAVE_UP):
            rounds.raise_silent({jax.process_index(): "came too late"})

    def come_back(self, waits_for_own: bool) -> None:
        """What this host has waited for has come.

        Raises:
            HostTimeoutError: It was data of its own, for which others have waited in vain.
        """
        if waits_for_own:
            self.look(waits_for_own)
        self._unsay()

    def _unsay(self) -> None:
        if self._said is not None:
            self._rounds.unsay(self._said)
            self._said = None

    def leave(self) -> None:
        """This host's iterator is closed."""
        name = self._rounds.name
        if name and not self.is_over:
            _left_here[:] = [*_left_here, name][-_MOST_LEFT:]
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the runtime has ended
                self._rounds.say_of_host(_LEFT, json.dumps(_left_here))
