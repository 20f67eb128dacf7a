"""`HostGroup`: the connection of an iterator to the same iterator on other hosts.

The hosts compare their pipelines at the first batch, vote on the end of streams, and tell each
other of failures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grain_shard.errors import AgreementError, HostTimeoutError, StateError
from grain_shard.hosts.alarm import Alarm
from grain_shard.hosts.compare import OWN_ROWS, Answers, compare, compare_positions
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.listener import Listener, listener_of
from grain_shard.hosts.rounds import LOOPS_MAY_TAKE, Rounds, runtime_client
from grain_shard.hosts.series import Series
from grain_shard.hosts.verdict import Verdict
from grain_shard.threads.pool import Pool

T = TypeVar("T")

# The name of the round in which the hosts compare their pipelines.
_START = "start"
# The names of the two rounds of a save, with its number. In the first the hosts compare the batches
# at which they save. In the second they say that their files are written.
_SAVE, _WRITTEN = "save {}", "written {}"


@dataclass(frozen=True)
class GroupSettings:
    """The hosts that run an iterator together, and the fields that they compare.

    Attributes:
        kind: The kind of pipeline, such as "stream".
        hosts: All hosts in the mesh.
        series: Names each iterator of the dataset, the same on all hosts.
        timeout_s: The maximum number of seconds that a host waits for another.
        fields: The fields that must be the same on all hosts and are known before the first batch.
        shards: The shards of the batch axis that this host holds.
    """

    kind: str
    hosts: Sequence[int]
    series: Series
    timeout_s: float
    fields: Mapping[str, Any]
    shards: Sequence[int]


class HostGroup:
    """The connection of an iterator to the same iterator on other hosts, if there are any.

    Args:
        settings: The hosts of the iterator; None if it runs on this host alone. Then most methods
            do nothing.
        first: Number of batches of the pipeline before the first one of this connection.
        total: Number of all batches of the pipeline; None if it is not known.
        retries: Returns the number of this host's retries so far.
    """

    def __init__(
        self,
        settings: GroupSettings | None,
        first: int = 0,
        total: int | None = None,
        retries: Callable[[], int] = int,
    ):
        self._settings, self._first, self._total, self._retries = settings, first, total, retries
        self._rounds = settings and Rounds(settings.hosts, settings.timeout_s, settings.series)
        self._alarm: Alarm | None = None
        self._listener: Listener | None = None
        self._agreed: str | None = None  # the result of `compare`
        self._saves = 0  # number of saves begun, the same on all hosts; see `new_save`
        self._is_closed = False
        # For `waits`: the number of retries, and how long the loop had waited at the last of them.
        self._retried, self._retried_at_s = 0, 0.0

    def until_agreed_end(
        self, on_devices: Pool[T], read: Pool[Any], **how: Any
    ) -> Pool[T] | AgreedEnd[T]:
        """Returns the batches up to the end on which all hosts agree.

        Args:
            on_devices: This host's batches, on the devices. On a single host they are the result.
            read: This host's batches in host memory, from which `on_devices` is made.
            how: The other arguments of `AgreedEnd`.
        """
        if self._settings is None or self._rounds is None:
            return on_devices
        return AgreedEnd(on_devices, read, self._rounds, require_voters=self._require_voters, **how)

    def _require_voters(self, missing: Callable[[], Sequence[int]]) -> None:
        if self._alarm is not None:
            self._alarm.require_voters(missing)

    def start(self, stage: Pool[Any] | AgreedEnd[Any]) -> None:
        """Begins to listen for failures of other hosts, before the first batch is made.

        Args:
            stage: The batches that the training loop takes.
        """
        if (rounds := self._rounds) is not None and self._alarm is None:
            self._begin(rounds)
            self._listener = listener_of(runtime_client())
            self._alarm = self._listener.open(rounds, stage, self._first, self._total)

    def _begin(self, rounds: Rounds) -> None:
        if self._settings is not None and not rounds.name:
            rounds.begin(self._settings.kind)

    def asks(self) -> None:
        """Notes that the training loop asks for a batch: each ``next`` begins with this call.

        Raises:
            AgreementError: Another host has failed.
        """
        if self._alarm is not None:
            self._alarm.asks()

    def waits(self, waited_s: float) -> None:
        """Raises an error if the training loop has waited too long for the data of its own host.

        The other hosts meanwhile wait for this host in a collective, and cannot tell why. Each
        retry of a read gives the loop the whole time again.

        Args:
            waited_s: Seconds for which ``next`` has waited.

        Raises:
            HostTimeoutError: The loop has waited for `timeout_s`.
        """
        if self._rounds is None:
            return
        if (retries := self._retries()) != self._retried:
            self._retried, self._retried_at_s = retries, waited_s
        self._retried_at_s = min(self._retried_at_s, waited_s)  # a new wait begins at 0 s
        host, timeout_s = self._rounds.host, self._rounds.timeout_s
        if waited_s - self._retried_at_s > timeout_s:
            raise HostTimeoutError(
                f"host {host} has waited {waited_s:.0f} s for the data of its next batch"
                f" (timeout_s={timeout_s:g}), and the other hosts wait for host {host}.\n"
                f"  remedy: find out what the source of host {host} waits for. If it is only slow,"
                " raise timeout_s of .shard_to."
            )

    def check(self) -> None:
        """Raises the failure of another host, if there is one.

        Raises:
            AgreementError: Another host has failed.
        """
        if self._alarm is not None:
            self._alarm.raise_failure()

    def compare(self, fields: Mapping[str, Any], digest: str | None = None) -> str:
        """Compares the pipelines of all hosts, and the source's first record with a restored state.

        Only the first call compares. A later call returns the result of the first.

        Args:
            fields: More fields that must be the same on all hosts than `GroupSettings.fields`.
            digest: The digest of this host's rows of the first batch; None if there is no batch.

        Returns:
            The digest of the source's first record, on which all hosts agree; "" if there is none.

        Raises:
            AgreementError: A field differs, or a host has failed. The same error is raised on every
                host, and names the hosts and the field.
            HostTimeoutError: A host did not answer in time.
            StateError: The restored state was saved with other records.
            StopIteration: The iterator was closed during the comparison.
        """
        if self._agreed is None:
            self._agreed = self._compare(self._answer(fields, digest))
            if self._alarm is not None and self._listener is not None:
                self._alarm.is_agreed = True
                self._listener.agreed()
        return self._agreed

    def _compare(self, answer: Mapping[str, Any]) -> str:
        verdict = self._verdict(_START, answer, compare)
        if verdict is None:  # the iterator was closed
            raise StopIteration
        if verdict.changed:
            raise StateError(verdict.changed)
        return verdict.agreed

    def _answer(self, fields: Mapping[str, Any], digest: str | None) -> Mapping[str, Any]:
        if self._settings is None:
            return fields
        answer = {**self._settings.fields, **fields}
        if digest is not None and answer["rows"] in OWN_ROWS:
            answer[OWN_ROWS[answer["rows"]]] = [list(self._settings.shards), digest]
        return answer

    def _verdict(
        self, round_: str, answer: Any, decide: Callable[[Answers], Verdict]
    ) -> Verdict | None:
        if self._rounds is None:
            return decide({0: answer})
        self._rounds.put(round_, answer)
        verdict = self._rounds.verdict(round_, decide, stopped=lambda: self._is_stopped)
        self.check()
        return verdict

    @property
    def _is_stopped(self) -> bool:
        return self._is_closed or (self._alarm is not None and self._alarm.all_know)

    def new_save(self) -> int:
        """Returns the number of a new save of the iterator, the same on all hosts.

        Only the training loop's thread may call this, because in that thread all hosts save and
        open iterators in the same order.
        """
        if self._rounds is not None:
            self._begin(self._rounds)
        self._saves += 1
        return self._saves

    def compare_positions(self, save: int, fields: Mapping[str, Any]) -> None:
        """Raises an error unless all hosts save at the same batch.

        Nothing is compared before the first batch.

        Args:
            save: The number of the save.
            fields: The position at which this host saves, for example ``{"next batch": 8}``. It is
                empty for a stream, whose batches are not counted, so that nothing is compared.

        Raises:
            AgreementError: A host is at another batch, or has failed.
            HostTimeoutError: A host did not save.
        """
        alarm = self._alarm
        if self._rounds is None or alarm is None or not alarm.is_agreed or not fields:
            return
        self._rounds.put(_SAVE.format(save), fields)
        self._rounds.verdict(
            _SAVE.format(save),
            compare_positions,
            stopped=lambda: self._is_stopped,
            patience=LOOPS_MAY_TAKE,  # a host may first write a large model
        )
        # All hosts answered, so they began this save. They may still read the verdict of the save
        # before in another thread, but not the verdict of the save before that.
        self._rounds.forget(_SAVE.format(save - 2))
        self.check()

    def wait_until_written(self, save: int) -> None:
        """Waits until all hosts have written their files of a save.

        Args:
            save: The number of the save.

        Raises:
            HostTimeoutError: A host did not write its files within `timeout_s`.
        """
        if self._rounds is not None:
            self._rounds.put(_WRITTEN.format(save), True)
            self._rounds.verdict(_WRITTEN.format(save), lambda answers: Verdict())
            self._rounds.forget(_WRITTEN.format(save - 2))

    def failed(self, error: BaseException) -> None:
        """Tells the other hosts of an error of this host's iterator, unless they know of it.

        Raises:
            AgreementError: Another host failed before, which stopped this host's iterator.
        """
        self.check()
        if self._alarm is not None:
            self._alarm.sound(error)

    def interruption(self, error: BaseException) -> AgreementError | None:
        """Returns the error that ``next`` of this host raises from now on, after an interrupt.

        Args:
            error: The interrupt, such as KeyboardInterrupt.

        Returns:
            The error; None if the hosts have not begun to listen to each other: ``next`` may then
            be called again.
        """
        alarm, rounds = self._alarm, self._rounds
        if alarm is None or rounds is None:
            return None
        return AgreementError(
            f"{type(error).__name__} interrupted a call of next on this host, host {rounds.host}."
            " So all hosts stop.\n"
            "  remedy: call set_state with the same state on all hosts, or start again from the"
            " last checkpoint."
        )

    def ended(self, fields: Mapping[str, Any]) -> None:
        """Notes that the training loop has received all batches.

        If there was no batch at all, the pipelines are compared now.

        Args:
            fields: As in `compare`.

        Raises:
            AgreementError: Another host has failed, which ended the batches; or a field differs.
        """
        self.check()
        if self._alarm is not None:
            self.compare({**fields, "batches": "none left"})
            self._alarm.end()

    def close(self) -> None:
        """Ends the connection: other hosts' failures no longer count. Any thread may call this."""
        self._is_closed = True
        if self._alarm is not None:
            self._alarm.close()
