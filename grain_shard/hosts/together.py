"""`Together`: all that an iterator has to do with the same iterator on other hosts.

The hosts compare their pipelines at the first batch. They vote on the end of streams, tell each
other of failures, and learn which of them is the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grain_shard.background import TaskStage
from grain_shard.errors import AgreementError, StateError, describe_error
from grain_shard.hosts.alarm import Alarm
from grain_shard.hosts.compare import CONTENTS, OWN_ROWS, Answers, compare, compare_places
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.rounds import Rounds, meet
from grain_shard.hosts.series import Series
from grain_shard.hosts.slowest import SlowestOf, Waits
from grain_shard.interrupts import Uninterrupted
from grain_shard.tasks import Raised

T = TypeVar("T")

# The rounds in which the hosts compare their pipelines, and say whether their sources are steady.
_START, _STEADY = "start", "steady"
# The rounds in which the hosts compare the places that they save, by number.
_SAVE = "save {}"


@dataclass(frozen=True)
class AcrossHosts:
    """The hosts among which an iterator runs.

    Attributes:
        hosts: All hosts in the mesh.
        series: Gives each iterator of the dataset a name that is the same on all hosts.
        timeout_s: Longest time, in seconds, that a host waits for another.
        fields: The fields that must be the same on all hosts, besides the batches' shapes.
        shards: The shards of the batch axis that this host holds.
        remainder: The treatment of a stream that ends before other hosts' streams; see `decide`.
    """

    hosts: Sequence[int]
    series: Series
    timeout_s: float
    fields: Mapping[str, Any]
    shards: Sequence[int]
    remainder: str


class Together:
    """The connection of an iterator to the same iterator on other hosts, if there are any.

    The comparison is `Uninterrupted`, so that an interrupt of the loop leaves no round half done.

    Args:
        across: The other hosts; None if the iterator runs on this host alone.

    Attributes:
        slowest: Learns which host is the slowest; None before the start and on a single host.
    """

    def __init__(self, across: AcrossHosts | None):
        self._across = across
        self._rounds = across and Rounds(across.hosts, across.timeout_s, across.series)
        self._alarm: Alarm | None = None
        self._comparing: Uninterrupted | None = None
        self._agreed: str | Raised = ""
        self._saves = 0
        self._is_closed = False
        self.slowest: SlowestOf | None = None

    def until_agreed_end(
        self, placed: TaskStage[T], read: TaskStage[Any], **how: Any
    ) -> TaskStage[T] | AgreedEnd[T]:
        """Returns the batches up to the end that all hosts agree on; arguments as `AgreedEnd`."""
        if self._across is None or self._rounds is None:
            return placed
        return AgreedEnd(placed, read, self._rounds, remainder=self._across.remainder, **how)

    def start(self, kind: str, stop: Callable[[], None], waits: Callable[[float], Waits]) -> None:
        """Begins to listen, before the first batch is made.

        Args:
            kind: The kind of pipeline.
            stop: Ends whatever the training loop may be waiting for in the iterator.
            waits: As for `SlowestOf`.
        """
        if self._rounds is not None and self._alarm is None:
            self._rounds.begin(kind)
            self.slowest = SlowestOf(self._rounds.hosts, waits)
            self._alarm = Alarm(self._rounds.name, self._rounds.hosts, stop, self.slowest)

    def check(self) -> None:
        """Raises the failure of another host; called whenever a batch is asked for.

        Raises:
            AgreementError: Another host has failed.
        """
        if self._alarm is not None:
            self._alarm.raise_failure()

    def compare(
        self,
        fields: Mapping[str, Any],
        digest: str | None = None,
        is_steady: Callable[[], bool] = lambda: True,
    ) -> str:
        """Compares fields with the other hosts, and contents also with the restored state.

        Args:
            fields: Fields that must be the same on all hosts, besides the fields of `AcrossHosts`.
            digest: The digest of this host's rows of the first batch; None where there is none.
            is_steady: Returns whether the source gives the same records again.

        Returns:
            The digest of contents on which all agree; "" if there is none, or a source is not
            steady.

        Raises:
            AgreementError: A field differs, or a host failed; on every host, with hosts and field.
            HostTimeoutError: A host did not arrive.
            StateError: The restored state is of other records.
        """
        if self._comparing is None:
            answer = self._answer(fields, digest)
            self._comparing = Uninterrupted(lambda: self._compare(answer, is_steady))
        self._comparing()
        return self._agreed.throw() if isinstance(self._agreed, Raised) else self._agreed

    def _compare(self, answer: Mapping[str, Any], is_steady: Callable[[], bool]) -> None:
        try:
            verdict = self._verdict(_START, answer, compare)
            if verdict is None:  # the iterator was closed
                self._agreed = Raised(StopIteration(), None)
            elif "doubt" not in verdict:
                self._agreed = verdict.get(CONTENTS, "")
            elif self._verdict(_STEADY, is_steady(), lambda answers: all(answers.values())):
                raise (StateError if verdict["of"] == "state" else AgreementError)(verdict["doubt"])
        except BaseException as error:
            self._agreed = Raised.of(error)

    def _answer(self, fields: Mapping[str, Any], digest: str | None) -> Mapping[str, Any]:
        if self._across is None:
            return fields
        answer = {**self._across.fields, **fields}
        if digest is not None and answer["rows"] in OWN_ROWS:
            answer[OWN_ROWS[answer["rows"]]] = [list(self._across.shards), digest]
        return answer

    def _verdict(self, round_: str, answer: Any, decide: Callable[[Answers], Any]) -> Any:
        if self._rounds is None:
            return decide({0: answer})
        self._rounds.put(round_, answer)
        return self._rounds.verdict(round_, decide, stopped=lambda: self._is_closed)

    def compare_places(self, fields: Mapping[str, Any]) -> None:
        """Compares the place that this host saves with the places that the other hosts save.

        Before the first batch there is nothing to compare.

        Args:
            fields: The next batch, as fields that must be the same on all hosts; empty if batches
                are not counted on every host.

        Raises:
            AgreementError: A host is at another batch, or has failed.
            HostTimeoutError: A host did not save.
        """
        if self._rounds is None or self._alarm is None or self._comparing is None or not fields:
            return
        alarm, self._saves = self._alarm, self._saves + 1
        self._rounds.put(_SAVE.format(self._saves), fields)
        self._rounds.verdict(
            _SAVE.format(self._saves),
            compare_places,
            stopped=lambda: self._is_closed or alarm.all_know,
        )
        self._rounds.forget(_SAVE.format(self._saves - 1))
        self.check()

    def failed(self, error: BaseException) -> None:
        """Tells the other hosts of an error of the iterator, unless they know of it already."""
        alarm, rounds = self._alarm, self._rounds
        if alarm is None or rounds is None:
            return
        alarm.raise_failure()  # the iterator was stopped because another host failed
        if isinstance(error, AgreementError) or rounds.has_failed:
            alarm.others_know()  # they know of it, or cannot be told
        elif not isinstance(error, KeyboardInterrupt):
            if self._comparing is None:
                rounds.fail(_START, describe_error(error))
            else:
                alarm.sound(error)

    def ended(self, fields: Mapping[str, Any]) -> None:
        """The loop has had all batches; raises as `check`, if that is why there are no more.

        Args:
            fields: As for `compare`, if there was no batch.
        """
        self.check()
        if self._alarm is not None:
            self.compare({**fields, "batches": "none left"})
            self._alarm.is_at_end = True

    def meet(self, barrier: str) -> None:
        """Waits until all hosts have come to a barrier."""
        if self._across is not None:
            meet(barrier, self._across.hosts, self._across.timeout_s)

    def close(self) -> None:
        """No message of another host concerns the iterator any more. By any thread."""
        self._is_closed = True
        if self._alarm is not None:
            self._alarm.close()
