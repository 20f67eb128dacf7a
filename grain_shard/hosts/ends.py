"""When streams end: no host takes a step that another one does not take.

Hosts whose streams end at different batches would leave each other waiting in a collective for
ever. So batch k is handed out once all hosts have said whether they have it. The thread that makes
a batch posts so at once, and a thread of its own reads the verdicts. Both are as many batches ahead
of the training step as there is room for on host and devices, so it waits for neither.

With ``remainder="drop"`` all stop where the first stream ends. With ``"pad"`` a host whose stream
has ended goes on with batches of padding until the last one ends, so nothing is lost.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from grain_shard.background import Background
from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts.compare import Answers
from grain_shard.hosts.rounds import Rounds
from grain_shard.trees import Batch

BATCH, END = "batch", "end"
# Rounds that are kept for a host whose thread has not yet come to read the verdict.
_KEPT_ROUNDS = 1024


class Announced(Iterator[Any]):
    """A stream that posts, for each batch, that this host has it; and its end, or its failure.

    Args:
        stream: The stream.
        rounds: The series to post to.
        first_digest: Of the whole first batch, once that is there, if other hosts have the same.
    """

    def __init__(self, stream: Iterator[Any], rounds: Rounds, first_digest: Callable[[], str]):
        self._stream, self._rounds, self._next = stream, rounds, 0
        self._first_digest = first_digest

    def __next__(self) -> Any:
        answer: Any = {"failed": "without a word"}
        try:
            item = next(self._stream)
            answer = [BATCH, self._first_digest()] if self._next == 0 else BATCH
            return item
        except StopIteration:
            answer = END
            raise
        except BaseException as error:
            answer = {"failed": describe_error(error)}
            raise
        finally:
            try:
                self._rounds.post(str(self._next), answer)
            finally:
                self._rounds.posted.put(answer)
            self._next += 1

    def close(self) -> None:
        self._stream.close()  # pyright: ignore[reportAttributeAccessIssue]


class AgreedEnd(Iterator[tuple[Batch, Any]]):
    """Hands out a host's batches until the end that all hosts have agreed on.

    Args:
        batches: (batch, position) of this host, from an `Announced` stream.
        rounds: The series that it posts to.
        pads: Whether hosts that have ended go on with padding until the last one ends.
        same_rows: Whether every host produces the same batches, so that all have to end at once.
        must_end_together: Whether it is an error if one host has a batch and another has none.
        position: Where this host's stream starts.
        past_end: From a position to that after one more batch of padding.
        template: Makes a batch like this host's, if its stream ends at once.
        waited_s: How long the training loop has been waiting for a batch, in seconds.
    """

    def __init__(
        self,
        batches: Any,
        rounds: Rounds,
        *,
        pads: bool,
        same_rows: bool,
        must_end_together: bool = False,
        position: Any,
        past_end: Callable[[Any], Any] = lambda position: position,
        template: Callable[[], Batch],
        waited_s: Callable[[], float],
    ):
        self._batches, self._template, self._past_end = batches, template, past_end
        decide = _Decide(pads, same_rows, must_end_together)
        self._verdicts = Background(
            lambda verdict: verdict,
            _Verdicts(rounds, decide, waited_s),
            buffer_size=sys.maxsize,  # as far as the batches are; they are what is bounded
            name="grain-shard-agreement",
        )
        self._ended = self._stopped = False
        self._last, self._position = None, position

    def __next__(self) -> tuple[Batch, Any]:
        item, failure = None, None
        self._verdicts.start()
        if not self._ended:
            try:
                item = next(self._batches)
            except StopIteration:
                if self._stopped:
                    raise
                self._ended = True
            except BaseException as error:
                failure = error
        try:
            verdict = next(self._verdicts)
        except AgreementError:
            if failure is not None:
                raise failure from None  # this is the host that failed
            raise
        if failure is not None:
            raise failure
        if verdict != BATCH:
            raise StopIteration
        if item is None:
            batch = self._template() if self._last is None else self._last
            self._last = jax.tree.map(_padding, batch)  # zeros, so the mask is False
            self._position = self._past_end(self._position)
        else:
            self._last, self._position = item
        return self._last, self._position

    def stop(self) -> None:
        self._stopped = True
        self._verdicts.stop()
        self._batches.stop()

    def close(self) -> None:
        self._verdicts.close()
        self._batches.close()


def _padding(leaf: Any) -> Any:
    # A scalar belongs to the whole batch, and must be the same on every host.
    return np.zeros_like(leaf) if np.ndim(leaf) else leaf


class _Verdicts(Iterator[Any]):
    """The verdict on batch 0, 1, 2 and so on: each as soon as all hosts have posted."""

    def __init__(
        self,
        rounds: Rounds,
        decide: Callable[[Answers], Any],
        waited_s: Callable[[], float],
    ):
        self._rounds, self._decide, self._waited_s = rounds, decide, waited_s
        self._next = 0
        self._ended = self._over = self._stopped = False

    def __next__(self) -> Any:
        if self._over:
            raise StopIteration
        round_ = str(self._next)
        if self._ended:
            self._rounds.post(round_, END)
        else:
            # Waits here, where a stop is heard at once, and not in the round.
            self._ended = self._rounds.posted.get() == END
        if self._stopped:
            raise StopIteration
        verdict = self._rounds.verdict(
            round_, self._decide, waited_s=self._waited_s, stopped=lambda: self._stopped
        )
        self._rounds.forget(str(self._next - _KEPT_ROUNDS))
        self._next += 1
        self._over = verdict != BATCH
        return verdict

    def stop(self) -> None:
        self._stopped = True
        self._rounds.posted.put(END)


class _Decide:
    """Host 0's verdict on one batch."""

    def __init__(self, pads: bool, same_rows: bool, must_end_together: bool):
        self._pads, self._same_rows = pads, same_rows
        self._must_end_together = must_end_together

    def __call__(self, answers: Answers) -> Any:
        failed = {h: a["failed"] for h, a in answers.items() if isinstance(a, dict)}
        if failed:
            lines = [f"  host {host}: {text}" for host, text in failed.items()]
            return {"error": "\n".join(["a host's stream failed.", *lines])}
        # A host without a digest has another setting of `rows`; the agreement at the start says so.
        digests = {host: a[1] for host, a in answers.items() if isinstance(a, list) and a[1]}
        if self._same_rows and len(set(digests.values())) > 1:
            first = next(iter(digests))
            other = next(host for host, digest in digests.items() if digest != digests[first])
            return {
                "error": 'rows="global" says that every host produces the same batches, and the'
                f" first batches of hosts {first} and {other} differ.\n"
                "  remedy: read the same files with the same seed on every host, or shard the"
                ' source by grain_shard.ShardByMesh and pass rows="local".'
            }
        ended = [host for host, answer in answers.items() if answer == END]
        if not ended:
            return BATCH
        if self._same_rows and len(ended) < len(answers):
            return {
                "error": f'rows="global" says that every host produces the same batches, and the'
                f" streams of {len(ended)} of {len(answers)} hosts (the first: host {ended[0]})"
                " end earlier than the others.\n"
                "  remedy: read the same files on every host, or shard the source by"
                ' grain_shard.ShardByMesh and pass rows="local".'
            }
        if self._must_end_together and len(ended) < len(answers):
            return {
                "error": f"the streams of {len(ended)} of {len(answers)} hosts (the first: host"
                f" {ended[0]}) end earlier than the others.\n"
                '  remedy: pass remainder="pad" (zeros and a mask) or remainder="drop".'
            }
        return BATCH if self._pads and len(ended) < len(answers) else END
