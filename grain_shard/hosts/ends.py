"""When streams end: no host takes a step that another one does not take.

Hosts whose streams end at different batches would leave each other waiting in a collective for
ever. So before a batch is handed out, the hosts have agreed that all of them hand it out. Each says
how many batches it knows itself to have, those that wait in its buffers included. The least of that
is how many all may hand out (`minimum.py`): `follow` makes of it what is agreed. A host asks ahead
of time and reads the answer some batches later, so the training loop waits only where it would have
to wait for the data, too.

Numbers say nothing about what has gone wrong. Where a host fails, where streams end that should
not, and once at the beginning, before the first collective, the hosts tell each other in words, by
a round over the key-value store (`decide`).
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from absl import logging

from grain_shard.background import TaskStage
from grain_shard.errors import describe_error
from grain_shard.hosts.absences import Absences
from grain_shard.hosts.compare import Answers
from grain_shard.hosts.minimum import LARGEST, Minimum, Question, Way
from grain_shard.hosts.rounds import Rounds
from grain_shard.spans import AGREE, counted_by, counter, span
from grain_shard.tasks import Known, Producer, Raised

T = TypeVar("T")

# So many batches after a question was asked, its answer is read. Until then the store has answered,
# or the devices have done the steps before it, with which they were busy when it was asked. The
# more there are, the more often hosts ask: an answer is about what the buffers hold, by default six
# batches.
_READ_AFTER = 2
# How often a host that waits for the others looks whether it was stopped.
_SLICE_S = 0.5
# How long it waits before it looks again why another one does not come, in terms of its patience.
_LOOK_AGAIN = 0.1
# How long the training loop of another host may be busy with something else, in the same terms.
_LOOPS_MAY_TAKE = 10

_READ_THE_SAME = "read the same files with the same seed on every host"
_OR_LOCAL = 'or shard the source by grain_shard.ShardByMesh and pass rows="local".'


def decide(remainder: str, same_rows: bool, answers: Answers) -> int | dict[str, str]:
    """What follows from the votes of all hosts.

    Args:
        remainder: Whether a host whose stream has ended goes on with batches of padding until the
            last one ends ("pad"), ends the others ("drop"), or is an error ("error").
        same_rows: Whether every host produces the same batches, so that all have to end at once.
        answers: Of each host ``[batches, digest]``: how many batches it has ready, 0 if its stream
            has ended, and a digest of its first whole batch ("" if it gives none). Or
            ``{"failed": text}``.

    Returns:
        How many batches every host hands out before the next vote, 0 if all end here; or
        ``{"error": message}``.

    Example:
        >>> decide("pad", False, {0: [4, ""], 1: [2, ""], 2: [0, ""]})
        2
        >>> decide("drop", False, {0: [4, ""], 1: [2, ""], 2: [0, ""]})
        0
    """
    failed = {host: vote["failed"] for host, vote in answers.items() if isinstance(vote, dict)}
    if failed:
        lines = [f"  host {host}: {text}" for host, text in failed.items()]
        return {"error": "\n".join(["a host's stream failed.", *lines])}
    ready = {host: batches for host, (batches, _) in answers.items()}
    # A host without a digest has another setting of `rows`; the agreement at the start says so.
    digests = {host: digest for host, (_, digest) in answers.items() if digest}
    if same_rows and len(set(digests.values())) > 1:
        first = next(iter(digests))
        other = next(host for host, digest in digests.items() if digest != digests[first])
        return {
            "error": 'rows="global" says that every host produces the same batches, and the first'
            f" batches of hosts {first} and {other} differ.\n"
            f"  remedy: {_READ_THE_SAME}, {_OR_LOCAL}"
        }
    ended = [host for host, batches in ready.items() if batches == 0]
    if not ended:
        return min(ready.values())
    if len(ended) == len(ready):
        return 0
    too_early = (
        f"the streams of {len(ended)} of {len(ready)} hosts (the first: host {ended[0]}) end"
        " earlier than the others."
    )
    if same_rows:
        return {
            "error": 'rows="global" says that every host produces the same batches, and'
            f" {too_early}\n  remedy: read the same files on every host, {_OR_LOCAL}"
        }
    if remainder == "error":
        return {
            "error": f"{too_early}\n"
            '  remedy: pass remainder="pad" (zeros and a mask) or remainder="drop".'
        }
    return min(filter(None, ready.values())) if remainder == "pad" else 0


class Vote(NamedTuple):
    """What a host knows of its batches; or of all hosts' votes, the least of each number.

    Attributes:
        batches: How many it has or has had. Where it may go on with padding once they end, and they
            have ended, there is no limit.
        end: After how many they end, if that is known.
        minus_end: The same with a minus, so that the least tells which host ends last.
        failure: After how many it fails, if that is known.
    """

    batches: int
    end: int
    minus_end: int
    failure: int

    @classmethod
    def of(cls, known: Known, pads: bool) -> Vote:
        """What a host says that knows this.

        Args:
            known: Of its batches.
            pads: Whether it goes on with padding when they have ended.
        """
        ended = isinstance(known.end, StopIteration)
        failed = known.end is not None and not ended
        end = known.results if ended else LARGEST
        return cls(
            batches=LARGEST if ended and pads else known.results,
            end=end,
            minus_end=-end,
            failure=known.results if failed else LARGEST,
        )

    @property
    def most(self) -> int:
        """Of all hosts' votes: how many batches all of them can hand out."""
        last_end = -self.minus_end
        return min(last_end if self.batches == LARGEST else self.batches, self.failure)


def follow(ends_with_first: bool, handed_out: int, least: Vote) -> int | None:
    """What follows from the votes of all hosts, where each knows what comes after the last batch.

    Args:
        ends_with_first: Whether the host whose stream ends first ends all others.
        handed_out: How many batches every host has handed out.
        least: The least of what they say.

    Returns:
        How many they may have handed out before they have to vote again; `handed_out` if all end
        here; None if only words can tell what has happened.

    Example:
        >>> hosts = [Vote.of(Known(4, None), True), Vote.of(Known(2, StopIteration()), True)]
        >>> follow(False, 2, Vote(*map(min, zip(*hosts))))
        4
    """
    if least.failure <= handed_out:
        return None
    if least.most > handed_out or ends_with_first or -least.minus_end <= handed_out:
        return least.most
    return None


class AgreedEnd(Producer[T]):
    """Hands out global batches until the end that all hosts have agreed on.

    To be asked by the thread of the training loop, as it may ask the devices.

    Args:
        placed: This host's batches, on the devices.
        read: The same before they are put there; what `placed` takes them from.
        rounds: The series of rounds in which the hosts talk.
        way: By which they vote.
        remainder: As for `decide`.
        same_rows: As for `decide`.
        first_digest: The digest of this host's first whole batch, once it has been read; "" where
            hosts have different batches.
        padding: Makes another batch of padding, on the devices.
    """

    def __init__(
        self,
        placed: TaskStage[T],
        read: TaskStage[Any],
        rounds: Rounds,
        way: Way,
        *,
        remainder: str,
        same_rows: bool,
        first_digest: Callable[[], str] = lambda: "",
        padding: Callable[[], T],
    ):
        self._placed, self._read, self._rounds = placed, read, rounds
        self._absences = Absences(rounds)
        # Its thread tells the others if this iterator is closed, or forgotten, before the end.
        self._minimum = Minimum(way, at_end=self._absences.leave)
        self._decide = functools.partial(decide, remainder, same_rows)
        self._pads = remainder == "pad" and not same_rows
        self._ends_with_first = remainder == "drop" and not same_rows
        self._timeout_s, self._first_digest = rounds.timeout_s, first_digest
        self._padding = padding
        self._counter = counter()
        self._in_words = 0  # votes
        self._posted = ""  # the last of these for which this host has spoken
        self._asked: Question | None = None
        # Of it: when as many batches were handed out, the answer is read; and whether it was asked
        # where nothing was agreed any more, and each host knew what comes next.
        self._read_at, self._where_all_know = 0, False
        self._agreed = self._padded = 0  # batches
        self._stopped = False
        self._final: Raised | None = None

    def start(self) -> None:
        """Starts working ahead."""
        self._placed.start()
        self._minimum.start()

    def __next__(self) -> T:
        if self._final is not None:
            self._final.throw()
        try:
            if not self._agree():
                raise StopIteration
            batch = self._take()
        except Exception as error:
            self._absences.is_over = True  # all hosts have ended, or learn it otherwise
            self._minimum.stop()
            self._final = Raised(error, error.__traceback__)
            raise
        return batch

    @property
    def _handed_out(self) -> int:
        return self._placed.taken + self._padded

    def _take(self) -> T:
        known = self._known()
        if known.results <= self._handed_out and isinstance(known.end, StopIteration):
            padding = self._padding()
            self._padded += 1
            return padding
        return next(self._placed)

    def _agree(self) -> bool:
        """Whether all hosts hand out another batch; not if this one was stopped, either.

        An interrupt, such as Ctrl-C, may leave it anywhere. The next call goes on there: it asks no
        question twice, which the other hosts would not answer.
        """
        if not self._in_words:
            # Before the first collective, since these hosts may not even run the same program.
            if not self._wait_for_own():
                return False
            self._agreed = self._vote_in_words()
            if self._agreed == 0:
                return False
        while self._asked is not None or self._agreed == self._handed_out:
            all_used = self._agreed == self._handed_out
            if self._asked is None:
                if not self._wait_for_own():
                    return False
                self._ask(where_all_know=True)
            elif all_used or self._handed_out >= self._read_at:
                if not self._read_answer():
                    return False
                if self._where_all_know and self._agreed == self._handed_out:
                    return False
            else:
                break
        if self._asked is None and self._agreed - self._handed_out <= _READ_AFTER:
            self._ask(where_all_know=False)
        if self._asked is None:
            return True
        self._minimum.ask(self._asked)
        return self._wait_for_others(self._asked.begun)

    def _known(self, wait_s: float = 0.0) -> Known:
        """What this host knows of its batches."""
        placed = self._placed.known(wait_s)
        # A batch may well be there and not fit the devices; the end is known from what is read.
        failed = placed.end is not None and not isinstance(placed.end, StopIteration)
        return placed if failed else self._read.known()

    def _wait_for_own(self) -> bool:
        """Waits until this host knows what comes next; False if it was stopped."""

        def has_come(wait_s: float) -> bool:
            known = self._known(wait_s)
            if known.end is None:
                # Its first batch must be on the devices, where it is found out whether it fits.
                known = self._placed.known()
            return known.results > self._handed_out or known.end is not None

        return has_come(0.0) or self._wait(has_come, waits_for_own=True)

    def _ask(self, where_all_know: bool) -> None:
        """What to ask all hosts, each of which may know what comes after what was handed out."""
        self._where_all_know = where_all_know
        self._read_at = self._handed_out + _READ_AFTER
        self._asked = Question(Vote.of(self._known(), self._pads))

    def _read_answer(self) -> bool:
        """Follows what all hosts have said; False if this one was stopped."""
        assert self._asked is not None
        self._minimum.ask(self._asked)
        if not self._wait_for_others(self._asked.answered):
            return False
        least = Vote(*self._minimum.least(self._asked))
        agreed: int | None = max(self._agreed, least.most)
        if self._where_all_know:
            agreed = follow(self._ends_with_first, self._handed_out, least)
            if agreed is None:
                agreed = self._handed_out + self._vote_in_words()
        self._agreed, self._asked = agreed, None
        return True

    def _vote_in_words(self) -> int:
        """How many batches may be handed out; 0 at the end, or if this host was stopped."""
        name = str(self._in_words)
        if self._posted != name:
            known = self._known()
            ready = known.results - self._handed_out
            if not ready and known.end is not None and not isinstance(known.end, StopIteration):
                # Does not wait for the others: whoever raises this is gone from the rounds.
                self._rounds.fail(name, describe_error(known.end), self._decide)
                next(self._placed)
                raise AssertionError("a stage that has failed gave a batch")
            digest = "" if self._handed_out else self._first_digest()
            self._rounds.post(name, [max(0, ready), digest])
            self._posted = name
        with counted_by(self._counter), span(AGREE):
            verdict = self._rounds.verdict(name, self._decide, stopped=lambda: self._stopped)
        if verdict is None:
            return 0
        self._in_words += 1
        return verdict

    def _wait_for_others(self, has_come: threading.Event) -> bool:
        """Waits for what needs all hosts; False if this one was stopped."""
        if has_come.is_set():
            return not self._stopped  # to one that was stopped it has come without an answer
        with counted_by(self._counter), span(AGREE):
            return self._wait(has_come.wait, waits_for_own=False)

    def _wait(self, has_come: Callable[[float], bool], *, waits_for_own: bool) -> bool:
        """Waits for something; False if this host was stopped.

        Args:
            has_come: Waits so many seconds at most; whether it has come.
            waits_for_own: Whether it is this host's own data, for which others may be waiting.

        Raises:
            HostTimeoutError: This host waits in vain, or others have waited in vain for it.
        """
        start = time.monotonic()
        look_at_s = warn_at_s = self._timeout_s
        end_s = math.inf if waits_for_own else _LOOPS_MAY_TAKE * self._timeout_s
        while not has_come(_SLICE_S) and not self._stopped:
            waited_s = time.monotonic() - start
            if waited_s >= warn_at_s:
                warn_at_s += self._timeout_s
                what = "data of its own" if waits_for_own else "another host's training loop"
                logging.warning("grain_shard: this host has waited %.0f s for %s", waited_s, what)
            if waited_s >= look_at_s:
                look_at_s = waited_s + _LOOK_AGAIN * self._timeout_s
                self._absences.look(waits_for_own, gives_up=waited_s >= end_s)
        if warn_at_s > self._timeout_s and not self._stopped:
            self._absences.come_back(waits_for_own)
        return not self._stopped

    def stop(self) -> None:
        self._stopped = True
        self._placed.stop()
        self._minimum.stop()

    def close(self) -> None:
        try:
            self._placed.close()
        finally:
            self._minimum.close()
