"""Who will not come to a vote: hosts say so themselves, for those that would wait in vain.

A host whose training loop is busy with something else is waited for, however long that takes: the
others would wait for it in the collectives of the training step just as well. A host without data,
or without an iterator, is not: sooner or later those that wait for it give up, and say so as well.
"""

from __future__ import annotations

import contextlib

import jax

from grain_shard.hosts.rounds import Rounds

# Two topics, since a host that has no data looks for those that gave up alone: where a bucket does
# not answer, all hosts have no data.
_ABSENT, _GAVE_UP = "absent", "gave up"
_NO_DATA, _LEFT = "has no data", "has closed its iterator"


class Absences:
    """What the hosts of a series say of why they do not vote.

    Args:
        rounds: The series.

    Attributes:
        is_over: Whether nobody waits for this host any more, as all have ended or know of an error.
    """

    def __init__(self, rounds: Rounds):
        self._rounds, self.is_over = rounds, False
        self._is_absent = False

    def look(self, waits_for_own: bool) -> None:
        """Ends a wait that has taken too long, if it is in vain.

        Args:
            waits_for_own: Whether this host waits for data of its own, and not for other hosts.

        Raises:
            HostTimeoutError: Another host does not come; or has waited in vain for this one.
        """
        if waits_for_own and not self._is_absent:
            self._rounds.say(_ABSENT, _NO_DATA)
            self._is_absent = True
        absent = {} if waits_for_own else self._rounds.said(_ABSENT)
        if absent:
            self._rounds.say(_GAVE_UP, "")
            self._rounds.raise_silent(absent)
        if self._rounds.said(_GAVE_UP):
            self._rounds.raise_silent({jax.process_index(): "came too late"})

    def come_back(self) -> None:
        """The data that this host lacked have come.

        Raises:
            HostTimeoutError: Others have waited in vain for them.
        """
        self.look(waits_for_own=True)
        self._rounds.unsay(_ABSENT)
        self._is_absent = False

    def leave(self) -> None:
        """This host's iterator is closed."""
        if self._rounds.name and not self.is_over:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the runtime has ended
                self._rounds.say(_ABSENT, _LEFT)
