"""`Alarm`: if one host of an iterator fails, or its process ends too early, all hosts stop.

In random access, hosts make their batches without communication. The other hosts would not notice
that one host has failed, and would wait for it in the next collective, which Python cannot
interrupt. So a host whose iterator raises an error tells the other hosts, through the `Listener` of
its process, and their iterators raise an error as well.

A process that ends tells the others how many batches its training loops received. If the loop of
another host has received more batches of the same iterator, that host stops all hosts. Otherwise
nothing stops.

A training loop that is already blocked in a collective does not call `next` again. Its process
prints the stacks of its threads and ends. With GRAIN_SHARD_END_PROCESS=0, for notebooks and
supervisors, the process does not end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from absl import logging

from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts.blocked import Blocked
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.rounds import Rounds
from grain_shard.threads.pool import Pool


class Alarm:
    """The failures of one iterator that this host knows of: its own, and failures of other hosts.

    The loop's thread and the listening thread call the methods.

    Args:
        rounds: The rounds of the iterator, which have its name and its hosts.
        stage: The batches that the training loop takes.
        first: Number of batches before the first one of `stage`.
        total: Number of all batches, with those before `stage`; None if it is not known.
        tell: Sends the text of an error to the other hosts, which stops them.

    Attributes:
        series: The name of the iterator, the same on all hosts.
        all_know: True once all hosts know that the iterator failed on one of them.
        is_agreed: True once the hosts have compared their pipelines.
        asked: Number of times that the training loop asked for a batch.
    """

    def __init__(
        self,
        rounds: Rounds,
        stage: Pool[Any] | AgreedEnd[Any],
        first: int,
        total: int | None,
        tell: Callable[[str], None],
    ):
        self.series: str = rounds.name
        self._host, self._first, self._tell = rounds.host, first, tell
        self._of = "" if total is None else f" of {total:,}"  # as in "batch 7 of 90"
        self._stage: Pool[Any] | AgreedEnd[Any] | None = stage
        self._taken = 0  # `taken`, kept when `close` drops the stage
        self.asked = 0
        self._failure: AgreementError | None = None  # of another host
        self.all_know = self.is_agreed = False
        self._is_at_end = False  # True once the loop has received all batches
        self._is_over = False  # True once the loop needs no more batches: error, end or `close`
        self._loop = threading.main_thread().ident or 0  # the thread that last asked for a batch
        self._blocked: Blocked | None = None  # watches the loop after a failure of another host
        self._ended: dict[int, str] = {}  # the end of the process, in words, by host

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._stage is None

    @property
    def may_go_on(self) -> bool:
        """True if other hosts may take more batches than this host's loop has received."""
        return self.is_agreed and not self.all_know and not self._is_at_end

    @property
    def taken(self) -> int:
        """Number of batches of `stage` that the training loop has received."""
        return self._taken if (stage := self._stage) is None else stage.taken

    def asks(self) -> None:
        """Notes that the training loop asks for a batch: each ``next`` begins with this call.

        Raises:
            AgreementError: Another host has failed.
        """
        self._loop = threading.get_ident()
        self.asked += 1
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises the failure of another host, if there is one.

        Raises:
            AgreementError: Another host has failed. The message names the host and its error.
        """
        if (failure := self._failure) is not None:
            self._is_over = True
            raise failure

    def sound(self, error: BaseException) -> None:
        """Tells the other hosts of an error that the iterator raises on this host.

        They are told only once, because the iterator keeps raising the error. They are not told of
        an error that all hosts raise, such as the verdict of a round.
        """
        all_know = self.all_know or getattr(error, "series", "") == self.series
        self.all_know = self._is_over = True
        if not all_know:
            self._tell(
                f"host {self._host} failed, so this host stops as well.\n  {describe_error(error)}"
            )

    def hear(self, text: str) -> None:
        """Stops the iterator, because another host has failed.

        Args:
            text: The message of the error that this host raises.
        """
        if self.all_know:  # only the first failure counts
            return
        logging.error("grain_shard: %s", text)
        self._failure, self.all_know = AgreementError(text), True
        if (stage := self._stage) is not None:
            stage.stop()
        if not self._is_over:
            self._blocked = Blocked()

    def hear_end(self, host: int, batches: int, error: str | None) -> None:
        """Notes that the process of another host has ended before the end of the data.

        All hosts stop if this host's loop has received more batches: the other host will never
        join the step of the next one.

        Args:
            host: The other host.
            batches: Number of batches that its loop received.
            error: The uncaught error that ended the process; None if there was none.
        """
        after = f"after batch {self._first + batches:,}{self._of}"
        self._ended[host] = f"the process of host {host} ended {after}" + (
            f" ({error})" if error else ""
        )
        if (taken := self.taken) > batches:
            self._stop(host, f"host {self._host} got batch {self._first + taken:,}")

    def require_voters(self, missing: Callable[[], Iterable[int]]) -> None:
        """Stops all hosts if this host waits for the vote of a process that has ended.

        Args:
            missing: Returns the hosts that have not voted yet.

        Raises:
            AgreementError: A process has ended, and cannot vote.
        """
        if self._ended:  # `missing` asks the store, which is not needed otherwise
            for host in self._ended.keys() & missing():
                self._stop(host, f"host {self._host} waits for its next batch")
        self.raise_failure()

    def _stop(self, host: int, why: str) -> None:
        if not self.all_know:
            text = (
                f"{self._ended[host]}, and {why}.\n"
                f"  remedy: look at the log of host {host}. A loop must end at the same batch on"
                " all hosts."
            )
            self.hear(text)
            self._tell(text)

    def is_blocked(self, asked: int, pause_s: float) -> bool:
        """Returns True if this process must end, because its loop is blocked after a failure.

        Args:
            asked: Number of times that the loops of this process have asked for a batch.
            pause_s: Seconds since the last call.
        """
        blocked = None if self._is_over else self._blocked
        return blocked is not None and blocked.look(self._loop, asked, pause_s)

    def end(self) -> None:
        """Notes that the training loop has received all batches."""
        self._is_at_end = self._is_over = True

    def close(self) -> None:
        """Notes that the training loop takes no more batches."""
        # The listener may keep this alarm, which must not keep the iterator in memory. The stage
        # and the traceback of the failure refer to the iterator.
        self._taken, self._is_over = self.taken, True
        self._stage = self._failure = None
