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

import faulthandler
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from absl import logging

from grain_shard.background import TaskStage
from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts import exits
from grain_shard.hosts.asks import AT_END, IN_RUN, Asks, describe, one_ahead, step_s
from grain_shard.hosts.compare import hosts_text
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.listener import listener_of
from grain_shard.hosts.places import Place, left_early
from grain_shard.hosts.rounds import Rounds, runtime_client

# After another host failed, a process ends if its training loop is blocked for `_STILL_S` seconds.
# This is checked every `_LOOK_S` seconds.
_STILL_S, _LOOK_S = 10.0, 0.5
# Seconds between the close of an iterator and the report that the loop was left. An error that
# closed the iterator is reported meanwhile.
_ERROR_MAY_COME_S = 2.0
# Held while a thread asks for the process's listener. Two threads may open iterators at once, and
# the process needs only one listener.
_one_asks = threading.Lock()
# An environment variable. If it is "0", a process does not end when its training loop is blocked.
_END_PROCESS = "GRAIN_SHARD_END_PROCESS"
# The topics of the places of all hosts and of the times of their calls, and the key that says that
# all have left at the same batch.
_PLACES, _ASKS, _OVER = "places", "asks", "over"
# Seconds between two comparisons of the times. When a host has reached the end of the data, the
# others stand still if they take no batch for so many seconds, and for so many steps.
_COMPARE_S, _ENDS_TOGETHER_S, _STEPS_TO_END = 4.0, 5.0, 3.0
_LEFT = "break, close, seek, reset or set_state, or an error that was handled"


class Alarm:
    """Tells other hosts of a failure of one iterator; raises failures of other hosts on this host.

    Args:
        rounds: The rounds of the iterator, which have its name and its hosts.
        stage: The batches that the training loop takes.
        first: Number of batches before the first one of `stage`.
        total: Number of all batches, with those before `stage`; None if it is not known.
        late: Raises an error if the other hosts have stopped waiting for this host's first batch.

    Attributes:
        series: The name of the iterator, the same on all hosts.
        others: The other hosts that run the iterator.
        all_know: True once all hosts know that the iterator failed on one of them. It is also True
            once the other hosts cannot be told.
        is_agreed: True once the hosts have compared their pipelines.
        compares: True once this host has begun to compare.
        is_at_end: True once the training loop has got all batches.
    """

    def __init__(
        self,
        rounds: Rounds,
        stage: TaskStage[Any] | AgreedEnd[Any],
        first: int,
        total: int | None,
        late: Callable[[], None],
    ):
        self.series: str = rounds.name
        self.others = [host for host in rounds.hosts if host != rounds.host]
        self._rounds, self._first, self._total, self._late = rounds, first, total, late
        self._stage: TaskStage[Any] | AgreedEnd[Any] | None = stage
        self._failure: AgreementError | None = None
        self.is_at_end = self.all_know = self.is_agreed = self.compares = False
        self._is_over = False  # True once the loop has got an error, or the iterator is closed
        self._place, self._posted, self._left_at = Place(0, None), Place(0, None), 0.0
        self._times, self._has_warned = Asks(), False
        self._compare_at, self._places, self._still_since = 0.0, dict[int, Place](), math.inf
        self._loop = threading.main_thread().ident or 0  # the thread that last asked for a batch
        with _one_asks:
            self._listener = listener_of(runtime_client())
        self._listener.alarms[self.series] = self

    def sound(self, error: BaseException) -> None:
        """Tells the other hosts of an error that the iterator raises on this host.

        A second call does nothing, because the iterator raises the same error again. Neither does a
        call with an error that all hosts of the iterator raise.
        """
        if not self.all_know and getattr(error, "series", "") != self.series:
            host = self._rounds.host
            text = f"host {host} failed, so this host stops as well.\n  {describe_error(error)}"
            self._listener.tell(self.series, self.others, text)
        self.others_know()

    def others_know(self) -> None:
        """Notes that the iterator raises an error, and that no other host has to be told of it."""
        self.all_know = self._is_over = True

    def asks(self) -> None:
        """Notes that the training loop asks for a batch. Each ``next`` calls this."""
        self._loop = threading.get_ident()
        self._listener.asked += 1
        if (stage := self._stage) is not None and self._place.left is None:
            asked = stage.taken + (self._first + stage.taken != self._total)
            self._place = Place(asked, None)
            self._times.note(stage.taken)

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
        if not self.is_at_end:
            self._listener.left_last = self
        if self.all_know or not self.is_agreed:
            self._listener.alarms.pop(self.series, None)

    def leave(self, why: str) -> None:
        """Notes that the training loop takes no more batches; a second call does nothing.

        Args:
            why: The reason; "" at the end of the data.
        """
        if (stage := self._stage) is not None and self._place.left is None:
            if self._first + stage.taken == self._total or not why:
                self.is_at_end, why = True, ""
            self._left_at, self._place = time.monotonic(), Place(stage.taken, why)

    def look(self, *, at_exit: bool = False) -> None:
        """Posts the place of this host, and compares the places of all hosts on the first host.

        The listening thread calls this every few seconds, and the exit hook of the process.

        Args:
            at_exit: True if the process ends.
        """
        if not self.is_agreed:
            self._look_if_late()
            return
        place, rounds = self._place, self._rounds
        if place != self._posted:
            if place.left and not at_exit and time.monotonic() < self._left_at + _ERROR_MAY_COME_S:
                return
            why = exits.reason(place.left) if place.left else place.left
            rounds.put(_PLACES, Place(place.batches, why))
            self._posted = place  # not `_place`, which the loop may have changed meanwhile
        if time.monotonic() >= self._compare_at or place.left is not None:
            self._compare_at = time.monotonic() + _COMPARE_S
            rounds.put(_ASKS, list(self._times.latest))
        if rounds.is_leader:
            places = {host: Place(*place) for host, place in rounds.get_all(_PLACES).items()}
            of = "" if self._total is None else f" of {self._total:,}"
            error = left_early(places, len(rounds.hosts), self._first, of)
            if error == "":
                rounds.put_once(_OVER, True)
                rounds.delete(f"{_PLACES}/")
                rounds.delete(f"{_ASKS}/")
                self._listener.alarms.pop(self.series, None)
            elif error := error or self._one_ahead(places):
                self._listener.tell(self.series, self.others, error)
                self.hear(error)
        elif place.left is not None and rounds.wait(_OVER, 1):
            self._listener.alarms.pop(self.series, None)

    def _one_ahead(self, places: Mapping[int, Place]) -> str | None:
        """Warns once if hosts are one batch ahead of others.

        Returns:
            The error, if the hosts that are ahead have reached the end of the data, and the others
            have not; None otherwise.
        """
        now, at_end = time.monotonic(), {h for h, place in places.items() if place.left == ""}
        if places != self._places:
            self._places, self._still_since = dict(places), now
        still_s = now - self._still_since
        if self._has_warned and not (at_end and still_s > _ENDS_TOGETHER_S):
            return None
        asks = self._rounds.get_all(_ASKS)
        slow_steps_s = _STEPS_TO_END * max(map(step_s, asks.values()))
        is_end = bool(at_end) and still_s > max(_ENDS_TOGETHER_S, slow_steps_s)
        ahead, behind = one_ahead(asks, AT_END if is_end else IN_RUN)
        if not ahead:
            return None
        text = describe(ahead, behind)
        if is_end and at_end >= set(ahead) and not at_end & set(behind):
            return (
                f"{text}\n  {hosts_text(ahead)} reached the end of the data, and waits for nobody."
            )
        if not self._has_warned:
            self._has_warned = True
            logging.warning("grain_shard: %s", text)
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
            threading.Thread(
                target=self._watch, name="grain-shard-alarm-watch", daemon=True
            ).start()

    def _fail(self, failure: AgreementError) -> None:
        self.all_know, self._failure = True, failure
        if (stage := self._stage) is not None:
            stage.stop()
        else:
            self._listener.alarms.pop(self.series, None)

    def _watch(self) -> None:
        """Ends this process if its training loop stays blocked after another host failed.

        The loop is blocked if for 10 seconds its thread stays at one instruction and asks for no
        batch. With GRAIN_SHARD_END_PROCESS=0 the process does not end.
        """
        where, since = None, time.monotonic()
        while time.monotonic() - since < _STILL_S:
            if self._is_over:
                return
            frame = sys._current_frames().get(self._loop)
            now = self._listener.asked, id(frame), frame and frame.f_lasti
            if now != where:
                where, since = now, time.monotonic()
            time.sleep(_LOOK_S)
        ends = os.environ.get(_END_PROCESS) != "0"
        try:
            logging.error(
                "grain_shard: the training loop has not moved for %g s since the log of that error."
                " Most likely a collective waits for the other host for ever. So this process %s."
                " The stacks of its threads:",
                _STILL_S,
                "ends here" if ends else f"would end, but {_END_PROCESS}=0 keeps it",
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        finally:
            if ends:
                exits.end()
