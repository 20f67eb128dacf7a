"""The hosts that will not vote: each says so itself, so that the others do not wait in vain.

A host gives up after its training loop has waited for long enough; the time in which the loop is
busy does not count. A host without data, or without an iterator, is waited for as long as
`timeout_s`. A host whose loop is busy with something else, so that its buffers stay full, is waited
for ten times as long: the others would wait for it in the collectives of the training step just as
well. The first host that gives up settles the vote for all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from absl import logging

from grain_shard.errors import AgreementError
from grain_shard.hosts.rounds import Rounds

# The topic under which a host says why it will not vote, with the round; None means in any round.
_ABSENT = "absent"
# In multiples of a host's timeout: the time that another host's training loop may be busy, and the
# interval at which a waiting host asks again.
_LOOPS_MAY_TAKE, _LOOK_AGAIN = 10, 0.1


class Absences:
    """The absences of a series; asked by the thread that votes.

    Args:
        rounds: The series.

    Attributes:
        loop_waits_since: When the training loop began to wait, by `time.monotonic`; None while it
            does not wait.
    """

    def __init__(self, rounds: Rounds):
        self._rounds = rounds
        self.loop_waits_since: float | None = None
        self._next_look = 0.0

    def without_data(self, round_: str) -> None:
        """Notes that this host waits for its own data; tells the others once that takes too long.

        Raises:
            HostTimeoutError: Others have waited in vain for this host.
        """
        if self._waited_s("the data of its own next batch"):
            self._rounds.put(_ABSENT, [round_, "still waited for the data of its next batch"])
            self._rounds.check(round_)

    def absent(self, round_: str, is_first: bool) -> Mapping[int, str]:
        """Returns the hosts whose votes are waited for no longer, each with the reason.

        Args:
            round_: The round in which this host has voted.
            is_first: Whether it is the first vote, for which no host may be late.
        """
        rounds, waited_s = self._rounds, self._waited_s("another host's loop")
        if not waited_s:
            return {}
        missing, said = rounds.missing(round_), rounds.get_all(_ABSENT)
        told = {
            host: why
            for host, (in_round, why) in said.items()
            if host in missing and in_round in (round_, None)
        }
        if told or is_first:
            return told or dict.fromkeys(missing, "")
        is_late = waited_s >= _LOOPS_MAY_TAKE * rounds.timeout_s
        return dict.fromkeys(missing, "did not ask for its next batch") if is_late else {}

    def leave(self) -> None:
        """Tells the others that this host's iterator is closed before its end."""
        if self._rounds.name:
            with contextlib.suppress(AgreementError):  # the runtime has ended
                self._rounds.put(_ABSENT, [None, "closed its iterator"])

    def _waited_s(self, waits_for: str) -> float:
        """Returns for how long the loop has waited, when it is time to look; otherwise 0."""
        since, timeout_s, now = self.loop_waits_since, self._rounds.timeout_s, time.monotonic()
        if since is None or now < max(since + timeout_s, self._next_look):
            return 0.0
        self._next_look = now + _LOOK_AGAIN * timeout_s
        text = "grain_shard: this host has waited %.0f s for %s"
        logging.log_every_n_seconds(logging.WARNING, text, timeout_s, now - since, waits_for)
        return now - since
