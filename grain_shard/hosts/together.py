"""`Together`: an iterator among its likes on other hosts, the one object by which it knows of them.

The hosts compare their pipelines at the first batch. They vote on the end of streams, tell each
other of failures, and learn which of them is the slowest.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from grain_shard.background import Background, TaskStage
from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts.alarm import Alarm
from grain_shard.hosts.compare import OWN_ROWS, compare
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.rounds import Rounds, meet
from grain_shard.hosts.series import Series
from grain_shard.hosts.slowest import SlowestOf, Waits
from grain_shard.tasks import Queue, Raised

T = TypeVar("T")

# The round in which the hosts compare their pipelines.
_START = "start"


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

    has_compared = True
    slowest: SlowestOf | None = None

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
        """

    def compare(self, fields: Mapping[str, Any], digest: str | None = None) -> None:
        """Compares fields with the other hosts.

        Args:
            fields: All that must be the same there, besides the fields of `AcrossHosts`.
            digest: The digest of this host's rows of the first batch; None where there is none.

        Raises:
            AgreementError: A field differs, or a host failed; on every host, with hosts and field.
            HostTimeoutError: A host did not arrive.
        """

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
        self._rounds = Rounds(across.hosts, across.timeout_s, across.series)
        self._alarm: Alarm | None = None
        self._failure: Raised | None = None
        self._stop: Callable[[], None] = lambda: None
        self.slowest, self.has_compared = None, False
        self._answers: Queue[Mapping[str, Any]] = Queue()
        self._comparing = Background(
            self._compare, self._answers, buffer_size=1, name="grain-shard-compare"
        )

    def until_agreed_end(
        self, placed: TaskStage[T], read: TaskStage[Any], **how: Any
    ) -> AgreedEnd[T]:
        return AgreedEnd(placed, read, self._rounds, remainder=self._across.remainder, **how)

    def start(self, kind: str, stop: Callable[[], None], waits: Callable[[float], Waits]) -> None:
        if self._alarm is None:
            self._rounds.begin(kind)
            name, hosts = self._rounds.name, self._rounds.hosts
            self._stop, self.slowest = stop, SlowestOf(name, hosts, waits)
            self._alarm = Alarm(name, hosts, stop)
            self._comparing.start()

    def check(self) -> None:
        if self._failure is not None:
            self._failure.throw()
        if self._alarm is not None:
            self._alarm.raise_failure()

    def compare(self, fields: Mapping[str, Any], digest: str | None = None) -> None:
        if not self.has_compared:
            answer = {**self._across.fields, **fields}
            if digest is not None and answer["rows"] in OWN_ROWS:
                answer[OWN_ROWS[answer["rows"]]] = [list(self._across.shards), digest]
            self._answers.put(answer)  # after an interrupt once more; the first one counts
            self._comparing.peek()
            self.has_compared = True
            self._comparing.stop()

    def _compare(self, answer: Mapping[str, Any]) -> None:
        try:
            self._rounds.put(_START, answer)
            self._rounds.verdict(_START, compare, stopped=lambda: self._answers.is_stopped)
        except AgreementError as failure:
            self._failure = Raised(failure, failure.__traceback__)
            self._stop()
            raise

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
            alarm.raised(error)  # the others know, or cannot be told
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
        for listening in (self._alarm, self.slowest):
            if listening is not None:
                listening.close()
        self._comparing.stop()
