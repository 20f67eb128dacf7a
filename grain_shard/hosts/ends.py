"""When streams end: no host takes a step that another one does not take.

Hosts whose streams end at different batches would leave each other waiting in a collective for
ever. So the hosts vote: each says how many batches it has ready, and `decide` makes of all votes
how many of them every host may hand out before they vote again. A stream that has ended votes 0.

The vote is taken in the background, by the thread that goes on to put the batches on the devices,
as many batches ahead of the training step as there is room for. So the step waits for a vote only
where it would have to wait for the data, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from grain_shard.background import Producer, TaskStage
from grain_shard.errors import describe_error
from grain_shard.hosts.compare import Answers
from grain_shard.hosts.rounds import Rounds
from grain_shard.spans import AGREE, span
from grain_shard.trees import Batch

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


class AgreedEnd(Producer[tuple[Batch, Any]]):
    """Hands out a host's batches until the end that all hosts have agreed on.

    Args:
        batches: (batch, position) of this host.
        rounds: The series of rounds in which the hosts vote.
        remainder: As for `decide`.
        same_rows: As for `decide`.
        first_digest: The digest of this host's first whole batch, once it has been read; "" where
            hosts have different batches.
        position: Where this host's stream starts.
        past_end: From a position to that after one more batch of padding.
        template: Makes a batch like this host's, if its stream ends at once.
        padding_like: Makes a batch of padding that looks like another batch.
        waited_s: How long the training loop has been waiting for a batch, in seconds.
    """

    def __init__(
        self,
        batches: TaskStage[tuple[Batch, Any]],
        rounds: Rounds,
        *,
        remainder: str,
        same_rows: bool,
        first_digest: Callable[[], str] = lambda: "",
        position: Any,
        past_end: Callable[[Any], Any],
        template: Callable[[], Batch],
        padding_like: Callable[[Batch], Batch],
        waited_s: Callable[[], float],
    ):
        self._batches, self._rounds, self._waited_s = batches, rounds, waited_s
        self._decide = functools.partial(decide, remainder, same_rows)
        self._first_digest, self._past_end = first_digest, past_end
        self._template, self._padding_like = template, padding_like
        self._votes = 0
        self._agreed = 0  # batches that may still be handed out before the next vote
        self._ended = self._stopped = False
        self._last, self._position = None, position

    def __next__(self) -> tuple[Batch, Any]:
        if not self._agreed:
            self._agreed = self._vote()
            if not self._agreed:
                raise StopIteration
        self._agreed -= 1
        if self._ended:
            batch = self._template() if self._last is None else self._last
            self._last = self._padding_like(batch)
            self._position = self._past_end(self._position)
        else:
            self._last, self._position = next(self._batches)
        return self._last, self._position

    def _vote(self) -> int:
        """How many batches may be handed out; 0 at the end, or if this stage was stopped."""
        name = str(self._votes)
        try:
            ready = 0 if self._ended else self._batches.ready()
        except BaseException as error:
            # Does not wait for the others: whoever raises this is gone from the rounds.
            self._rounds.fail(name, describe_error(error), self._decide)
            raise
        if self._stopped:
            return 0
        self._ended = ready == 0
        digest = self._first_digest() if self._votes == 0 else ""
        self._rounds.post(name, [ready, digest])
        with span(AGREE):
            verdict = self._rounds.verdict(
                name, self._decide, waited_s=self._waited_s, stopped=lambda: self._stopped
            )
        if verdict is None:  # stopped, while others may still have to read the last verdict
            return 0
        # Who has voted now has read the verdict of the vote before.
        self._rounds.forget(str(self._votes - 1))
        self._votes += 1
        return verdict

    def stop(self) -> None:
        self._stopped = True
        self._batches.stop()

    def close(self) -> None:
        self._batches.close()
