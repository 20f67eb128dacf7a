"""Who will not come to a vote: hosts say so themselves, for those that would wait in vain.

A host whose training loop is busy with something else is waited for, however long that takes: the
others would wait for it in the collectives of the training step just as well. A host without data,
or without an iterator, is not: sooner or later those that wait for it give up, and say so as well.
"""

from __future__ import annotations

import contextlib

import jax

from grain_shard.hosts.rounds import Rounds

_TOPIC = "absent"
_NO_DATA, _LEFT, _GAVE_UP = "has no data", "has left", "gave up"


class Absences:
    """What the hosts of a series say of why they do not vote.

    Args:
        rounds: The series.

    Attributes:
        is_over: Whether nobody waits for this host any more, as all have ended or know of an error.
    """

    def __init__(self, rounds: Rounds):
        self._rounds, self.is_over = rounds, False

    def look(self, waits_for_own: bool) -> None:
        """Ends a wait that has taken too long, if it is in vain.

        Args:
            waits_for_own: Whether this host waits for data of its own, and not for other hosts.

        Raises:
            HostTimeoutError: Another host does not come; or has waited in vain for this one.
        """
        if waits_for_own:
            self._rounds.say(_TOPIC, _NO_DATA)
        said = self._rounds.said(_TOPIC)
        absent = [host for host, why in said.items() if why != _GAVE_UP]
        if not waits_for_own and said:
            self._rounds.say(_TOPIC, _GAVE_UP)
            self._rounds.raise_silent(absent or [jax.process_index()])
        if _GAVE_UP in said.values():
            self._rounds.raise_silent([jax.process_index()])

    def come_back(self) -> None:
        """The data that this host lacked have come.

        Raises:
            HostTimeoutError: Others have waited in vain for them.
        """
        self.look(waits_for_own=True)
        self._rounds.unsay(_TOPIC)

    def leave(self) -> None:
        """This host's iterator is closed."""
        if self._rounds.name and not self.is_over:
            with contextlib.suppress(jax.errors.JaxRuntimeError):  # the runtime has ended
                self._rounds.say(_TOPIC, _LEFT)
