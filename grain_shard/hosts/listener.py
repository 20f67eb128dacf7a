"""`Listener`: the thread of a process that hears of other hosts, for all its iterators.

A process whose training loop raises an error of its own tells the other hosts at its exit. It then
skips the usual exit, in which JAX would wait for the other hosts for minutes. A process that leaves
the loop waits at its exit until the others have left at the same batch, as JAX would. If the others
go on, it skips the usual exit, too, and its status is not 0. The hosts did not run one program.
A process that goes on after a failure looks at its exit if another process has skipped the usual
exit. Then JAX would wait for it in vain.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

import jax
from absl import logging

from grain_shard.errors import AgreementError
from grain_shard.hosts import exits
from grain_shard.hosts.progress import LoopProgress
from grain_shard.hosts.rounds import Store

# Keys of the store: the messages for a host, by the numbers of host and message; and the topic
# under which hosts confirm that they heard of the failure of an iterator, by the iterator's name.
_MESSAGE, _HEARD = "messages/{}/{}", "heard/{}"
# The topic under which each host says, at its exit, if it skips the usual exit.
_SKIPS = "skips"
# Milliseconds between two looks at the places of the hosts, in the run and at the exit. With more
# than 250 hosts it is four milliseconds for each host, because the process of the first host has to
# serve the calls of all hosts.
_TURN_MS, _TURN_AT_EXIT_MS, _MS_FOR_A_HOST = 1_000, 200, 4
# Most seconds that the first process waits for the other hosts to receive an error, and seconds
# between two checks. The store is in the first process, and ends with it.
_HEARD_S, _LOOK_AGAIN_S = 5.0, 0.05
# Most seconds that a process waits at its exit for the listening thread to end; and for the other
# hosts to leave the loop, too. Then JAX waits for them as long again.
_JOIN_S, _OTHERS_LEAVE_S = 30.0, 300.0


class Hears(Protocol):
    """The alarm of an iterator, as its listener knows it; `Alarm` describes the attributes."""

    series: str
    others: list[int]
    all_know: bool
    is_agreed: bool
    progress: LoopProgress

    def hear(self, text: str) -> None: ...
    def sound(self, error: BaseException) -> None: ...
    def leave(self, why: str) -> None: ...
    def look(self, *, at_exit: bool = False) -> None: ...


class Listener:
    """The thread of a process that receives the failures of other hosts, for all its iterators.

    The store has numbered messages for each host. To end the thread, the host writes a message to
    itself. The thread must end before the interpreter does: with Python 3.11, a thread that returns
    from a call into the runtime after that aborts the process ("FATAL: exception not rethrown").

    Attributes:
        alarms: The alarm of each iterator that is open, or that other hosts may not have left yet,
            by the iterator's name.
        asked: Number of times that an iterator of this process was asked for a batch.
        left_last: The alarm of the last iterator that was closed before its end; None if there is
            none.
    """

    def __init__(self):
        self._store = Store()
        self.asked: int = 0
        self.alarms: dict[str, Hears] = {}
        self.left_last: Hears | None = None
        self._heard = 0  # number of messages that were received
        self._has_failed = False  # True once an iterator has failed on any host
        self._look_at = 0.0
        self._turn_ms = max(_TURN_MS, _MS_FOR_A_HOST * jax.process_count())
        self._thread = threading.Thread(target=self._listen, name="grain-shard-alarm", daemon=True)
        self._thread.start()
        exits.note_exits()
        # Exit hooks run in reverse order. So this hook runs before the hook of JAX, which waits for
        # all hosts.
        atexit.register(self._at_exit)

    def tell(self, series: str, hosts: Sequence[int], text: str) -> None:
        """Sends an error to other hosts of an iterator.

        Args:
            series: The name of the iterator.
            hosts: The hosts.
            text: The error for these hosts.
        """
        self._has_failed = True
        try:
            for host in hosts:
                self._write(host, {"series": series, "text": text})
        except AgreementError as failure:
            logging.error("grain_shard: other hosts could not be told of a failure: %s", failure)

    def _write(self, host: int, message: dict[str, Any]) -> None:
        """Writes a message for a host, under the first free number."""
        keys = (_MESSAGE.format(host, number) for number in itertools.count())
        next(key for key in keys if self._store.put_once(key, message))

    def _listen(self) -> None:
        while True:
            try:
                if not self._turn(self._turn_ms, at_exit=False):
                    return
            except AgreementError:  # raised if the runtime has ended
                return
            except Exception:
                logging.exception("grain_shard: a report of another host could not be handled")

    def _turn(self, turn_ms: int, *, at_exit: bool) -> bool:
        """Waits for one message and handles it; looks at the places of the hosts if that is due.

        Returns:
            False if this process has told its listening thread to end.

        Raises:
            AgreementError: The runtime has ended.
        """
        message = self._store.wait(_MESSAGE.format(self._store.host, self._heard), turn_ms)
        if message == {}:
            return False
        if message:
            self._heard += 1
            self._has_failed = True
            self._store.put(_HEARD.format(message["series"]), "")
            if (alarm := self.alarms.get(message["series"])) is not None:
                alarm.hear(message["text"])
        if time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + turn_ms / 1e3
            for alarm in list(self.alarms.values()):
                if not alarm.all_know:
                    alarm.look(at_exit=at_exit)
        return True

    def _at_exit(self) -> None:
        unhandled = exits.unhandled()
        # Most likely the unhandled error has closed the iterator of `left_last`.
        known = (*self.alarms.values(), self.left_last)
        alarms = [alarm for alarm in known if alarm is not None and not alarm.progress.is_at_end]
        if unhandled is not None and alarms:
            for alarm in alarms:
                alarm.sound(unhandled)
            self._wait_for_others(alarms)
            self._end()
        with contextlib.suppress(AgreementError):
            self._write(self._store.host, {})
        self._thread.join(_JOIN_S)
        with contextlib.suppress(AgreementError):
            self._wait_until_all_left()
            self._store.put(_SKIPS, False)
            if self._has_failed and self._others_skip():
                self._end()

    def _wait_until_all_left(self) -> None:
        """Waits until all hosts have left all iterators; ends the process if they go on."""
        self._heard += 1  # the empty message
        alarms = [a for a in self.alarms.values() if a.is_agreed and not a.all_know]
        for alarm in alarms:
            alarm.leave("its program ended")
        self.alarms = {alarm.series: alarm for alarm in alarms}
        until, self._look_at = time.monotonic() + _OTHERS_LEAVE_S, 0.0
        turn_ms = max(_TURN_AT_EXIT_MS, _MS_FOR_A_HOST * jax.process_count())
        while self.alarms and not any(alarm.all_know for alarm in alarms):
            self._turn(turn_ms, at_exit=True)
            if time.monotonic() > until:
                return
        if any(alarm.all_know for alarm in alarms):
            self._wait_for_others(alarms)
            self._end()

    def _end(self) -> NoReturn:
        """Ends this process without the usual exit, and tells the other hosts."""
        with contextlib.suppress(AgreementError):
            self._store.put(_SKIPS, True)
        status = exits.status() if exits.unhandled() is None else 1
        if not status:
            logging.error("grain_shard: so this process ends with status 1, and not with 0.")
        exits.end(status or 1)

    def _others_skip(self) -> bool:
        """Waits for the exits of all hosts; returns True if one of them skips the usual exit."""
        begun, skips = time.monotonic(), self._store.get_all(_SKIPS)
        while len(skips) < jax.process_count():
            # Once a host has skipped it, the others have a little time to receive the error.
            if time.monotonic() > begun + (_HEARD_S if any(skips.values()) else _JOIN_S):
                break
            time.sleep(_LOOK_AGAIN_S)
            skips = self._store.get_all(_SKIPS)
        return any(skips.values())

    def _wait_for_others(self, alarms: Sequence[Hears]) -> None:
        """On host 0, waits until all other hosts have received an error, 5 seconds at most.

        Args:
            alarms: The alarms of the iterators that failed.
        """
        until = time.monotonic() + _HEARD_S
        if self._store.host != 0:
            return
        with contextlib.suppress(AgreementError):
            for alarm in alarms:
                while len(self._store.get_all(_HEARD.format(alarm.series))) < len(alarm.others):
                    if time.monotonic() > until:
                        return
                    time.sleep(_LOOK_AGAIN_S)


@functools.lru_cache(maxsize=1)  # by the client, as a restarted JAX runtime has a new one
def listener_of(client: Any) -> Listener:
    """Returns the listener of this process; the first call with a client starts it."""
    return Listener()
