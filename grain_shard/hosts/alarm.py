"""`Alarm`: a host that fails or leaves tells all other hosts, so that they do not wait for it.

In random access, hosts make their batches without communication. So they do not notice that one
host has failed, and go on to the next collective. The collective waits for the failed host, and
Python cannot interrupt it. Therefore a host whose iterator raises an error puts the error into the
key-value store of JAX's distributed runtime. A thread of every process, the `Listener`, listens to
the store. On the other hosts the iterator then raises an error, too.

A host also tells at which batch its loop was left. If another host asks for a later batch, that is
an error on all hosts.

The training loop of another host may be blocked in a collective, so that it does not ask its
iterator for a batch. The blocked process then prints the stack of each thread and ends. With
GRAIN_SHARD_END_PROCESS=0, for notebooks and supervisors, it does not end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from absl import logging

from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts.blocked import end_if_blocked
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.listener import listener_of
from grain_shard.hosts.own_data import OwnData
from grain_shard.hosts.progress import LoopProgress
from grain_shard.hosts.rounds import Rounds, runtime_client
from grain_shard.hosts.stillness import Stillness
from grain_shard.threads.background import Background

# Held while a thread asks for the process's listener. Two threads may open iterators at once, and
# the process needs only one listener.
_one_asks = threading.Lock()
_LEFT = "break, close, seek, reset or set_state, or an error that was handled"


class Alarm:
    """Tells other hosts of a failure of one iterator; raises failures of other hosts on this host.

    Args:
        rounds: The rounds of the iterator, which have its name and its hosts.
        stage: The batches that the training loop takes.
        first: Number of batches before the first one of `stage`.
        total: Number of all batches, with those before `stage`; None if it is not known.
        retries: Returns the number of this host's reads that were tried again so far.
        late: Raises an error if the other hosts have stopped waiting for this host's first batch.

    Attributes:
        series: The name of the iterator, the same on all hosts.
        others: The other hosts that run the iterator.
        all_know: True once all hosts know that the iterator failed on one of them. It is also True
            once the other hosts cannot be told.
        is_agreed: True once the hosts have compared their pipelines.
        compares: True once this host has begun to compare.
        progress: How far the training loop has come.
        stillness: Tells if the training loop has stood still for long.
    """

    def __init__(
        self,
        rounds: Rounds,
        stage: Background[Any] | AgreedEnd[Any],
        first: int,
        total: int | None,
        retries: Callable[[], int],
        late: Callable[[], None],
    ):
        self.series: str = rounds.name
        self.others = [host for host in rounds.hosts if host != rounds.host]
        self.progress: LoopProgress = LoopProgress(rounds, first, total)
        self._host, self._late = rounds.host, late
        self._stage: Background[Any] | AgreedEnd[Any] | None = stage
        self._failure: AgreementError | None = None
        self.all_know = self.is_agreed = self.compares = False
        self._is_over = False  # True after an error, at the end, and after `close`
        self._loop = threading.main_thread().ident or 0  # the thread that last asked for a batch
        # A loop stands still for half of `timeout_s` here, and then again at the first host.
        self.stillness: Stillness = Stillness(rounds.timeout_s / 2)
        self._own_data = OwnData(rounds.host, rounds.timeout_s, retries)
        with _one_asks:
            self._listener = listener_of(runtime_client())
        self._listener.alarms[self.series] = self

    def sound(self, error: BaseException) -> None:
        """Tells the other hosts of an error that the iterator raises on this host.

        A second call does nothing, because the iterator raises the same error again. Neither does a
        call with an error that all hosts of the iterator raise.
        """
        if not self.all_know and getattr(error, "series", "") != self.series:
            text = (
                f"host {self._host} failed, so this host stops as well.\n  {describe_error(error)}"
            )
            self._listener.tell(self.series, self.others, text)
        self.others_know()

    def others_know(self) -> None:
        """Notes that the iterator raises an error, and that no other host has to be told of it."""
        self.all_know = self._is_over = True

    def asks(self) -> None:
        """Notes that the training loop asks for a batch. Each ``next`` calls this."""
        self._loop = threading.get_ident()
        self.stillness.is_here()
        self._listener.asked += 1
        if (stage := self._stage) is not None:
            self.progress.asks(stage.taken)

    def raise_failure(self) -> None:
        """Raises an error if another host has failed.

        Raises:
            AgreementError: Another host has failed. The message has the host and its error.
        """
        if (failure := self._failure) is not None:
            self.others_know()
            raise failure

    def close(self) -> None:
        """Closes the alarm. Failures of other hosts are ignored from now on."""
        self.leave(_LEFT)
        # The listener may keep this alarm in memory. The stage and the frames of an error refer to
        # the iterator, which must not stay in memory.
        self._is_over, self._stage, self._failure = True, None, None
        if not self.progress.is_at_end:
            self._listener.left_last = self
        if self.all_know or not self.is_agreed:
            self._listener.alarms.pop(self.series, None)

    def leave(self, why: str) -> None:
        """Notes that the training loop takes no more batches; a second call does nothing.

        Args:
            why: The reason; "" at the end of the data.
        """
        if (stage := self._stage) is not None:
            self.progress.leave(stage.taken, why)
            self._is_over |= self.progress.is_at_end

    def look(self, *, at_exit: bool = False) -> None:
        """Compares the progress of all hosts. The listening thread calls this every few seconds.

        Args:
            at_exit: True if the process ends.
        """
        if not self.is_agreed:
            self._look_if_late()
        elif error := (
            self._own_data.error(self._waits_for())
            or self.progress.look(self.stillness.still(), at_exit=at_exit)
        ):
            self._listener.tell(self.series, self.others, error)
            self.hear(error)
        elif self.progress.all_left:
            self._listener.alarms.pop(self.series, None)

    def _waits_for(self) -> int | None:
        """Returns the number of the batch that the loop waits for; None if it does not wait."""
        stage = None if self._is_over else self._stage
        if isinstance(stage, Background) and self.progress.waits(stage.taken):
            return stage.taken
        return None

    def _look_if_late(self) -> None:
        if not self.compares:
            try:
                self._late()
            except AgreementError as error:
                self._fail(error)

    def hear(self, text: str) -> None:
        """Notes that another host has failed or left, and stops the iterator.

        The listening thread calls this.

        Args:
            text: The error for this host.
        """
        if self.all_know:
            return
        logging.error("grain_shard: %s", text)
        self._fail(AgreementError(text))
        if not self._is_over:
            watch = (lambda: (self._loop, self._listener.asked), lambda: self._is_over)
            threading.Thread(
                target=end_if_blocked, args=watch, name="grain-shard-alarm-watch", daemon=True
            ).start()

    def _fail(self, failure: AgreementError) -> None:
        self.all_know, self._failure = True, failure
        if (stage := self._stage) is not None:
            stage.stop()
        else:
            self._listener.alarms.pop(self.series, None)
