"""`Together`: an iterator among its likes on other hosts, the one object by which it knows of them.

The hosts compare their pipelines at the first batch. They vote on the end of streams, tell each
other of failures, and learn which of them is the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grain_shard.background import Background, TaskStage
from grain_shard.errors import AgreementError, StateError, describe_error
from grain_shard.hosts.alarm import Alarm
from grain_shard.hosts.compare import CONTENTS, OWN_ROWS, Answers, compare
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.rounds import Rounds, meet
from grain_shard.hosts.series import Series
from grain_shard.hosts.slowest import SlowestOf, Waits
from grain_shard.tasks import Queue, Raised

T = TypeVar("T")

# The rounds in which the hosts compare their pipelines, and say whether their sources are steady.
_START, _STEADY = "start", "steady"


def _always() -> bool:
    return True


@dataclass(frozen=True)
class AcrossHosts:
    """The hosts among which an iterator runs.

    Attributes:
        hosts: All hosts in the mesh.
        series: Names the iterators of the dataset.
        timeout_s: How long one may wait for another, in seconds.
        fields: All that must be the same on all of them, besides the batches' shapes.
        shards: The shards of the batch axis that this host holds.
        remainder: The treatment of a stream that ends before other hosts' streams; see `decide`.
    """

    hosts: Sequence[int]
    series: Series
    timeout_s: float
    fields: Mapping[str, Any]
    shards: Sequence[int]
    remainder: str


class Alone:
    """An iterator that runs among no other hosts, and so has nothing to do for any of these.

    Attributes:
        has_compared: Whether it needs no `compare` any more.
        slowest: Learns which host is the slowest; None before the start and where there is one.
    """

    has_compared = False
    slowest: SlowestOf | None = None
    _failure: Raised | None = None

    def __init__(self):
        self._stop: Callable[[], None] = lambda: None
        self._agreed = ""

    def until_agreed_end(
        self, placed: TaskStage[T], read: TaskStage[Any], **how: Any
    ) -> TaskStage[T] | AgreedEnd[T]:
        """Returns the batches up to the end that all hosts agree on; arguments as `AgreedEnd`."""
        return placed

    def start(self, kind: str, stop: Callable[[], None], waits: Callable[[float], Waits]) -> None:
        """Begins to listen, before the first batch is made.

        Args:
            kind: The kind of pipeline.
            stop: Ends whatever the training loop may be waiting for in the iterator.
            waits: As for `SlowestOf`.
        """

    def check(self) -> None:
        """Raises the failure of another host; called whenever a batch is asked for.

        Raises:
            AgreementError: The hosts differ, or another one has failed.
            StateError: The restored state is of other records.
        """
        if self._failure is not None:
            self._failure.throw()

    def compare(
        self,
        fields: Mapping[str, Any],
        digest: str | None = None,
        is_steady: Callable[[], bool] = _always,
    ) -> str:
        """Compares fields with the other hosts, and contents also with the restored state.

        Args:
            fields: All that must be the same there, besides the fields of `AcrossHosts`.
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
        if not self.has_compared:
            self._ask(self._answer(fields, digest), is_steady)
        return self._agreed

    def _ask(self, answer: Mapping[str, Any], is_steady: Callable[[], bool]) -> None:
        self._compared((answer, is_steady))

    def _compared(self, asked: tuple[Mapping[str, Any], Callable[[], bool]]) -> None:
        answer, is_steady = asked
        try:
            verdict = self._verdict(_START, answer, compare)
            if "doubt" not in verdict:
                self._agreed = verdict.get(CONTENTS, "")
            elif self._verdict(_STEADY, is_steady(), lambda answers: all(answers.values())):
                raise (StateError if verdict["of"] == "state" else AgreementError)(verdict["doubt"])
        except (AgreementError, StateError) as failure:
            self._failure = Raised(failure, failure.__traceback__)
            self._stop()
            raise
        self.has_compared = True  # here, so that an interrupt of the loop does not undo it

    def _answer(self, fields: Mapping[str, Any], digest: str | None) -> Mapping[str, Any]:
        return fields

    def _verdict(self, round_: str, answer: Any, decide: Callable[[Answers], Any]) -> Any:
        return decide({0: answer})

    def failed(self, error: BaseException) -> None:
        """Tells the other hosts of an error of the iterator, as far as they do not know of it."""

    def ended(self, fields: Mapping[str, Any]) -> None:
        """The loop has had all batches; raises as `check`, if that is why there are no more.

        Args:
            fields: As for `compare`, if there was no batch.
        """

    def meet(self, barrier: str) -> None:
        """Waits until all hosts have come to a barrier."""

    def close(self) -> None:
        """No message of another host concerns the iterator any more. By any thread."""


class Together(Alone):
    """An iterator among its likes on other hosts, as `across` describes them.

    A thread of its own compares, so that an interrupt of the loop leaves no round half done.
    """

    def __init__(self, across: AcrossHosts):
        self._across = across
        super().__init__()
        self._rounds = Rounds(across.hosts, across.timeout_s, across.series)
        self._alarm: Alarm | None = None
        self._answers: Queue[tuple[Mapping[str, Any], Callable[[], bool]]] = Queue()
        self._comparing = Background(
            self._compared, self._answers, buffer_size=1, name="grain-shard-compare"
        )

    def until_agreed_end(
        self, placed: TaskStage[T], read: TaskStage[Any], **how: Any
    ) -> AgreedEnd[T]:
        return AgreedEnd(placed, read, self._rounds, remainder=self._across.remainder, **how)

    def start(self, kind: str, stop: Callable[[], None], waits: Callable[[float], Waits]) -> None:
        if self._alarm is None:
            self._rounds.begin(kind)
            name, hosts = self._rounds.name, self._rounds.hosts
            self.slowest, self._stop = SlowestOf(hosts, waits), stop
            self._alarm = Alarm(name, hosts, stop, self.slowest)
            self._comparing.start()

    def check(self) -> None:
        super().check()
        if self._alarm is not None:
            self._alarm.raise_failure()

    def _ask(self, answer: Mapping[str, Any], is_steady: Callable[[], bool]) -> None:
        self._answers.put((answer, is_steady))  # after an interrupt once more; the first one counts
        self._comparing.peek()
        self._comparing.stop()

    def _answer(self, fields: Mapping[str, Any], digest: str | None) -> Mapping[str, Any]:
        answer = {**self._across.fields, **fields}
        if digest is not None and answer["rows"] in OWN_ROWS:
            answer[OWN_ROWS[answer["rows"]]] = [list(self._across.shards), digest]
        return answer

    def _verdict(self, round_: str, answer: Any, decide: Callable[[Answers], Any]) -> Any:
        self._rounds.put(round_, answer)
        return self._rounds.verdict(round_, decide, stopped=lambda: self._answers.is_stopped)

    def failed(self, error: BaseException) -> None:
        alarm, rounds = self._alarm, self._rounds
        if alarm is None:
            return
        if not self.has_compared:
            if not isinstance(error, KeyboardInterrupt | AgreementError):
                rounds.fail(_START, describe_error(error), compare)
                self.has_compared = True
            return
        alarm.raise_failure()  # the iterator was stopped because another host failed
        if isinstance(error, AgreementError) or rounds.has_failed:
            alarm.others_know()  # or they cannot be told
        elif not isinstance(error, KeyboardInterrupt):
            alarm.sound(error)

    def ended(self, fields: Mapping[str, Any]) -> None:
        if self._alarm is not None:
            self._alarm.raise_failure()
            self.compare({**fields, "batches": "none left"})
            self._alarm.is_at_end = True

    def meet(self, barrier: str) -> None:
        meet(barrier, self._across.hosts, self._across.timeout_s)

    def close(self) -> None:
        if self._alarm is not None:
            self._alarm.close()
        self._comparing.stop()
