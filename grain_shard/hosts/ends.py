"""`AgreedEnd`: the batches of streams, which all hosts end after the same number of batches.

If the stream of one host ended earlier, the other hosts would wait for it in a collective for ever.
So a batch is handed out only after all hosts have agreed to hand it out. They agree by votes, which
are rounds over the key-value store (`rounds.py`). A thread of each host votes ahead of the training
loop. It says how many batches this host has ready, and `decide` computes from all votes the number
of batches that every host hands out next. The training loop waits for a vote only after it has used
up the batches agreed on.

All hosts take part in the same votes in the same order. A host votes once it has a new batch ready
or has reached its end. So after each vote the training loops can go on, or the streams end.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any, TypeVar

from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts.absences import Absences
from grain_shard.hosts.compare import Answers
from grain_shard.hosts.rounds import Rounds
from grain_shard.spans import AGREE, counted_by, counter, span
from grain_shard.threads.background import Background, in_background
from grain_shard.threads.tasks import Known, Producer

T = TypeVar("T")

# Most seconds that the voting thread waits for batches in one call. Between two calls it checks if
# it was stopped, and if it has to tell the other hosts that this host still waits for data.
_SLICE_S = 0.5


def decide(remainder: str, same_rows: bool, answers: Answers) -> int | dict[str, str]:
    """Returns the verdict on the votes of all hosts.

    Args:
        remainder: The treatment of a host whose stream has ended before other streams. With "pad"
            the host goes on with batches of padding until the last stream ends. With "drop" all
            hosts end. With "error" all hosts raise an error.
        same_rows: True if every host produces the same batches. If only some of the streams have
            ended, all hosts then raise an error, whatever `remainder` is.
        answers: Number of batches that each host has ready, by host; 0 if its stream has ended.

    Returns:
        The number of batches that every host hands out before the next vote. It is 0 if all hosts
        end. An error is ``{"error": message}``.

    Example:
        >>> decide("pad", False, {0: 4, 1: 2, 2: 0})
        2
        >>> decide("drop", False, {0: 4, 1: 2, 2: 0})
        0
    """
    ended = [host for host, ready in answers.items() if ready == 0]
    if len(ended) in (0, len(answers)):
        return min(answers.values())
    problem = (
        f"the streams of {len(ended)} of {len(answers)} hosts (the first: host {ended[0]}) end"
        " earlier than the streams of the other hosts."
    )
    if same_rows:
        return {
            "error": 'with rows="global" every host must produce the same batches, but'
            f" {problem}\n"
            "  remedy: read the same files with the same seed on every host, or shard the source by"
            ' grain_shard.ShardByMesh and pass rows="local".'
        }
    if remainder == "error":
        remedy = 'pass remainder="pad" (adds zeros and a mask) or remainder="drop".'
        return {"error": f"{problem}\n  remedy: {remedy}"}
    return min(filter(None, answers.values())) if remainder == "pad" else 0


class _Votes(Producer[int]):
    """Takes part in the votes for this host.

    Each item is the number of batches that all hosts have agreed to hand out, counted from the
    first batch. The voting thread changes the attributes. Only `handed_out` is changed by the
    training loop.

    Args:
        read: This host's batches in host memory. A batch counts as ready once it is read, even
            before it is on the devices.
        rounds: The rounds in which the hosts vote.
        decide: Returns the verdict on the votes of all hosts.

    Attributes:
        agreed: Number of batches that all hosts have agreed to hand out.
        handed_out: Number of batches that the training loop has got.
        number: Number of votes that are over.
        absences: Finds the hosts that will not vote.
    """

    def __init__(self, read: Background[Any], rounds: Rounds, decide: Callable[[Answers], Any]):
        self._read, self._rounds, self._decide = read, rounds, decide
        self.absences = Absences(rounds)
        self.agreed = self.handed_out = self.number = 0
        self._stopped = False

    def loop_waits(self, waits: bool) -> None:
        """Notes that the training loop begins to wait for a vote, or ends its wait.

        Args:
            waits: True if the loop has used up the batches agreed on, and waits.
        """
        self.absences.loop_waits_since = time.monotonic() if waits else None
        if waits:
            self._read.wake()  # `_is_worth_a_vote` may return True now

    def __next__(self) -> int:
        more = self._vote(str(self.number))
        if not more:
            raise StopIteration
        self.agreed += more
        self.number += 1
        return self.agreed

    def _vote(self, round_: str) -> int | None:
        """Waits for batches and takes part in one vote.

        Args:
            round_: The round of the vote.

        Returns:
            The number of batches that every host hands out next, 0 at the end; None if the iterator
            was stopped.

        Raises:
            BaseException: The error that follows this host's batches, if all of these batches are
                agreed on.
            AgreementError: The verdict is an error.
        """
        known = self._wait_for_batches(round_)
        if known is None:
            return None
        ready = known.results - self.agreed
        if ready <= 0 and known.end is not None and not isinstance(known.end, StopIteration):
            with contextlib.suppress(AgreementError):  # raised if the store is gone
                self._rounds.fail(round_, describe_error(known.end))
            raise known.end
        self._rounds.put(round_, max(0, ready))
        more = self._rounds.verdict(
            round_,
            self._decide,
            absent=lambda: self.absences.absent(round_, is_first=not self.number),
            stopped=lambda: self._stopped,
        )
        if more and self.number:
            # All hosts have voted again, so all have read the previous verdict.
            self._rounds.forget(str(self.number - 1))
        return more

    def _wait_for_batches(self, round_: str) -> Known | None:
        """Waits for new batches, or for the end, to vote on.

        Args:
            round_: The round of the next vote.

        Returns:
            The batches known by then; None if the iterator was stopped.
        """
        while not (came := self._read.wait_for(self._is_worth_a_vote, _SLICE_S)):
            if self._stopped or came is False:
                return None
            self.absences.without_data(round_)
        return self._read.known()

    def _is_worth_a_vote(self) -> bool:
        """Returns True if a vote about the new batches is due.

        It is due once the end is known, or once there are as many new batches as agreed batches
        that the loop has not got yet, and at least one. An earlier vote agrees on fewer batches, so
        more votes are needed. A later vote leaves less time before the training loop needs the
        verdict.
        """
        known = self._read.known()
        new, left = known.results - self.agreed, self.agreed - self.handed_out
        return known.end is not None or new >= max(1, left)

    def stop(self) -> None:
        self._stopped = True


class AgreedEnd(Producer[T]):
    """Hands out global batches up to the end on which all hosts agree.

    Args:
        placed: This host's batches, on the devices.
        read: This host's batches in host memory, from which `placed` is made.
        rounds: The rounds in which the hosts vote.
        remainder: The treatment of a host whose stream has ended: "pad", "drop" or "error"; see
            `decide`.
        same_rows: True if every host produces the same batches, so that all have to end at once.
        padding: Returns a batch of padding on the devices. Its argument is the number of batches of
            padding before this one.
        on_wait: Called about once a second while the loop waits for data of this host, with the
            seconds that the wait has lasted; None for no call.
    """

    def __init__(
        self,
        placed: Background[T],
        read: Background[Any],
        rounds: Rounds,
        *,
        remainder: str,
        same_rows: bool,
        padding: Callable[[int], T],
        on_wait: Callable[[float], None] | None = None,
    ):
        decider = functools.partial(decide, remainder, same_rows)
        self._placed, self._read, self._padding = placed, read, padding
        self._on_wait = on_wait
        self._counter, self._votes = counter(), _Votes(read, rounds, decider)
        self._agreed = 0
        self._voting = in_background(
            lambda agreed: agreed, self._votes, buffer_size=2, name="grain-shard-agreement"
        )

    def start(self) -> None:
        """Starts the threads that make batches and vote."""
        self._placed.start()
        self._voting.start()

    @property
    def taken(self) -> int:
        return self._votes.handed_out

    def __next__(self) -> T:
        if self._agreed <= self.taken:
            self._wait_for_verdict()
        known, taken = self._read.known(), self.taken
        if known.results > taken or not isinstance(known.end, StopIteration):
            batch = next(self._placed)
        else:
            batch = self._padding(taken - known.results)
        self._votes.handed_out += 1
        return batch

    def _wait_for_verdict(self) -> None:
        """Waits until all hosts have agreed to hand out the next batch.

        Raises:
            StopIteration: All hosts end, or the iterator was stopped.
            AgreementError: A host has failed or is late, or a stream ended early and `decide` makes
                that an error.
        """
        taken = self.taken
        self.start()

        def need_not_wait() -> bool:
            # The votes may end before this host has a batch, if the other hosts stopped waiting.
            own, votes = self._read.known(), self._voting.known()
            return own.results > taken or (own.end, votes.end) != (None, None)

        try:
            self._votes.loop_waits(True)
            self._read.wait_for(need_not_wait, on_wait=self._on_wait)
            # From here on this host waits only for the votes of other hosts.
            with counted_by(self._counter), span(AGREE):
                while self._agreed <= taken:
                    self._agreed = next(self._voting)
        except StopIteration:
            own = self._read.known()
            if own.end is not None and own.results <= taken:
                next(self._placed)  # raises its end, which may be an error of a later comparison
            raise
        finally:
            self._votes.loop_waits(False)

    def stop(self) -> None:
        self._voting.stop()
        self._placed.stop()

    def close(self) -> None:
        self._voting.stop()
        try:
            self._placed.close()
        finally:
            self._voting.close()
