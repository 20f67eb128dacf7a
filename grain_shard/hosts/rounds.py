"""`Rounds`: short exchanges among hosts, over the key-value store of JAX's distributed runtime.

In a round every host puts an answer into the store. The first host computes a verdict from all
answers, and every host reads the verdict. That takes two calls per host. No device collective is
used, so a round may run in any thread. All hosts read the same verdict, so either all hosts raise
an error or none does.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from grain_shard.errors import AgreementError, HostTimeoutError
from grain_shard.hosts.compare import Answers, differences, hosts_text
from grain_shard.hosts.series import Series
from grain_shard.hosts.verdict import Verdict

# Milliseconds. A long wait is divided into calls of this length, so that it ends soon after the
# iterator is closed. With more than 500 hosts a call lasts one millisecond per host, because the
# first host's process serves all calls.
_SLICE_MS = 500
# Multiple of `timeout_s` for which another host's training loop may be busy.
LOOPS_MAY_TAKE = 10
# Seconds that the other hosts wait longer than the first one, so that its verdict reaches them.
_GRACE_S = 5.0
# The first part of all keys of this package.
_FOLDER = "grain_shard"
# The topic under which each host describes the iterator that it opened last.
_OPENED = "opened"


@contextlib.contextmanager
def _reaching_the_store(but: str | None = None) -> Iterator[None]:
    """Turns an error of the runtime into an `AgreementError` with the likely cause and a remedy.

    Args:
        but: The code of an error that is swallowed, so that the program goes on after the ``with``
            block.
    """
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if but is not None and but in str(error):
            return
        raise AgreementError(
            "this host could not exchange messages with the other hosts, most likely because a"
            " host has ended.\n"
            f"  {error}\n  remedy: look for the first error in the logs of the other hosts."
        ) from error


class Store:
    """The key-value store of JAX's distributed runtime, with JSON values that all hosts can read.

    A topic has one value of each host. Each method raises an `AgreementError` if the store cannot
    be reached.

    Attributes:
        host: Number of this host.
        folder: First part of all keys.
    """

    def __init__(self):
        self._client = runtime_client()
        self.host: int = jax.process_index()
        self.folder = _FOLDER

    def put(self, topic: str, value: Any) -> None:
        """Puts this host's value of a topic, in place of an earlier one, without a wait."""
        key, text = f"{self.folder}/{topic}/{self.host}", json.dumps(value)
        # The store cancels some calls if it gets too many at once. So a cancelled call is made once
        # more. If the first call has put the value after all, a second time does no harm.
        for swallowed in ("CANCELLED", None):
            with _reaching_the_store(but=swallowed):
                self._client.key_value_set(key, text, allow_overwrite=True)
                break

    def put_once(self, key: str, value: Any) -> bool:
        """Puts a value under a key of all hosts; returns False if the key had a value already."""
        with _reaching_the_store(but="ALREADY_EXISTS"):
            self._client.key_value_set(f"{self.folder}/{key}", json.dumps(value))
            return True
        return False

    @_reaching_the_store()
    def delete(self, key: str) -> None:
        """Deletes the value of a key, or all values of a topic if the key ends with "/"."""
        self._client.key_value_delete(f"{self.folder}/{key}")

    @_reaching_the_store()
    def get_all(self, topic: str) -> dict[int, Any]:
        """Returns the values of a topic that hosts have put so far, by host."""
        entries = self._client.key_value_dir_get(f"{self.folder}/{topic}/")
        values = {int(key.rsplit("/", 1)[1]): json.loads(value) for key, value in entries}
        return dict(sorted(values.items()))

    def wait(self, key: str, wait_ms: int) -> Any:
        """Waits for the value of a key, for `wait_ms` at most; returns None if there is none."""
        with _reaching_the_store(but="DEADLINE_EXCEEDED"):
            return json.loads(self._client.blocking_key_value_get(f"{self.folder}/{key}", wait_ms))


class Rounds(Store):
    """The rounds of one iterator, in which all its hosts take part.

    A round is a topic of the store, with the answers of the hosts, and a key with the verdict.

    Args:
        hosts: The hosts that take part, including this one. The first one computes the verdicts.
        timeout_s: The maximum number of seconds that one host waits for another.
        series: Names the iterator, the same on all hosts.

    Attributes:
        hosts: The argument `hosts`, as a list.
        timeout_s: The argument `timeout_s`.
        name: The iterator's name, the same on all hosts; "" before `begin`.
        is_leader: True on the first host.
    """

    def __init__(self, hosts: Sequence[int], timeout_s: float, series: Series):
        super().__init__()
        self.hosts: list[int] = list(hosts)
        self.timeout_s: float = timeout_s
        self._series = series
        self.is_leader: bool = self.host == self.hosts[0]
        self.name = ""

    def begin(self, kind: str) -> None:
        """Names the iterator, and describes it to the other hosts. No round may begin before.

        Only the training loop's thread may call this: the name has a counter, and in that thread
        all hosts open their iterators in the same order.

        Args:
            kind: The kind of pipeline. If the hosts have opened different iterators, an error names
                the kinds.
        """
        self.name, number = self._series.open(self.hosts)
        opened = {"kind": kind, "dataset made at": self._series.made_at, "iterator": number}
        Store().put(_OPENED, opened)
        self.folder = f"{_FOLDER}/{self.name}"

    def missing(self, round_: str) -> list[int]:
        """Returns the hosts that have not answered a round yet.

        If all have answered, returns the first host, because only its verdict is missing.
        """
        answers = self.get_all(round_)
        return [host for host in self.hosts if host not in answers] or self.hosts[:1]

    def verdict(
        self,
        round_: str,
        decide: Callable[[Answers], Verdict],
        *,
        stopped: Callable[[], bool] = lambda: False,
        patience: float = 1.0,
    ) -> Verdict | None:
        """Waits for the verdict of a round.

        Args:
            round_: The round.
            decide: Computes the verdict from the answers, by host. Only the first host calls it.
            stopped: Returns True to end the wait without a verdict.
            patience: Number of times `timeout_s` that this host waits. A host that is not the first
                waits 5 seconds longer, because the first host's verdict may come late.

        Returns:
            The verdict; None if `stopped` ended the wait.

        Raises:
            AgreementError: The verdict is an `error`.
            HostTimeoutError: A host did not answer in time. The message names the host.
        """
        wait_s = patience * self.timeout_s + (0.0 if self.is_leader else _GRACE_S)
        until = time.monotonic() + wait_s
        while not stopped():
            verdict = self._try_verdict(round_, decide)
            if verdict is None and time.monotonic() > until:
                # This error becomes the verdict for all hosts, unless one was posted meanwhile.
                verdict = self._settle(round_, Verdict(silent=self.missing(round_)))
            if verdict is not None:
                self._raise_error_of(verdict)
                return verdict
        return None

    def _try_verdict(self, round_: str, decide: Callable[[Answers], Verdict]) -> Verdict | None:
        """Waits for the verdict for about half a second; returns None if there is none yet.

        The first host waits for answers instead. Once all hosts have answered, it computes the
        verdict and posts it.
        """
        slice_ms = max(_SLICE_MS, len(self.hosts))
        if not self.is_leader:
            return self._posted(round_, slice_ms)
        answers = self.get_all(round_)
        missing = [host for host in self.hosts if host not in answers]
        if missing:
            # When one of the missing answers has come, most of the others have come as well. The
            # next call finds out which ones are still missing.
            self.wait(f"{round_}/{missing[-1]}", slice_ms)
            return None
        verdict = self._settle(round_, decide(answers))
        self.delete(f"{round_}/")
        return verdict

    def forget(self, round_: str) -> None:
        """Deletes the verdict of a round, on the first host. All hosts must have read it before."""
        if self.is_leader:
            self.delete(_verdict(round_))

    def _settle(self, round_: str, verdict: Verdict) -> Verdict | None:
        """Posts a verdict, unless the round has one already; returns the verdict that counts.

        The first host posts its result. A host that stops waiting posts an error as the
        verdict: a first host that is late then gets the error, and does not go on alone.
        """
        is_first = self.put_once(_verdict(round_), verdict.to_json())
        return verdict if is_first else self._posted(round_, _SLICE_MS)

    def _posted(self, round_: str, wait_ms: int) -> Verdict | None:
        """Waits for the verdict that a host posts; returns None if there is none after the wait."""
        posted = self.wait(_verdict(round_), wait_ms)
        return None if posted is None else Verdict.from_json(posted)

    def _raise_error_of(self, verdict: Verdict) -> None:
        """Raises the error of a verdict, except `Verdict.changed`, which the caller raises.

        Raises:
            AgreementError: The verdict is an `error`.
            HostTimeoutError: Hosts were `silent`: they did not answer in time.
        """
        if verdict.silent:
            error = self.late(verdict.silent)
        elif verdict.error:
            error = AgreementError(verdict.error)
        else:
            return
        error.series = self.name
        raise error

    def late(self, silent: Sequence[int]) -> HostTimeoutError:
        """Returns the error for hosts that did not answer in time.

        The error also names what differs between the iterators that the hosts opened last.
        """
        # By host; one that has opened no iterator is left out. Not read from self, which has
        # the keys of one iterator.
        of_all = Store().get_all(_OPENED)
        differing = differences({host: of_all[host] for host in self.hosts if host in of_all})
        if differing:
            differing.insert(0, "  The iterators that the hosts opened last differ:")
        here = f"host {self.host} of {len(self.hosts)}"
        where_to_look = f"look at the log of {hosts_text(silent)}."
        faster_hosts = "this host"
        if self.host in silent:  # another host has stopped waiting, and posted the error
            here += ", which the other hosts have stopped waiting for"
            where_to_look = "find out what this host was waiting for."
            faster_hosts = "the others"
        return HostTimeoutError(
            f"{hosts_text(silent)} did not answer in time (timeout_s={self.timeout_s:g}).\n"
            + "".join(f"{line}\n" for line in differing)
            + f"  here:   {here}\n"
            f"  remedy: {where_to_look} A host does not answer if it has"
            f" failed, takes fewer steps than {faster_hosts}, or opens other iterators. (Every"
            " call of iter, seek, reset and set_state opens one: make the same calls on all hosts.)"
            " If a host is only slow, raise timeout_s of .shard_to. To look at a batch on one host"
            " alone, iterate over the dataset before .shard_to."
        )


def _verdict(round_: str) -> str:
    return f"{round_} verdict"


def runtime_client() -> Any:
    """Returns the client of JAX's distributed runtime. Orbax has a public function for it."""
    from orbax.checkpoint import multihost  # slow to import, and needed only with several hosts

    return multihost.get_jax_distributed_client()
