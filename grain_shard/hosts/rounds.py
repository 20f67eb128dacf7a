"""What hosts tell each other: short rounds over the distributed runtime's key-value store.

In a round every host posts its answer, the first host makes a verdict of all answers, and every
host reads the verdict. That is two calls a host and no device collective, so it may run in any
thread; and since all read the same verdict, all raise or none does. A few hosts may also read all
answers themselves (`gather`). Every wait ends after a time, or when it is stopped.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax

from grain_shard.errors import AgreementError, HostTimeoutError
from grain_shard.hosts.compare import Answers, compare, difference, hosts_text
from grain_shard.hosts.series import Series

# A wait is cut into pieces of this length, so that closing an iterator ends it.
_SLICE_MS = 500
# How much longer than the first host the others wait, so that they report its verdict.
_GRACE_S = 5.0
# Which iterator each host has opened last.
_OPENED = "grain_shard/opened/"


class Rounds:
    """A series of rounds; all its hosts take part in each.

    Args:
        hosts: The hosts that take part, this one among them. The first one makes the verdicts.
        timeout_s: How long one host waits for another, in seconds.
        series: Names the rounds of this iterator.

    Attributes:
        hosts: As given.
        timeout_s: As given.
        name: Of the series, the same on all of them; "" until it begins.
        has_failed: Whether this host has said in a round that it failed.
    """

    def __init__(self, hosts: Sequence[int], timeout_s: float, series: Series):
        self._client, self._series = runtime_client(), series
        self.hosts, self.timeout_s = list(hosts), timeout_s
        self._host, self._leader = jax.process_index(), self.hosts[0]
        self.name, self.has_failed = "", False

    def begin(self, kind: str) -> None:
        """Gives the series its name. All hosts open the iterators of a dataset in the same order.

        To be called by the training loop's thread: its order is that of the program.

        Args:
            kind: What this host runs, to tell why hosts might wait in different rounds.
        """
        name, number = self._series.open(self.hosts)
        self.name = f"grain_shard/{name}"
        opened = {"kind": kind, "made at": self._series.place, "iterator": number}
        self.say_of_host(_OPENED, json.dumps(opened))

    def fail(self, round_: str, text: str, decide: Callable[[Answers], Any]) -> None:
        """Posts that this host failed, and does not wait: the first host settles the round by it.

        Args:
            round_: The round.
            text: The error.
            decide: As for `verdict`.
        """
        answer, self.has_failed = {"failed": text}, True
        self.post(round_, answer)
        if self._host == self._leader:
            self._settle(f"{self.name}/{round_}/verdict", decide({self._host: answer}))

    def post(self, round_: str, answer: Any) -> None:
        """Posts this host's answer (JSON). Does not wait for anybody."""
        self._client.key_value_set(self._answer_key(round_, self._host), json.dumps(answer))

    def verdict(
        self,
        round_: str,
        decide: Callable[[Answers], Any],
        *,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Any:
        """What the first host makes of all answers.

        Args:
            round_: The round.
            decide: From all answers, by host, to the verdict (JSON). Called on that host.
            stopped: Whether to give up, without an error.

        Returns:
            The verdict; None if it was given up.

        Raises:
            AgreementError: The verdict is ``{"error": message}``.
            HostTimeoutError: A host did not answer in time; the message names it.
        """
        key = f"{self.name}/{round_}/verdict"
        if self._host == self._leader:
            answers = self.gather(round_, stopped, self.timeout_s)
            if answers is None:
                return None
            silent = [host for host in self.hosts if host not in answers]
            verdict = {"silent": silent} if silent and not _failed(answers) else decide(answers)
            verdict = self._settle(key, verdict)
            self._client.key_value_delete(f"{self.name}/{round_}/answers/")
        else:
            text = self._get(key, stopped, self.timeout_s + _GRACE_S)
            if text is None:
                if stopped():
                    return None
                answers = self.said(round_)
                silent = [h for h in self.hosts if h not in answers] or [self._leader]
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
            if not exists_already(error):
                raise
            return json.loads(self._client.blocking_key_value_get(key, _SLICE_MS))
        return verdict

    def say(self, topic: str, text: str) -> None:
        """Says something of this host, in place of what it said before. Does not wait."""
        key = self._answer_key(topic, self._host)
        self._client.key_value_set(key, json.dumps(text), allow_overwrite=True)

    def unsay(self, topic: str) -> None:
        """Takes back what this host has said."""
        self._client.key_value_delete(self._answer_key(topic, self._host))

    def say_of_host(self, folder: str, text: str) -> None:
        """Says something that belongs to no series, in place of what this host said before."""
        self._client.key_value_set(f"{folder}{self._host}", text, allow_overwrite=True)

    def of_hosts(self, folder: str) -> dict[int, Any]:
        """What these hosts have said so (JSON)."""
        said = dict(self._client.key_value_dir_get(folder))
        keys = {host: f"{folder}{host}" for host in self.hosts}
        return {host: json.loads(said[key]) for host, key in keys.items() if key in said}

    def gather(
        self, round_: str, stopped: Callable[[], bool], timeout_s: float = math.inf
    ) -> dict[int, Any] | None:
        """The answers of all hosts, for any host that wants to read them itself.

        If a host says that it failed, nobody else is waited for.

        Args:
            round_: The round.
            stopped: Whether to give up, without an error.
            timeout_s: How long to wait, in seconds.

        Returns:
            The answers, by host; after the timeout, those that came in time. None if given up.
        """
        until = time.monotonic() + timeout_s
        while not stopped():
            answers = self.said(round_)
            missing = [host for host in self.hosts if host not in answers]
            if _failed(answers) or not missing or time.monotonic() > until:
                return answers
            # When that one has come, most likely many others have, too.
            self._soon(self._answer_key(round_, missing[-1]))
        return None

    def said(self, round_: str) -> dict[int, Any]:
        """What hosts have posted or said, by host. Does not wait for anybody."""
        entries = self._client.key_value_dir_get(f"{self.name}/{round_}/answers/")
        answers = {int(key.rsplit("/", 1)[1]): json.loads(value) for key, value in entries}
        return dict(sorted(answers.items()))  # the store sorts them as text

    def _get(self, key: str, stopped: Callable[[], bool], timeout_s: float) -> str | None:
        """The value of a key once it is there; None after the timeout, or if given up."""
        until = time.monotonic() + timeout_s
        while not stopped():
            value = self._soon(key)
            if value is not None or time.monotonic() > until:
                return value
        return None

    def _soon(self, key: str) -> str | None:
        """The value of a key, if it comes soon."""
        try:
            return self._client.blocking_key_value_get(key, _SLICE_MS)
        except jax.errors.JaxRuntimeError as error:
            if is_timeout(error):
                return None
            raise AgreementError(
                f"the distributed runtime failed while waiting for the other hosts: {error}"
            ) from error

    def _answer_key(self, round_: str, host: int) -> str:
        return f"{self.name}/{round_}/answers/{host}"

    def _raise_for(self, verdict: Any) -> None:
        if not isinstance(verdict, dict):
            return
        if "error" in verdict:
            raise AgreementError(verdict["error"])
        if silent := verdict.get("silent"):
            self.raise_silent(dict.fromkeys(silent, ""))

    def raise_silent(self, silent: Mapping[int, str]) -> NoReturn:
        """Raises that hosts did not answer in time.

        Args:
            silent: These hosts, and of each why, as far as it has said.

        Raises:
            HostTimeoutError: It names them.
        """
        opened = self.of_hosts(_OPENED)
        fields = ("kind", "made at", "iterator")
        differences = [line for field in fields if (line := difference(field, opened))]
        if differences:
            differences.insert(0, "  The iterators that the hosts opened last differ:")
        reasons = [
            f"  {hosts_text([host for host, why in silent.items() if why == reason])} {reason}"
            for reason in dict.fromkeys(filter(None, silent.values()))
        ]
        raise HostTimeoutError(
            f"{hosts_text(silent)} did not answer in time (timeout_s={self.timeout_s:g}).\n"
            + "".join(f"{line}\n" for line in reasons + differences)
            + f"  here:   host {self._host} of {len(self.hosts)}\n"
            "  remedy: look at its log: did it fail, take fewer steps, or open other iterators than"
            " this host? If it is only slow, raise timeout_s of .shard_to. To look at a batch on"
            " one host alone, iterate over what stands before .shard_to."
        )


def _failed(answers: Answers) -> bool:
    """Whether one of the hosts says that it failed."""
    return any(isinstance(answer, dict) and "failed" in answer for answer in answers.values())


def meet(barrier: str, hosts: Sequence[int], timeout_s: float) -> None:
    """Waits until all hosts have come to the same barrier, each once in a run.

    Raises:
        JaxRuntimeError: One did not come in time; the runtime's message names it.
    """
    runtime_client().wait_at_barrier(f"grain_shard/{barrier}", int(timeout_s * 1000), list(hosts))


def runtime_client() -> Any:
    """The client of JAX's distributed runtime, by Orbax's public name for it."""
    from orbax.checkpoint import multihost  # it is slow to import, and needed on several hosts only

    return multihost.get_jax_distributed_client()


def exists_already(error: Exception) -> bool:
    """Of an error of the runtime: whether a key was not set since somebody else has set it."""
    return "ALREADY_EXISTS" in str(error)


def is_timeout(error: Exception) -> bool:
    """Of an error of the runtime: whether a key was not there in time."""
    return "DEADLINE_EXCEEDED" in str(error)


def agree(rounds: Rounds, answer: Mapping[str, Any]) -> None:
    """Compares the fields of all hosts, at the start of an iterator.

    Args:
        rounds: The series of the iterator, begun; where streams end is voted on in it, too.
        answer: Field by field what must be the same everywhere (JSON). A host that has no answer
            calls `Rounds.fail` instead, so that the others need not wait for one.

    Raises:
        AgreementError: A field differs; on every host, naming hosts and field. Or a host failed.
        HostTimeoutError: A host did not arrive.
    """
    rounds.post("start", answer)
    rounds.verdict("start", compare)
