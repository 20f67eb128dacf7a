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

# A wait is cut into pieces of this length, in milliseconds, so that closing an iterator ends the
# wait. With more hosts than that, a piece lasts one millisecond for each host, because the first
# host answers a call for every piece.
_SLICE_MS = 500
# How much longer than the first host the others wait, so that they report its verdict.
_GRACE_S = 5.0
# All keys of this package.
_FOLDER = "grain_shard"
# The topic under which each host describes the iterator that it has opened last.
_OPENED = "opened"
# The key of an answer by which a host says that it failed.
_FAILED = "failed"


@contextlib.contextmanager
def _reaching_the_store() -> Iterator[None]:
    """Turns an error of the runtime into one that names the likely cause and a remedy."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        raise AgreementError(
            "this host could not exchange messages with the other hosts, most likely because a"
            " host has ended.\n"
            f"  {error}\n  remedy: look for the first error in the logs of the other hosts."
        ) from error


class Store:
    """JSON values that the hosts share: the runtime's key-value store.

    Under a topic each host has a value of its own. Each method raises an `AgreementError` where the
    store is gone.

    Attributes:
        host: This host.
        folder: All keys begin with it.
    """

    def __init__(self):
        self._client = runtime_client()
        self.host: int = jax.process_index()
        self.folder = _FOLDER

    @_reaching_the_store()
    def put(self, topic: str, value: Any) -> None:
        """Puts this host's value in place of an earlier one. Waits for no other host."""
        key, text = f"{self.folder}/{topic}/{self.host}", json.dumps(value)
        try:
            self._client.key_value_set(key, text, allow_overwrite=True)
        except jax.errors.JaxRuntimeError as error:
            # A store drops some of too many calls. A second put of the same value is harmless.
            if "CANCELLED" not in str(error):
                raise
            self._client.key_value_set(key, text, allow_overwrite=True)

    @_reaching_the_store()
    def put_once(self, key: str, value: Any) -> bool:
        """Puts a value that has no host; False if there is one already."""
        try:
            self._client.key_value_set(f"{self.folder}/{key}", json.dumps(value))
        except jax.errors.JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return False
        return True

    @_reaching_the_store()
    def delete(self, key: str) -> None:
        """Deletes a value, or all values of a topic."""
        self._client.key_value_delete(f"{self.folder}/{key}")

    @_reaching_the_store()
    def get_all(self, topic: str) -> dict[int, Any]:
        """Returns the values of a topic that are there by now, by host."""
        entries = self._client.key_value_dir_get(f"{self.folder}/{topic}/")
        values = {int(key.rsplit("/", 1)[1]): json.loads(value) for key, value in entries}
        return dict(sorted(values.items()))

    @_reaching_the_store()
    def wait(self, key: str, wait_ms: int) -> Any:
        """Returns a value; None if it does not come so soon."""
        try:
            text = self._client.blocking_key_value_get(f"{self.folder}/{key}", wait_ms)
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            return None
        return json.loads(text)


class Rounds(Store):
    """A series of rounds; all its hosts take part in each.

    A round is a topic of the series, under which each host puts its answer.

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
        super().__init__()
        self.hosts: list[int] = list(hosts)
        self.timeout_s: float = timeout_s
        self._series = series
        self._is_leader = self.host == self.hosts[0]
        self.name, self.has_failed = "", False

    def begin(self, kind: str) -> None:
        """Opens the series, and names it by its number, which is the same on all hosts.

        The training loop's thread calls this, because all hosts open iterators in the program's
        order.

        Args:
            kind: The kind of pipeline, which an error names if hosts wait in different rounds.
        """
        self.name, number = self._series.open(self.hosts)
        opened = {"kind": kind, "made at": self._series.place, "iterator": number}
        Store().put(_OPENED, opened)
        self.folder = f"{_FOLDER}/{self.name}"

    def missing(self, round_: str) -> list[int]:
        """Returns the hosts that have not answered yet; the first host where all have."""
        answers = self.get_all(round_)
        return [host for host in self.hosts if host not in answers] or self.hosts[:1]

    def fail(self, round_: str, text: str) -> None:
        """Puts that this host failed, and does not wait: the first host settles the round by it.

        Args:
            round_: The round.
            text: The error.
        """
        self.has_failed = True
        self.put(round_, {_FAILED: text})
        if self._is_leader:
            self._try_verdict(round_, lambda answers: None)

    def verdict(
        self,
        round_: str,
        decide: Callable[[Answers], Any],
        *,
        absent: Callable[[], Mapping[int, str]] | None = None,
        stopped: Callable[[], bool] = lambda: False,
    ) -> Any:
        """Waits for the verdict that the first host makes of all answers.

        If a host says that it failed, no other one is waited for, and that is the verdict.

        Args:
            round_: The round.
            decide: Makes the verdict (JSON) of all answers, by host. Called on the first host.
            absent: Returns the hosts that are waited for no longer, with the reason of each; empty
                as long as all are. By default all that are missing after `timeout_s`.
            stopped: Whether to give up, without an error.

        Returns:
            The verdict; None if it was given up.

        Raises:
            AgreementError: The verdict is ``{"error": message}``, or a host has failed.
            HostTimeoutError: A host did not answer in time; the message names it.
        """
        until = time.monotonic() + self.timeout_s + (0.0 if self._is_leader else _GRACE_S)

        def late() -> Mapping[int, str]:
            return dict.fromkeys(self.missing(round_), "") if time.monotonic() > until else {}

        verdict = None
        while verdict is None and not stopped():
            verdict = self._try_verdict(round_, decide)
            if verdict is None and (silent := (absent or late)()):
                verdict = self._settle(round_, {"silent": silent})
        self._raise_for(verdict)
        return verdict

    def _try_verdict(self, round_: str, decide: Callable[[Answers], Any]) -> Any:
        """Waits briefly for the verdict, which the first host makes; None if there is none yet."""
        slice_ms = max(_SLICE_MS, len(self.hosts))
        if not self._is_leader:
            return self.wait(_verdict(round_), slice_ms)
        answers = self.get_all(round_)
        missing = [host for host in self.hosts if host not in answers]
        failed = {h: a[_FAILED] for h, a in answers.items() if isinstance(a, dict) and _FAILED in a}
        if missing and not failed:
            # Wait for one missing answer: once it is there, most others are likely there, too.
            self.wait(f"{round_}/{missing[-1]}", slice_ms)
            return None
        lines = [f"  host {host}: {text}" for host, text in failed.items()]
        error = {"error": "\n".join([f"{hosts_text(failed)} failed.", *lines])}
        verdict = self._settle(round_, error if failed else decide(answers))
        self.delete(f"{round_}/")
        return verdict

    def check(self, round_: str) -> None:
        """Raises an error if the other hosts have stopped waiting for this host in a round.

        Raises:
            HostTimeoutError: The other hosts have stopped waiting.
        """
        self._raise_for(self.wait(_verdict(round_), wait_ms=1))

    def forget(self, round_: str) -> None:
        """Deletes the verdict of a round that all hosts have read; the first host does it."""
        if self._is_leader:
            self.delete(_verdict(round_))

    def _settle(self, round_: str, verdict: Any) -> Any:
        """Posts the verdict, unless another one was posted; returns the one that holds.

        A host that has waited in vain posts a verdict for all hosts. Without it, a first host that
        comes late would go on alone.
        """
        key = _verdict(round_)
        return verdict if self.put_once(key, verdict) else self.wait(key, _SLICE_MS)

    def _raise_for(self, verdict: Any) -> None:
        if isinstance(verdict, dict) and "error" in verdict:
            raise AgreementError(verdict["error"])
        if isinstance(verdict, dict) and "silent" in verdict:
            self._raise_silent({int(host): reason for host, reason in verdict["silent"].items()})

    def _raise_silent(self, silent: Mapping[int, str]) -> NoReturn:
        """Raises that hosts did not answer in time, with the reason of each, if there is one."""
        of_all = Store().get_all(_OPENED)
        opened = {host: of_all[host] for host in self.hosts if host in of_all}
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
            + f"  here:   host {self.host} of {len(self.hosts)}\n"
            f"  remedy: look at the log of {hosts_text(silent)}. A host that fails, takes fewer"
            " steps or opens other iterators does not answer. (seek, reset and set_state open an"
            " iterator, too: call them on all hosts.) If a host is only slow, raise timeout_s of"
            " .shard_to. To look at a batch on one host alone, iterate over the dataset before"
            " .shard_to."
        )


def _verdict(round_: str) -> str:
    return f"{round_} verdict"


def meet(barrier: str, hosts: Sequence[int], timeout_s: float) -> None:
    """Waits until all hosts have come to the same barrier, each once in a run.

    Raises:
        JaxRuntimeError: One did not come in time; the runtime's message names it.
    """
    runtime_client().wait_at_barrier(f"{_FOLDER}/{barrier}", int(timeout_s * 1000), list(hosts))


def runtime_client() -> Any:
    """Returns the client of JAX's distributed runtime, by Orbax's public name for it."""
    from orbax.checkpoint import multihost  # it is slow to import, and needed on several hosts only

    return multihost.get_jax_distributed_client()
