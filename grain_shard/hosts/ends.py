"""`AgreedEnd`: the batches of streams, which all hosts end after the same number of batches.

If the stream of one host ended earlier, the other hosts would wait for it in a collective for ever.
So a batch is handed out only after all hosts have agreed to hand it out. They agree by votes, which
are rounds over the key-value store (`rounds.py`). A thread of each host votes ahead of the training
loop: its vote is the number of batches that the host has ready. From all votes `decide` computes
how many batches every host hands out next. The training loop waits for a vote only after it has
used up the batches agreed on.

All hosts take part in the same votes in the same order. A host votes once it has a new batch ready
or has reached its end. So after each vote the training loops can go on, or the streams end.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

from grain_shard.hosts.compare import Answers
from grain_shard.hosts.rounds import LOOPS_MAY_TAKE, Rounds
from grain_shard.hosts.verdict import Verdict
from grain_shard.spans import AGREE, counted_by, counter, span
from grain_shard.threads.mapped import mapped
from grain_shard.threads.pool import Pool
from grain_shard.threads.producer import Producer

T = TypeVar("T")


def decide(remainder: str, same_rows: bool, answers: Answers) -> Verdict:
    """Returns the verdict on the votes of all hosts.

    Args:
        remainder: The treatment of a host whose stream has ended before other streams. With "pad"
            the host goes on with batches of padding until the last stream ends. With "drop" all
            hosts end. With "error" all hosts raise an error.
        same_rows: True if every host produces the same batches. If only some of the streams have
            ended, all hosts then raise an error, whatever `remainder` is.
        answers: Number of batches that each host has ready, by host; 0 if its stream has ended.

    Returns:
        The verdict: an `error`; or the hosts have `agreed` on the number of batches that every
        host hands out before the next vote, which is 0 if all hosts end.

    Example:
        >>> decide("pad", False, {0: 4, 1: 2, 2: 0}).agreed
        2
        >>> decide("drop", False, {0: 4, 1: 2, 2: 0}).agreed
        0
    """
    ended = [host for host, ready in answers.items() if ready == 0]
    if len(ended) in (0, len(answers)):  # no stream has ended, or all have
        return Verdict(agreed=min(answers.values()))
    problem = (
        f"the streams of {len(ended)} of {len(answers)} hosts (the first: host {ended[0]}) end"
        " earlier than the streams of the other hosts."
    )
    if same_rows:
        return Verdict(
            error='with rows="global" every host must produce the same batches, but'
            f" {problem}\n"
            "  remedy: read the same files with the same seed on every host, or shard the source by"
            ' grain_shard.ShardByMesh and pass rows="local".'
        )
    if remainder == "error":
        remedy = 'pass remainder="pad" (adds zeros and a mask) or remainder="drop".'
        return Verdict(error=f"{problem}\n  remedy: {remedy}")
    # With "pad", a host that has ended (0 ready) can hand out any number of batches of padding.
    return Verdict(agreed=min(filter(None, answers.values())) if remainder == "pad" else 0)


class _Votes(Producer[int]):
    """The votes of this host, each of which is one ``next`` of the voting thread.

    An item is the number of batches that all hosts have agreed to hand out, counted from the first
    batch. The voting thread changes the attributes, except `handed_out`, which the training loop
    changes.

    Args:
        read: This host's batches in host memory. A batch counts as ready once it is read, even
            before it is on the devices.
        rounds: The rounds in which the hosts vote.
        decide: Returns the verdict on the votes of all hosts.
        require_voters: `Alarm.require_voters`.

    Attributes:
        agreed: Number of batches that all hosts have agreed to hand out.
        handed_out: Number of batches that the training loop has received.
        number: Number of votes that are over.
    """

    def __init__(
        self,
        read: Pool[Any],
        rounds: Rounds,
        decide: Callable[[Answers], Verdict],
        require_voters: Callable[[Callable[[], list[int]]], None],
    ):
        self._read, self._rounds, self._decide = read, rounds, decide
        self._require_voters = require_voters
        self.agreed = self.handed_out = self.number = 0
        self._stopped = False

    def loop_waits(self, waited_s: float) -> None:
        """Raises an error if a host that must vote has ended, or is late.

        The training loop calls this now and then while it waits for a vote. The first vote may take
        `timeout_s`, and a later one ten times as long, because another host's loop may be busy.

        Args:
            waited_s: Seconds for which the loop has waited.

        Raises:
            AgreementError: The process of another host has ended.
            HostTimeoutError: Another host did not vote in time.
        """
        round_, times = str(self.number), LOOPS_MAY_TAKE if self.number else 1
        self._require_voters(lambda: self._rounds.missing(round_))
        if waited_s > times * self._rounds.timeout_s:
            raise self._rounds.late(self._rounds.missing(round_))

    def __next__(self) -> int:
        more = self._vote(str(self.number))
        if not more:
            raise StopIteration
        self.agreed += more
        self.number += 1
        return self.agreed

    def _vote(self, round_: str) -> int | None:
        """Waits until a vote is due, votes, and waits for the verdict.

        Args:
            round_: The name of the vote's round.

        Returns:
            The number of batches that every host hands out next, 0 at the end; None if the iterator
            was stopped.

        Raises:
            BaseException: This host's stream failed, and all batches before the error are agreed
                on. So the training loop gets the error in place of the next batch.
            AgreementError: The verdict is an error.
        """
        if not self._read.wait_for(self._is_worth_a_vote):
            return None
        known = self._read.known()  # how many batches were read, and the error or end after them
        ready = known.results - self.agreed
        if ready <= 0 and known.end is not None and not isinstance(known.end, StopIteration):
            raise known.end
        self._rounds.put(round_, max(0, ready))
        # `loop_waits` limits the wait, and not `patience`.
        verdict = self._rounds.verdict(
            round_, self._decide, stopped=lambda: self._stopped, patience=math.inf
        )
        if verdict is None:  # stopped
            return None
        if verdict.agreed and self.number:
            # All hosts have voted again, so all have read the previous verdict.
            self._rounds.forget(str(self.number - 1))
        return verdict.agreed

    def _is_worth_a_vote(self) -> bool:
        """Returns True if a vote is due: on new batches, or on the end of the stream.

        A vote on few batches would mean many votes, and a late vote lets the training loop wait for
        the verdict. So a vote is due once there are as many new batches as agreed batches that the
        loop has not received yet.
        """
        known = self._read.known()
        new, left = known.results - self.agreed, self.agreed - self.handed_out
        return known.end is not None or new >= max(1, left)

    def stop(self) -> None:
        self._stopped = True


class AgreedEnd(Producer[T]):
    """Hands out global batches up to the end on which all hosts agree.

    Args:
        on_devices: This host's batches, on the devices.
        read: This host's batches in host memory, from which `on_devices` is made.
        rounds: The rounds in which the hosts vote.
        remainder: The treatment of a host whose stream has ended; see `decide`.
        same_rows: True if every host produces the same batches, so that all have to end at once.
        padding: Returns a batch of padding on the devices, given the number of batches of padding
            before it.
        require_voters: `Alarm.require_voters`.
        on_wait: Called about once a second while the loop waits for data of this host, with the
            seconds that the wait has lasted.
    """

    def __init__(
        self,
        on_devices: Pool[T],
        read: Pool[Any],
        rounds: Rounds,
        *,
        remainder: str,
        same_rows: bool,
        padding: Callable[[int], T],
        require_voters: Callable[[Callable[[], list[int]]], None],
        on_wait: Callable[[float], None] | None = None,
    ):
        decider = functools.partial(decide, remainder, same_rows)
        self._on_devices, self._read, self._padding = on_devices, read, padding
        self._on_wait = on_wait
        self._counter = counter()  # gets the time for which the loop waits for votes
        self._votes = _Votes(read, rounds, decider, require_voters)
        self._agreed = 0  # number of batches that the loop may hand out, by the votes it has taken
        self._voting = mapped(  # a thread that only draws items of `_votes`: each is a vote
            lambda agreed: agreed,
            self._votes,
            size=2,
            name="grain-shard-agreement",
            on_wait=self._votes.loop_waits,
        )

    def start(self) -> None:
        """Starts the threads that make batches and vote."""
        self._on_devices.start()
        self._voting.start()

    @property
    def taken(self) -> int:
        return self._votes.handed_out

    def __next__(self) -> T:
        if self._agreed <= self.taken:
            self.start()
            self._wait_for_own_batch()
            self._wait_for_votes()
        known, taken = self._read.known(), self.taken
        has_ended = known.results <= taken and isinstance(known.end, StopIteration)
        if has_ended:  # but the streams of other hosts go on
            batch = self._padding(taken - known.results)
        else:
            batch = next(self._on_devices)
        self._votes.handed_out += 1
        return batch

    def _wait_for_own_batch(self) -> None:
        """Waits until this host has read its next batch, or its stream or the votes have ended.

        The votes end before the stream if another host has ended or failed.
        """
        self._read.wake()  # the loop has taken a batch, so a vote may be due: `_is_worth_a_vote`

        def need_not_wait() -> bool:
            own, votes = self._read.known(), self._voting.known()
            return own.results > self.taken or own.end is not None or votes.end is not None

        self._read.wait_for(need_not_wait, on_wait=self._on_wait)

    def _wait_for_votes(self) -> None:
        """Waits until all hosts have agreed to hand out the next batch.

        Raises:
            StopIteration: All hosts end, or the iterator was stopped.
            AgreementError: The process of a host has ended, a host is late, or a stream ended early
                and `decide` makes that an error.
            BaseException: The error of this host's stream, in place of its next batch.
        """
        with counted_by(self._counter), span(AGREE):
            while self._agreed <= self.taken:
                self._agreed = next(self._voting)

    def stop(self) -> None:
        self._voting.stop()
        self._on_devices.stop()

    def close(self) -> None:
        self._voting.stop()
        try:
            self._on_devices.close()
        finally:
            self._voting.close()
