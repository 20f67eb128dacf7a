"""When streams end: no host takes a step that another one does not take.

Hosts whose streams end at different batches would leave each other waiting in a collective for
ever. So before a batch is handed out, the hosts have agreed that all of them hand it out. A thread
of each host votes ahead of the training loop, by rounds over the key-value store (`rounds.py`): it
says how many more batches this host knows itself to have, those in its buffers included, and all
hosts hand out as many as `decide` makes of the votes. The training loop waits for a vote only where
it has used up everything that was agreed on.

All hosts hold the same votes in the same order. A host votes when it knows a batch beyond those
agreed on, or its end, so every vote either lets the loops go on or is the last one.
"""

from __future__ import annotations

import contextlib
import functools
import math
import time
from collections.abc import Callable
from typing import Any, TypeVar

from grain_shard.background import Background, TaskStage
from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts.absences import Absences
from grain_shard.hosts.compare import Answers
from grain_shard.hosts.rounds import Rounds
from grain_shard.spans import AGREE, counted_by, counter, span
from grain_shard.tasks import Known, Producer, Raised, Results

T = TypeVar("T")

# The longest sleep, in seconds, of a thread that waits for batches to vote about.
_SLICE_S = 0.5


def decide(remainder: str, same_rows: bool, answers: Answers) -> int | dict[str, str]:
    """Returns the verdict on the votes of all hosts.

    Args:
        remainder: The treatment of a host whose stream has ended: it goes on with batches of
            padding until the last stream ends ("pad"), ends the others ("drop"), or is an error
            ("error").
        same_rows: True if every host produces the same batches, so that all have to end at once.
        answers: Number of batches that each host has ready, by host; 0 if its stream has ended.

    Returns:
        The number of batches that every host hands out before the next vote, 0 if all end here; or
        ``{"error": message}``.

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
    """This host's votes. Each item is the number of batches that the hosts have agreed on so far.

    Only the thread that votes changes the attributes, except `handed_out`: the training loop
    changes it.

    Args:
        placed: As for `AgreedEnd`.
        read: As for `AgreedEnd`.
        rounds: As for `AgreedEnd`.
        decide: Makes a verdict of all votes.

    Attributes:
        agreed: Number of batches that all hosts hand out, from the first one on.
        handed_out: Number of batches that the training loop has got.
        number: Number of votes that are over.
        absences: The hosts that will not vote.
    """

    def __init__(
        self,
        placed: TaskStage[Any],
        read: TaskStage[Any],
        rounds: Rounds,
        decide: Callable[[Answers], Any],
    ):
        self._placed, self._read = placed, read
        self._rounds, self._decide = rounds, decide
        self.absences = Absences(rounds)
        self.agreed = self.handed_out = self.number = 0
        self._stopped = self._is_over = False

    def known(self) -> Known:
        """Returns how many batches this host has by now, and the error or end behind them."""
        placed = self._placed.known()
        # A batch may well be there and not fit the devices. The reads know the end first.
        failed = placed.end is not None and not isinstance(placed.end, StopIteration)
        return placed if failed else self._read.known()

    def wait_for_own(self, is_enough: Callable[[Known], bool], wait_s: float) -> bool | None:
        """Waits for this host's batches, as `TaskStage.wait_for` does."""
        # The first batch must be on the devices, where it is found out whether it fits.
        stage = self._read if self.agreed else self._placed
        return stage.wait_for(lambda: is_enough(stage.known()), wait_s)

    def loop_waits(self, waits: bool) -> None:
        """Notes that the loop has used up the batches agreed on and waits; or waits no longer."""
        self.absences.loop_waits_since = time.monotonic() if waits else None
        if waits:
            self._read.wake()  # for `_is_worth_a_vote`

    def __next__(self) -> int:
        self._is_over = True  # stays so after an error, of which the others learn otherwise
        more = self._vote(str(self.number))
        self._is_over = more == 0
        if not more:
            raise StopIteration
        self.agreed += more
        self.number += 1
        return self.agreed

    def _vote(self, round_: str) -> int | None:
        """Votes, once there is something to vote about; returns the verdict, None if stopped."""
        known = self._wait_for_batches(round_)
        if known is None:
            return None
        ready = known.results - self.agreed
        if ready <= 0 and known.end is not None and not isinstance(known.end, StopIteration):
            # If a batch that was agreed on fails, the alarm tells the other hosts, because they
            # wait for it in a collective and not in a vote.
            if ready == 0:
                with contextlib.suppress(AgreementError):  # the store is gone
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
            # All hosts have voted again, so they have read the verdict before.
            self._rounds.forget(str(self.number - 1))
        return more

    def _wait_for_batches(self, round_: str) -> Known | None:
        """Returns the batches once they are worth a vote; None if this was stopped."""
        while True:
            came = self.wait_for_own(self._is_worth_a_vote, _SLICE_S)
            known = self.known()
            if known.end is not None or (came and known.results > self.agreed):
                return known
            if self._stopped or came is False:
                return None
            self.absences.without_data(round_)

    def _is_worth_a_vote(self, known: Known) -> bool:
        """Returns whether at least as many batches are new as are left of those agreed on.

        A vote about fewer batches would have to be followed by the next one sooner. One about more
        would leave the loop fewer steps until the verdict is needed.
        """
        new, left = known.results - self.agreed, self.agreed - self.handed_out
        return known.end is not None or new >= max(1, left)

    def stop(self) -> None:
        self._stopped = True

    def close(self) -> None:
        if not self._is_over:
            self.absences.leave()


class AgreedEnd(Results[T]):
    """Hands out global batches until the end that all hosts have agreed on.

    An interrupt, such as Ctrl-C, may come at any place. The next call then goes on where the
    interrupt came, because another thread votes.

    Args:
        placed: This host's batches, on the devices.
        read: The same before they are put there; `placed` takes them from it.
        rounds: The series of rounds in which the hosts vote.
        remainder: As for `decide`.
        same_rows: As for `decide`.
        padding: Makes a batch of padding, on the devices; its argument is the number of batches of
            padding before it.
    """

    def __init__(
        self,
        placed: TaskStage[T],
        read: TaskStage[Any],
        rounds: Rounds,
        *,
        remainder: str,
        same_rows: bool,
        padding: Callable[[int], T],
    ):
        decider = functools.partial(decide, remainder, same_rows)
        self._placed, self._padding, self._counter = placed, padding, counter()
        self._votes = _Votes(placed, read, rounds, decider)
        self._agreed = 0
        self._final: Raised | None = None
        self._voting = Background(
            lambda agreed: agreed, self._votes, buffer_size=2, name="grain-shard-agreement"
        )

    def start(self) -> None:
        """Starts working ahead."""
        self._placed.start()
        self._voting.start()

    @property
    def taken(self) -> int:
        return self._votes.handed_out

    def peek(self) -> T:
        if self._final is not None:
            self._final.throw()
        if self._agreed <= self.taken:
            self._wait_for_verdict()
        known, taken = self._votes.known(), self.taken
        if known.results > taken or not isinstance(known.end, StopIteration):
            return self._placed.peek()
        try:
            return self._padding(taken - known.results)
        except Exception as error:
            self._final = Raised(error, error.__traceback__)
            raise

    def release(self, taken: int) -> None:
        self._votes.handed_out = taken
        self._placed.release(min(taken, self._placed.known().results))

    def _wait_for_verdict(self) -> None:
        """Waits until all hosts hand out the next batch.

        Raises:
            StopIteration: All hosts end here, or this one was stopped.
            AgreementError: The hosts cannot go on.
        """
        taken = self.taken
        self.start()
        self._voting.release(self._voting.taken)  # again, if an interrupt came in the last release

        def need_not_wait(own: Known) -> bool:
            # The votes end without a batch of this host if the others have given up on it.
            ends = own.end, self._voting.known().end
            return own.results > taken or ends != (None, None)

        try:
            self._votes.loop_waits(True)
            self._votes.wait_for_own(need_not_wait, math.inf)
            with counted_by(self._counter), span(AGREE):  # from now on it waits for the others
                while self._agreed <= taken:
                    # In this order, so that an interrupt loses no verdict.
                    self._agreed = self._voting.peek()
                    self._voting.release(self._voting.taken + 1)
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
