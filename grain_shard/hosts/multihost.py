"""What hosts tell each other: short rounds over the distributed runtime's key-value store.

In a round every host posts its answer, the first host makes a verdict of all answers, and every
host reads the verdict. That is two calls a host and no device collective, so it may run in any
thread; and since all read the same verdict, all raise or none does. Every wait has an end.
"""

from __future__ import annotations

import itertools
import json
import math
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax

from grain_shard.errors import AgreementError, HostTimeoutError
from grain_shard.reading.fingerprint import digest

Answers = Mapping[int, Any]
# A wait is cut into pieces of this length, so that closing an iterator ends it.
_SLICE_MS = 500
# How much longer than the first host the others wait, so that they report its verdict.
_GRACE_S = 5.0


class Rounds:
    """A series of rounds; all its hosts take part in each.

    Args:
        hosts: The hosts that take part, this one among them. The first one makes the verdicts.
        timeout_s: How long one host waits for another, in seconds.
    """

    _numbers: ClassVar[dict[str, itertools.count]] = {}

    def __init__(self, hosts: Sequence[int], timeout_s: float):
        from orbax.checkpoint import multihost  # it is slow to import, and needed here only

        self._client = multihost.get_jax_distributed_client()
        self._hosts, self._timeout_s = list(hosts), timeout_s
        self._host, self._leader = jax.process_index(), self._hosts[0]
        self._name = ""
        # What this host has posted of a stream, for the thread that reads the verdicts.
        self.posted: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def begin(self) -> None:
        """Gives the series its name. All hosts begin their series in the same order.

        To be called by the training loop's thread: its order is that of the program.
        """
        hosts = digest(self._hosts)  # a series of some of the hosts does not count for the others
        number = next(self._numbers.setdefault(hosts, itertools.count()))
        self._name = f"grain_shard/{hosts}/{number}"

    def post(self, round_: str, answer: Any) -> None:
        """Posts this host's answer (JSON). Does not wait for anybody."""
        self._client.key_value_set(self._answer_key(round_, self._host), json.dumps(answer))

    def verdict(
        self,
        round_: str,
        decide: Callable[[Answers], Any],
        *,
        waited_s: Callable[[], float] = lambda: math.inf,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Any:
        """What the first host makes of all answers.

        Args:
            round_: The round.
            decide: From all answers, by host, to the verdict (JSON). Called on that host.
            waited_s: How long somebody has been waiting for this verdict, in seconds. The timeout
                counts that, and from this call on.
            stopped: Whether to give up, without an error.

        Returns:
            The verdict; None if it was given up.

        Raises:
            AgreementError: The verdict is ``{"error": message}``.
            HostTimeoutError: A host did not answer in time; the message names it.
        """
        start = time.monotonic()

        def waited() -> float:
            return min(waited_s(), time.monotonic() - start)

        key = f"{self._name}/{round_}/verdict"
        if self._host == self._leader:
            answers = self._gather(round_, waited, stopped)
            if answers is None:
                return None
            silent = [host for host in self._hosts if host not in answers]
            verdict = {"silent": silent} if silent else decide(answers)
            verdict = self._settle(key, verdict)
            self._client.key_value_delete(f"{self._name}/{round_}/answers/")
        else:
            text = self._get(key, waited, stopped, self._timeout_s + _GRACE_S)
            if text is None:
                if stopped():
                    return None
                answers = self._posted(round_)
                silent = [h for h in self._hosts if h not in answers] or [self._leader]
                verdict = self._settle(key, {"silent": silent})
            else:
                verdict = json.loads(text)
        self._raise_for(verdict)
        return verdict

    def _settle(self, key: str, verdict: Any) -> Any:
        """Posts the verdict, or yields to the one that stands.

        A host that has waited in vain settles it for all: the first host, when it comes at last,
        must not go on alone.
        """
        try:
            self._client.key_value_set(key, json.dumps(verdict))
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return json.loads(self._client.blocking_key_value_get(key, _SLICE_MS))
        return verdict

    def meet(self, place: str) -> None:
        """Waits until all hosts have come to the same place, each once in a run.

        Raises:
            JaxRuntimeError: One did not come in time; the runtime's message names it.
        """
        timeout_ms = int(self._timeout_s * 1000)
        self._client.wait_at_barrier(f"grain_shard/{place}", timeout_ms, self._hosts)

    def forget(self, round_: str) -> None:
        """Deletes a round that every host is past. The first host does it."""
        if self._host == self._leader:
            self._client.key_value_delete(f"{self._name}/{round_}/")

    def _gather(
        self, round_: str, waited_s: Callable[[], float], stopped: Callable[[], bool]
    ) -> dict[int, Any] | None:
        """The answers of all hosts, or of those that came in time; None if given up."""
        for host in self._hosts:
            answers = self._posted(round_)
            if len(answers) == len(self._hosts):
                return answers
            if host not in answers:
                key = self._answer_key(round_, host)
                if self._get(key, waited_s, stopped, self._timeout_s) is None:
                    break
        return None if stopped() else self._posted(round_)

    def _posted(self, round_: str) -> dict[int, Any]:
        entries = self._client.key_value_dir_get(f"{self._name}/{round_}/answers/")
        return {int(key.rsplit("/", 1)[1]): json.loads(value) for key, value in entries}

    def _get(
        self,
        key: str,
        waited_s: Callable[[], float],
        stopped: Callable[[], bool],
        timeout_s: float,
    ) -> str | None:
        """The value of a key once it is there; None after the timeout, or if given up."""
        while not stopped():
            try:
                return self._client.blocking_key_value_get(key, _SLICE_MS)
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise AgreementError(
                        f"the distributed runtime failed while waiting for the other hosts: {error}"
                    ) from error
            if waited_s() > timeout_s:
                return None
        return None

    def _answer_key(self, round_: str, host: int) -> str:
        return f"{self._name}/{round_}/answers/{host}"

    def _raise_for(self, verdict: Any) -> None:
        if not isinstance(verdict, dict):
            return
        if "error" in verdict:
            raise AgreementError(verdict["error"])
        if silent := verdict.get("silent"):
            raise HostTimeoutError(
                f"{_hosts(silent)} did not answer within {self._timeout_s:g} s.\n"
                f"  here:   host {self._host} of {len(self._hosts)}\n"
                "  remedy: look at its log: did it fail, or take fewer steps? If it is only slow,"
                " raise timeout_s of .shard_to."
            )


def agree(rounds: Rounds, answer: Mapping[str, Any]) -> None:
    """Compares the fields of all hosts, at the start of an iterator.

    Args:
        rounds: A series of its own.
        answer: Field by field what must be the same everywhere (JSON); or ``{"failed": text}`` if
            this host has no answer, so that the others need not wait for one.

    Raises:
        AgreementError: A field differs; on every host, naming hosts and field. Or a host failed.
        HostTimeoutError: A host did not arrive.
    """
    rounds.post("start", answer)
    rounds.verdict("start", compare)


def compare(answers: Answers) -> dict[str, Any]:
    """The verdict of `agree`: empty, or an error that names the hosts and the field.

    Example:
        >>> print(compare({0: {"seeds": 1}, 1: {"seeds": 1}, 2: {"seeds": 7}})["error"])
        the hosts do not run the same pipeline.
          seeds: 1 on hosts 0, 1; 7 on host 2
          remedy: run the same script with the same arguments and files on every host.
    """
    failed = {host: a["failed"] for host, a in answers.items() if "failed" in a}
    if failed:
        lines = [f"  host {host}: {text}" for host, text in failed.items()]
        return {"error": "\n".join([f"{_hosts(failed)} failed at the first batch.", *lines])}
    lines = [line for name in _fields(answers) if (line := _difference(name, answers))]
    lines += _same_rows(answers) + _same_feeds(answers)
    if not lines:
        return {}
    remedy = "run the same script with the same arguments and files on every host."
    return {
        "error": "\n".join(
            ["the hosts do not run the same pipeline.", *lines, f"  remedy: {remedy}"]
        )
    }


def _fields(answers: Answers) -> list[str]:
    names = dict.fromkeys(name for answer in answers.values() for name in answer)
    return [name for name in names if name not in ("local rows", "feed rows")]


def _difference(name: str, answers: Answers) -> str | None:
    hosts_by_value: dict[str, list[int]] = {}
    for host, answer in answers.items():
        hosts_by_value.setdefault(json.dumps(answer.get(name)), []).append(host)
    if len(hosts_by_value) == 1:
        return None
    groups = [f"{value} on {_hosts(hosts)}" for value, hosts in hosts_by_value.items()]
    return f"  {name}: {'; '.join(groups)}"


def _same_rows(answers: Answers) -> list[str]:
    """Hosts that hold the same shards must feed the same rows, and others must not.

    The answer's field "local rows" is (shards, digest of the first batch), if it has one.
    """
    lines, first_of_shards, first_of_digest = [], {}, {}
    for host, answer in answers.items():
        if "local rows" not in answer:
            continue
        shards, digest = str(answer["local rows"][0]), answer["local rows"][1]
        twin, digest_of_twin = first_of_shards.setdefault(shards, (host, digest))
        if digest_of_twin != digest:
            lines.append(
                f"  rows: hosts {twin} and {host} hold the same shards and feed different rows;"
                " shard the source by grain_shard.ShardByMesh(mesh, spec)"
            )
        other, shards_of_other = first_of_digest.setdefault(digest, (host, shards))
        if shards_of_other != shards:
            lines.append(
                f"  rows: hosts {other} and {host} hold different shards and feed the same rows;"
                " shard the source by grain_shard.ShardByMesh(mesh, spec), or pass"
                ' rows="global" if every host reads the whole batch, or makes up the same data'
            )
    return lines


def _same_feeds(answers: Answers) -> list[str]:
    """Hosts that hold the same shards run the same feeds, and must get the same rows of them.

    The answer's field "feed rows" is (shards, digest of the first batch), if it has one.
    """
    lines, first_of_shards = [], {}
    for host, answer in answers.items():
        if "feed rows" not in answer:
            continue
        shards, digest_here = str(answer["feed rows"][0]), answer["feed rows"][1]
        twin, digest_of_twin = first_of_shards.setdefault(shards, (host, digest_here))
        if digest_of_twin != digest_here:
            lines.append(
                f"  feeds: hosts {twin} and {host} run the same feeds and get different rows; what"
                " make_feed returns must depend on shard_index and shard_count alone"
            )
    return lines


def _hosts(hosts: Any) -> str:
    hosts = list(hosts)
    names = ", ".join(map(str, hosts[:8])) + (f" and {len(hosts) - 8} more" if hosts[8:] else "")
    return f"host {names}" if len(hosts) == 1 else f"hosts {names}"
