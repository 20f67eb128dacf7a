"""Short rounds of questions and answers between hosts, over the runtime's key-value store.

In a round every host puts its answer into the store, the first host makes a verdict of all answers,
and every host reads the verdict. That is two calls a host and no device collective, so it may run
in any thread. All hosts read the same verdict, so all raise or none does.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import jax

from grain_shard.errors import AgreementError, HostTimeoutError
from grain_shard.hosts.compare import Answers, difference, hosts_text
from grain_shard.hosts.series import Series

# A wait is cut into pieces of this length, so that closing an iterator ends it; of many hosts, into
# as many milliseconds as there are hosts, because each piece is a call of the first host.
_SLICE_MS = 500
# How much longer than the first host the others wait, so that they report its verdict.
_GRACE_S = 5.0
# The topic under which each host describes the iterator that it has opened last.
_OPENED = "opened"


@contextlib.contextmanager
def _reaching_the_store() -> Iterator[None]:
    """Turns an error of the runtime into one that names the likely cause and a remedy."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise AgreementError(
            "not all hosts could be asked; most likely one of them is gone.\n"
            f"  {error}\n  remedy: look at the other hosts' logs."
        ) from error


class Rounds:
    """A series of rounds; all its hosts take part in each.

    Each method that reaches the store raises an `AgreementError` where the store is gone.

    Args:
        hosts: The hosts that take part, this one among them. The first one makes the verdicts.
        timeout_s: How long one host waits for another, in seconds.
        series: Names the rounds of this iterator.

    Attributes:
        hosts: As given.
        timeout_s: As given.
        name: The name of the series, the same on all hosts; "" until it begins.
        has_failed: Whether this host has said in a round that it failed.
    """

    def __init__(self, hosts: Sequence[int], timeout_s: float, series: Series):
        self._client, self._series = runtime_client(), series
        self.hosts, self.timeout_s = list(hosts), timeout_s
        self._host, self._leader = jax.process_index(), self.hosts[0]
        self._slice_ms = max(_SLICE_MS, len(self.hosts))
        self.name, self.has_failed = "", False

    def begin(self, kind: str) -> None:
        """Opens the series, and names it by its number, which is the same on all hosts.

        The training loop's thread calls this, because all hosts open iterators in the program's
        order.

        Args:
            kind: The kind of pipeline, which an error names if hosts wait in different rounds.
        """
        name, number = self._series.open(self.hosts)
        self.name = f"grain_shard/{name}"
        opened = {"kind": kind, "made at": self._series.place, "iterator": number}
        self.put(_OPENED, opened, in_series=False)

    @_reaching_the_store()
    def put(self, topic: str, answer: Any, *, in_series: bool = True) -> None:
        """Puts this host's answer (JSON) in place of an earlier one. Waits for no other host.

        Args:
            topic: A round of the series, or any other topic.
            answer: The answer.
            in_series: Whether the topic belongs to this series, or to the process.
        """
        key, text = f"{self._folder(topic, in_series)}{self._host}", json.dumps(answer)
        try:
            self._client.key_value_set(key, text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            # A store drops some of too many calls. A second put of the same value is harmless.
            if "CANCELLED" not in str(error):
                raise
            self._client.key_value_set(key, text, allow_overwrite=True)

    @_reaching_the_store()
    def delete(self, topic: str) -> None:
        """Takes this host's answer back."""
        self._client.key_value_delete(f"{self._folder(topic)}{self._host}")

    @_reaching_the_store()
    def get_all(self, topic: str, *, in_series: bool = True) -> dict[int, Any]:
        """Returns the answers of this series' hosts that are there by now, by host."""
        entries = self._client.key_value_dir_get(self._folder(topic, in_series))
        answers = {int(key.rsplit("/", 1)[1]): json.loads(value) for key, value in entries}
        return {host: answers[host] for host in self.hosts if host in answers}

    def missing(self, round_: str) -> list[int]:
        """Returns the hosts that have not answered yet; the first host where all have."""
        answers = self.get_all(round_)
        return [host for host in self.hosts if host not in answers] or [self._leader]

    @_reaching_the_store()
    def fail(self, round_: str, text: str, decide: Callable[[Answers], Any]) -> None:
        """Puts that this host failed, and does not wait: the first host settles the round by it.

        Args:
            round_: The round.
            text: The error.
            decide: As for `verdict`.
        """
        answer, self.has_failed = {"failed": text}, True
        self.put(round_, answer)
        if self._host == self._leader:
            self._settle(round_, decide({self._host: answer}))

    @_reaching_the_store()
    def verdict(
        self,
        round_: str,
        decide: Callable[[Answers], Any],
        *,
        absent: Callable[[], Mapping[int, str]] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Waits for the verdict that the first host makes of all answers.

        If a host says that it failed, no other one is waited for.

        Args:
            round_: The round.
            decide: Makes the verdict (JSON) of all answers, by host. Called on the first host.
            absent: Returns the hosts that are waited for no longer, with the reason of each; empty
                as long as all are. By default all that are missing after `timeout_s`.
            stopped: Whether to give up, without an error.

        Returns:
            The verdict; None if it was given up.

        Raises:
            AgreementError: The verdict is ``{"error": message}``.
            HostTimeoutError: A host did not answer in time; the message names it.
        """
        absent = absent or self._after_timeout(round_)
        verdict = None
        while verdict is None:
            if stopped():
                return None
            verdict = self._try_verdict(round_, decide)
            if verdict is None and (silent := absent()):
                verdict = self._settle(round_, {"silent": silent})
        self._raise_for(verdict)
        return verdict

    def _after_timeout(self, round_: str) -> Callable[[], Mapping[int, str]]:
        grace_s = 0.0 if self._host == self._leader else _GRACE_S
        until = time.monotonic() + self.timeout_s + grace_s

        def absent() -> Mapping[int, str]:
            return dict.fromkeys(self.missing(round_), "") if time.monotonic() > until else {}

        return absent

    def _try_verdict(self, round_: str, decide: Callable[[Answers], Any]) -> Any:
        """Waits briefly for the verdict, which the first host makes; None if there is none yet."""
        if self._host != self._leader:
            text = self._soon(self._verdict_key(round_))
            return None if text is None else json.loads(text)
        answers = self.get_all(round_)
        missing = [host for host in self.hosts if host not in answers]
        if missing and not any(isinstance(a, dict) and "failed" in a for a in answers.values()):
            # Wait for one missing answer: once it is there, most others are likely there, too.
            self._soon(f"{self._folder(round_)}{missing[-1]}")
            return None
        verdict = self._settle(round_, decide(answers))
        self._client.key_value_delete(self._folder(round_))
        return verdict

    @_reaching_the_store()
    def check(self, round_: str) -> None:
        """Raises the verdict of a round if other hosts have given up on this one.

        Raises:
            HostTimeoutError: They have.
        """
        text = self._soon(self._verdict_key(round_), wait_ms=1)
        if text is not None:
            self._raise_for(json.loads(text))

    @_reaching_the_store()
    def forget(self, round_: str) -> None:
        """Deletes the verdict of a round that all hosts have read; the first host does it."""
        if self._host == self._leader:
            self._client.key_value_delete(self._verdict_key(round_))

    def _settle(self, round_: str, verdict: Any) -> Any:
        """Posts the verdict, or yields to the one that stands.

        A host that has waited in vain settles it for all: the first host, when it comes at last,
        must not go on alone.
        """
        key = self._verdict_key(round_)
        try:
            self._client.key_value_set(key, json.dumps(verdict))
        except jax.errors.JaxRuntimeError as error:
            if not exists_already(error):
                raise
            return json.loads(self._client.blocking_key_value_get(key, _SLICE_MS))
        return verdict

    def _soon(self, key: str, wait_ms: int | None = None) -> str | None:
        """Returns the value of a key, if it comes soon."""
        try:
            return self._client.blocking_key_value_get(key, wait_ms or self._slice_ms)
        except jax.errors.JaxRuntimeError as error:
            if is_timeout(error):
                return None
            raise

    def _folder(self, topic: str, in_series: bool = True) -> str:
        return f"{self.name}/{topic}/answers/" if in_series else f"grain_shard/{topic}/"

    def _verdict_key(self, round_: str) -> str:
        return f"{self.name}/{round_}/verdict"

    def _raise_for(self, verdict: Any) -> None:
        if not isinstance(verdict, dict):
            return
        if "error" in verdict:
            raise AgreementError(verdict["error"])
        if silent := verdict.get("silent"):
            self._raise_silent({int(host): reason for host, reason in silent.items()})

    def _raise_silent(self, silent: Mapping[int, str]) -> NoReturn:
        """Raises that hosts did not answer in time, with the reason of each, if there is one."""
        opened = self.get_all(_OPENED, in_series=False)
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


def meet(barrier: str, hosts: Sequence[int], timeout_s: float) -> None:
    """Waits until all hosts have come to the same barrier, each once in a run.

    Raises:
        JaxRuntimeError: One did not come in time; the runtime's message names it.
    """
    runtime_client().wait_at_barrier(f"grain_shard/{barrier}", int(timeout_s * 1000), list(hosts))


def runtime_client() -> Any:
    """Returns the client of JAX's distributed runtime, by Orbax's public name for it."""
    from orbax.checkpoint import multihost  # it is slow to import, and needed on several hosts only

    return multihost.get_jax_distributed_client()


def exists_already(error: Exception) -> bool:
    """Returns whether an error of the runtime says that another host has set the key before."""
    return "ALREADY_EXISTS" in str(error)


def is_timeout(error: Exception) -> bool:
    """Returns whether an error of the runtime says that a key was not there in time."""
    return "DEADLINE_EXCEEDED" in str(error)
