"""`Absences`: finds the hosts that will not vote, so that the other hosts stop waiting for them.

A vote is a round in which hosts agree on the number of batches that all of them hand out next. The
other hosts wait for a missing vote as follows:

* A host that has had no data for `timeout_s` says so in the key-value store. The other hosts wait
  for its vote for `timeout_s`.
* A host that has said nothing most likely has full buffers and a busy training loop. The other
  hosts wait for its vote for ten times `timeout_s`. To stop earlier would gain little, because in
  the training step they would wait for the same host.

The first vote is an exception: the other hosts wait for every missing vote for `timeout_s` only.

A host counts only the time in which its own training loop waits for the vote. The first host that
stops waiting ends the vote for all hosts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from absl import logging

from grain_shard.hosts.rounds import LOOPS_MAY_TAKE, Rounds

# The topic under which a host says that it cannot vote: [the round, the reason].
_ABSENT = "absent"
# The time between two looks of a waiting host into the store, in multiples of `timeout_s`.
_LOOK_AGAIN = 0.1


class Absences:
    """Finds the hosts that will not vote, and tells the other hosts if this host will not vote.

    The thread that votes for this host calls the methods.

    Args:
        rounds: The rounds in which the hosts vote.

    Attributes:
        loop_waits_since: Time at which this host's training loop began to wait, by
            `time.monotonic`; None while the loop does not wait.
    """

    def __init__(self, rounds: Rounds):
        self._rounds = rounds
        self.loop_waits_since: float | None = None
        self._next_look = 0.0

    def without_data(self, round_: str) -> None:
        """Notes that this host has no data to vote on.

        If the training loop has waited for `timeout_s`, this tells the other hosts.

        Args:
            round_: The round of the vote.

        Raises:
            HostTimeoutError: The other hosts have stopped waiting for this host.
        """
        if self._waited_s("the data of its own next batch"):
            self._rounds.put(_ABSENT, [round_, "still waited for the data of its next batch"])
            self._rounds.check(round_)

    def absent(self, round_: str, is_first: bool) -> Mapping[int, str]:
        """Returns the hosts that this host stops waiting for, each with the reason.

        The result is empty while this host goes on waiting. A reason may be "".

        Args:
            round_: The round in which this host has voted.
            is_first: True for the first vote, in which every host is waited for only `timeout_s`.
        """
        rounds, waited_s = self._rounds, self._waited_s("another host's loop")
        if not waited_s:
            return {}
        missing, said = rounds.missing(round_), rounds.get_all(_ABSENT)
        told = {
            host: why
            for host, (in_round, why) in said.items()
            if host in missing and in_round == round_
        }
        if told or is_first:
            return told or dict.fromkeys(missing, "")
        is_late = waited_s >= LOOPS_MAY_TAKE * rounds.timeout_s
        return dict.fromkeys(missing, "did not ask for its next batch") if is_late else {}

    def _waited_s(self, waits_for: str) -> float:
        """Returns the seconds for which the training loop has waited, and logs them.

        The result is 0 if the loop does not wait, or if it is too early to look again.

        Args:
            waits_for: The data or the host that the loop waits for, for the log.
        """
        since, timeout_s, now = self.loop_waits_since, self._rounds.timeout_s, time.monotonic()
        if since is None or now < max(since + timeout_s, self._next_look):
            return 0.0
        self._next_look = now + _LOOK_AGAIN * timeout_s
        text = "grain_shard: this host has waited %.0f s for %s"
        logging.log_every_n_seconds(logging.WARNING, text, timeout_s, now - since, waits_for)
        return now - since
