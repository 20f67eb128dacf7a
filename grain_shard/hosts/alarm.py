"""`Alarm`: if one host of an iterator fails, or its process ends too early, all hosts stop.

In random access, hosts make their batches without communication. So they do not notice that one
host has failed, and go on to the next collective. The collective waits for the failed host, and
Python cannot interrupt it. Therefore a host whose iterator raises an error tells the other hosts,
through the `Listener` of its process. On the other hosts the iterator then raises an error, too.

A process that ends tells how many batches its loops were handed. This stops each host that was
handed more batches of the same iterator, and no other host.

The training loop of another host may be blocked in a collective, so that it does not ask its
iterator for a batch. The blocked process then prints the stack of each thread and ends. With
GRAIN_SHARD_END_PROCESS=0, for notebooks and supervisors, it does not end.
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
    """The failures of one iterator that this host knows of, on this host and on others.

    The loop's thread and the listening thread call the methods.

    Args:
        rounds: The rounds of the iterator, which have its name and its hosts.
        stage: The batches that the training loop takes.
        first: Number of batches before the first one of `stage`.
        total: Number of all batches, with those before `stage`; None if it is not known.
        tell: Tells the other hosts an error, which stops them.

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
        self._of = "" if total is None else f" of {total:,}"
        self._stage: Pool[Any] | AgreedEnd[Any] | None = stage
        self._taken = self.asked = 0
        self._failure: AgreementError | None = None
        self.all_know = self.is_agreed = self._is_at_end = False
        self._is_over = False  # True after an error, at the end, and after `close`
        self._loop = threading.main_thread().ident or 0  # the thread that last asked for a batch
        self._blocked: Blocked | None = None
        self._ended: dict[int, str] = {}  # the end of the process, in words, by host

    @property
    def is_closed(self) -> bool:
        """True after `close`."""
        return self._stage is None

    @property
    def may_go_on(self) -> bool:
        """True if other hosts may take more batches than this host's loop was handed."""
        return self.is_agreed and not self.all_know and not self._is_at_end

    @property
    def taken(self) -> int:
        """Number of batches of `stage` that the training loop was handed."""
        return self._taken if (stage := self._stage) is None else stage.taken

    def asks(self) -> None:
        """Notes that the training loop asks for a batch. Each ``next`` calls this.

        Raises:
            AgreementError: Another host has failed.
        """
        self._loop = threading.get_ident()
        self.asked += 1
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises an error if another host has failed.

        Raises:
            AgreementError: Another host has failed. The message has the host and its error.
        """
        if (failure := self._failure) is not None:
            self._is_over = True
            raise failure

    def sound(self, error: BaseException) -> None:
        """Tells the other hosts of an error that the iterator raises on this host.

        A second call does nothing, because the iterator raises the same error again. Neither does a
        call with an error that all hosts of the iterator raise.
        """
        all_know = self.all_know or getattr(error, "series", "") == self.series
        self.all_know = self._is_over = True
        if not all_know:
            self._tell(
                f"host {self._host} failed, so this host stops as well.\n  {describe_error(error)}"
            )

    def hear(self, text: str) -> None:
        """Stops the iterator, because another host has failed. A second call does nothing.

        Args:
            text: The error for this host.
        """
        if self.all_know:
            return
        logging.error("grain_shard: %s", text)
        self._failure, self.all_know = AgreementError(text), True
        if (stage := self._stage) is not None:
            stage.stop()
        if not self._is_over:
            self._blocked = Blocked()

    def hear_end(self, host: int, batches: int, error: str | None) -> None:
        """Notes that the process of another host has ended before the end of the data.

        If this host's loop was handed more batches, this stops all hosts.

        Args:
            host: The other host.
            batches: Number of batches that its loop was handed.
            error: The last error that nothing handled in the process; None if there was none.
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
            missing: Returns the hosts whose votes this host waits for.

        Raises:
            AgreementError: A process has ended, and cannot vote.
        """
        if self._ended:  # otherwise the store need not be asked
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
        """Returns True if this process has to end, because its loop is blocked after a failure.

        Args:
            asked: Number of times that the loops of this process have asked for a batch.
            pause_s: Seconds since the last look.
        """
        blocked = None if self._is_over else self._blocked
        return blocked is not None and blocked.look(self._loop, asked, pause_s)

    def end(self) -> None:
        """Notes that the training loop has got all batches."""
        self._is_at_end = self._is_over = True

    def close(self) -> None:
        """Closes the alarm: the training loop takes no more batches."""
        # The listener may keep this alarm in memory. The stage and the frames of an error refer to
        # the iterator, which must not stay in memory.
        self._taken, self._is_over = self.taken, True
        self._stage = self._failure = None
