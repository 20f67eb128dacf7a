"""The hosts that will not vote: each says so itself, for the others that would wait in vain.

The time counts for which a training loop waits, so a loop that is busy disturbs no wait. A host
without data, or without an iterator, is waited for as long as `timeout_s`. One whose loop is busy
with something else, so that its buffers stay full, is waited for ten times as long: the others
would wait for it in the collectives of the training step just as well. The first host that gives up
settles the vote for all.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from absl import logging

from grain_shard.errors import AgreementError
from grain_shard.hosts.rounds import Rounds

# Topics. Under the second each host lists the series that it has left before their end. It is one
# key a host and keeps the last few, because the store keeps all keys.
_NO_DATA, _LEFT, _MOST_LEFT = "no data", "left", 16
_left_here: list[str] = []
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
        self._since: float | None = None  # the wait that the looks belong to
        self._looks, self._says_no_data = 0, False

    def without_data(self, round_: str) -> None:
        """Notes that this host waits for its own data; tells the others once that takes too long.

        Raises:
            HostTimeoutError: Others have waited in vain for this host.
        """
        if self._due("data of its own"):
            self._says_no_data = True
            self._rounds.put(_NO_DATA, "")
            self._rounds.check(round_)

    def with_data(self) -> None:
        """Notes that this host's data have come."""
        if self._says_no_data:
            self._rounds.delete(_NO_DATA)
            self._says_no_data = False

    def absent(self, round_: str, is_first: bool) -> Mapping[int, str]:
        """Returns the hosts whose votes are waited for no longer, each with the reason.

        Args:
            round_: The round in which this host has voted.
            is_first: Whether it is the first vote, for which no host may be late.
        """
        rounds = self._rounds
        waited_s = self._due("another host's training loop")
        if not waited_s:
            return {}
        absent = dict.fromkeys(rounds.get_all(_NO_DATA), "had no data")
        for host, left in rounds.get_all(_LEFT, in_series=False).items():
            if rounds.name in left:
                absent[host] = "closed its iterator"
        if not absent and is_first:
            return dict.fromkeys(rounds.missing(round_), "")
        if not absent and waited_s >= _LOOPS_MAY_TAKE * rounds.timeout_s:
            return dict.fromkeys(rounds.missing(round_), "did not ask for its next batch")
        return absent

    def leave(self) -> None:
        """This host's iterator is closed before its end."""
        name = self._rounds.name
        if name:
            _left_here[:] = [*_left_here, name][-_MOST_LEFT:]
            with contextlib.suppress(AgreementError):  # the runtime has ended
                self._rounds.put(_LEFT, _left_here, in_series=False)

    def _due(self, waits_for: str) -> float:
        """Returns for how long the loop has waited, when it is time to look; otherwise 0."""
        since, timeout_s = self.loop_waits_since, self._rounds.timeout_s
        if since is None or since != self._since:
            self._since, self._looks = since, 0
        waited_s = 0.0 if since is None else time.monotonic() - since
        if since is None or waited_s < timeout_s * (1 + _LOOK_AGAIN * self._looks):
            return 0.0
        if self._looks % (1 / _LOOK_AGAIN) == 0:
            logging.warning("grain_shard: this host has waited %.0f s for %s", waited_s, waits_for)
        self._looks += 1
        return waited_s
