"""The alarm: a host that fails tells all others, so that none waits for it in vain.

Hosts that make their batches without a word to each other do not notice that one has failed. They
go on to the next collective, which waits for that host, and nothing in Python gets them out of it.
So a host whose iterator raises puts the error into the distributed runtime's key-value store, where
a thread of every process listens. On the other hosts the iterator then raises that failure, too. If
a training loop stands still and does not come to its iterator any more, its process prints where it
stands, and ends (unless GRAIN_SHARD_END_PROCESS is 0, for notebooks and supervisors).

A process that ends because of such an error ends at once, because JAX would wait at an ordinary
exit for all other hosts, for minutes. A process whose training loop has failed by itself ends in
the same way, and tells the other hosts.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from absl import logging

from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts.rounds import Store, runtime_client
from grain_shard.hosts.slowest import SlowestOf, compare_waits

# Topics: the messages for a host, by number; and the hosts that know that a series has failed.
_MESSAGE, _HEARD = "messages/{}/{}", "heard/{}"
# The longest time, in seconds, that the listening thread waits for a message in one call. Between
# two calls the hosts tell each other how long their loops have waited.
TURN_S = 15.0
# Seconds that the training loop may stand still after another host failed, and between two checks.
_STILL_S, _LOOK_S = 10.0, 0.5
# Seconds that the first process waits for the others to receive an error, and between two checks.
# The store is in the first process, and ends with it.
_HEARD_S, _LOOK_AGAIN_S = 5.0, 0.05
# Seconds that a process waits at its end for the listening thread, which it has woken.
_JOIN_S = 30.0
# Two threads may open iterators at once, inside of `Uninterrupted`, and need one listener.
_one_asks = threading.Lock()
# An environment variable: where it is "0", a process whose loop stands still does not end.
_END_PROCESS = "GRAIN_SHARD_END_PROCESS"


class Alarm:
    """The alarm of an iterator, between this host and the others that run the same iterator.

    Args:
        series: The name of the iterator's rounds, the same on all hosts.
        hosts: These hosts.
        stop: Ends whatever the training loop may be waiting for in the iterator.
        slowest: Learns which host is the slowest.

    Attributes:
        series: As given.
        hosts: As given.
        slowest: As given.
        all_know: Whether all hosts know that an iterator of the series failed, or cannot be told.
        is_at_end: Whether the loop has had all batches.
    """

    def __init__(
        self, series: str, hosts: Sequence[int], stop: Callable[[], None], slowest: SlowestOf
    ):
        self.series, self.hosts, self.slowest = series, list(hosts), slowest
        self._stop: Callable[[], None] | None = stop
        self._failure: AgreementError | None = None
        self.is_at_end = self.all_know = False
        self._is_over = False  # the loop knows of the failure, or the iterator is closed
        self._loop = threading.main_thread().ident or 0  # until another thread asks for a batch
        with _one_asks:
            self._listener = listener_of(runtime_client())
        self._listener.alarms[series] = self

    def sound(self, error: BaseException) -> None:
        """Tells the other hosts that the iterator raises an error of this host's."""
        if not self.all_know:  # each further call raises the same error again
            self._listener.tell(self, error)
        self.others_know()

    def others_know(self) -> None:
        """Notes that the iterator raises an error that the others know of, or cannot be told."""
        self.all_know = self._is_over = True

    def raise_failure(self) -> None:
        """Raises the failure of another host if there is one; called whenever a batch is asked for.

        Raises:
            AgreementError: That failure, in the name of its host.
        """
        self._loop = threading.get_ident()
        self._listener.asked += 1
        if (failure := self._failure) is not None:
            self.others_know()
            raise failure

    def close(self) -> None:
        """Closes the alarm: no failure concerns the iterator any more."""
        # The listener may keep this alarm. It must not keep the iterator, to which an error refers
        # by its frames.
        self._is_over, self._stop, self._failure = True, None, None
        if not self.is_at_end:
            self._listener.left_last = self
        self._listener.alarms.pop(self.series, None)

    def hear(self, host: int, text: str) -> None:
        """Notes that another host has failed; the listening thread calls this."""
        text = f"host {host} failed, so this host stops as well.\n  {text}"
        logging.error("grain_shard: %s", text)
        self.all_know, self._failure = True, AgreementError(text)
        if (stop := self._stop) is not None:
            stop()
        threading.Thread(
            target=self._watch, args=(host, text), name="grain-shard-alarm-watch", daemon=True
        ).start()

    def _watch(self, host: int, text: str) -> None:
        """Ends this process if its loop stands still before the loop learns of the failure.

        The user can keep the process by the environment variable `_END_PROCESS`.
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
                "grain_shard: %s\n  The training loop of this host has not moved for %g s since"
                " then. Most likely a collective waits for host %d for ever. So this process %s."
                " The stacks of its threads:",
                text,
                _STILL_S,
                host,
                "ends here" if ends else f"would end, but {_END_PROCESS}=0 keeps it",
            )
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr)
        finally:
            if ends:
                _end()


class Listener:
    """Hears of the failures of all iterators of this process, in one thread.

    It is inside the runtime all the time, so it also tells now and then how long loops have waited.

    Every host has numbered messages of its own in the store. So it can write one to itself, too, by
    which its thread ends. The interpreter's exit must not find that thread in the runtime: with
    Python 3.11 it aborts the process when it comes back ("FATAL: exception not rethrown").

    Attributes:
        alarms: The alarms of the iterators, by the names of the series.
        asked: Number of times that an iterator of this process was asked for a batch.
        left_last: The alarm of the last iterator that was closed before its end.
    """

    def __init__(self):
        self._store = Store()
        self.asked: int = 0
        self.alarms: dict[str, Alarm] = {}
        self.left_last: Alarm | None = None
        self._thread = threading.Thread(target=self._listen, name="grain-shard-alarm", daemon=True)
        self._thread.start()
        # Hooks run last in, first out: this one runs before JAX's, which waits for all hosts.
        atexit.register(self._at_exit)

    def tell(self, alarm: Alarm, error: BaseException) -> None:
        """Tells the other hosts of an iterator that this one has failed."""
        message = {"series": alarm.series, "host": self._store.host, "text": describe_error(error)}
        try:
            for host in alarm.hosts:
                if host != self._store.host:
                    self._write(host, message)
        except AgreementError as failure:
            logging.error("grain_shard: other hosts could not be told of a failure: %s", failure)

    def _write(self, host: int, message: dict[str, Any]) -> None:
        """Writes a message under the first number that is free."""
        keys = (_MESSAGE.format(host, number) for number in itertools.count())
        next(key for key in keys if self._store.put_once(key, message))

    def _listen(self) -> None:
        number = 0
        while True:
            try:
                key = _MESSAGE.format(self._store.host, number)
                message = self._store.wait(key, int(TURN_S * 1e3))
                if message is None:
                    of_all = {series: one.slowest for series, one in self.alarms.copy().items()}
                    compare_waits(self._store, of_all, TURN_S)
                elif not message:
                    return  # this process ends
                else:
                    number += 1
                    self._store.put(_HEARD.format(message["series"]), "")
                    alarm = self.alarms.get(message["series"])
                    if alarm is not None and not alarm.all_know:
                        alarm.hear(message["host"], message["text"])
            except AgreementError:
                return  # the runtime has ended
            except Exception:
                logging.exception("grain_shard: a report of another host could not be handled")

    def _at_exit(self) -> None:
        unhandled = getattr(sys, "last_value", None)
        alarms = [alarm for alarm in self.alarms.values() if not alarm.is_at_end]
        if self.left_last is not None:  # most likely by that error, which has let go of it
            alarms.append(self.left_last)
        if unhandled is not None and alarms:
            for alarm in alarms:
                if not alarm.all_know:
                    self.tell(alarm, unhandled)
            if self._store.host == 0:
                self._wait_for_others(alarms)
            _end()
        with contextlib.suppress(AgreementError):
            self._write(self._store.host, {})
        self._thread.join(_JOIN_S)

    def _wait_for_others(self, alarms: Sequence[Alarm]) -> None:
        """Waits some seconds at most until all hosts, except the failed one, received the error."""
        until = time.monotonic() + _HEARD_S
        with contextlib.suppress(AgreementError):
            for alarm in alarms:
                heard = _HEARD.format(alarm.series)
                while len(self._store.get_all(heard)) < len(alarm.hosts) - 1:
                    if time.monotonic() > until:
                        return
                    time.sleep(_LOOK_AGAIN_S)


@functools.lru_cache(maxsize=1)  # a restarted JAX runtime has another client
def listener_of(client: Any) -> Listener:
    """Returns the listener of this process; the first call with a client starts it."""
    return Listener()


def _end() -> None:
    """Ends this process without its exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
