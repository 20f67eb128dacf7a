"""`Alarm`: a host that fails tells all other hosts, so that they do not wait for it for ever.

In random access, hosts make their batches without communication. So they do not notice that one
host has failed, and go on to the next collective. The collective waits for the failed host, and
Python cannot interrupt it. Therefore a host whose iterator raises an error puts the error into the
key-value store of JAX's distributed runtime. A thread of every process listens to the store. On the
other hosts the iterator then raises an error, too.

The training loop of another host may be blocked in a collective, so that it does not ask its
iterator for a batch. The blocked process then prints the stack of each thread and ends. With
GRAIN_SHARD_END_PROCESS=0, for notebooks and supervisors, it does not end.

A process that ends because of such an error skips the usual exit, in which JAX would wait for the
other hosts for minutes. A process whose training loop raises an error of its own tells the other
hosts, and ends in the same way.
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
from grain_shard.hosts.rounds import Rounds, Store, runtime_client

# Keys of the store: the messages for a host, by the numbers of host and message; and the topic
# under which hosts confirm that they heard of the failure of an iterator, by the iterator's name.
_MESSAGE, _HEARD = "messages/{}/{}", "heard/{}"
# Most milliseconds that the listening thread waits for a message in one call.
_TURN_MS = 15_000
# After another host failed, a process ends if its training loop is blocked for `_STILL_S` seconds.
# This is checked every `_LOOK_S` seconds.
_STILL_S, _LOOK_S = 10.0, 0.5
# Most seconds that the first process waits for the other hosts to receive an error, and seconds
# between two checks. The store is in the first process, and ends with it.
_HEARD_S, _LOOK_AGAIN_S = 5.0, 0.05
# Most seconds that a process waits at its exit for the listening thread to end.
_JOIN_S = 30.0
# Held while a thread asks for the process's listener. Two threads may open iterators at once, and
# the process needs only one listener.
_one_asks = threading.Lock()
# An environment variable. If it is "0", a process does not end when its training loop is blocked.
_END_PROCESS = "GRAIN_SHARD_END_PROCESS"


class Alarm:
    """Tells other hosts of a failure of one iterator; raises failures of other hosts on this host.

    Args:
        rounds: The rounds of the iterator, which have its name and its hosts.
        stop: Ends any wait of the training loop inside the iterator.

    Attributes:
        series: The name of the iterator, the same on all hosts.
        others: The other hosts that run the iterator.
        all_know: True once all hosts know that the iterator failed on one of them. It is also True
            once the other hosts cannot be told.
        is_at_end: True once the training loop has got all batches.
    """

    def __init__(self, rounds: Rounds, stop: Callable[[], None]):
        self.series: str = rounds.name
        self.others = [host for host in rounds.hosts if host != rounds.host]
        self._stop: Callable[[], None] | None = stop
        self._failure: AgreementError | None = None
        self.is_at_end = self.all_know = False
        self._is_over = False  # True once the loop has got an error, or the iterator is closed
        self._loop = threading.main_thread().ident or 0  # the thread that last asked for a batch
        with _one_asks:
            self._listener = listener_of(runtime_client())
        self._listener.alarms[self.series] = self

    def sound(self, error: BaseException) -> None:
        """Tells the other hosts of an error that the iterator raises on this host.

        A second call does nothing, because the iterator raises the same error again.
        """
        if not self.all_know:
            self._listener.tell(self, error)
        self.others_know()

    def others_know(self) -> None:
        """Notes that the iterator raises an error, and that no other host has to be told of it."""
        self.all_know = self._is_over = True

    def raise_failure(self) -> None:
        """Raises an error if another host has failed. Each ``next`` of the iterator calls this.

        Raises:
            AgreementError: Another host has failed. The message has the host and its error.
        """
        self._loop = threading.get_ident()
        self._listener.asked += 1
        if (failure := self._failure) is not None:
            self.others_know()
            raise failure

    def close(self) -> None:
        """Closes the alarm. Failures of other hosts are ignored from now on."""
        # The listener may keep this alarm in memory. The stop function and the frames of an error
        # refer to the iterator, which must not stay in memory.
        self._is_over, self._stop, self._failure = True, None, None
        if not self.is_at_end:
            self._listener.left_last = self
        self._listener.alarms.pop(self.series, None)

    def hear(self, host: int, text: str) -> None:
        """Notes that another host has failed, and stops the iterator.

        The listening thread calls this.

        Args:
            host: Number of the failed host.
            text: The error of the failed host.
        """
        text = f"host {host} failed, so this host stops as well.\n  {text}"
        logging.error("grain_shard: %s", text)
        self.all_know, self._failure = True, AgreementError(text)
        if (stop := self._stop) is not None:
            stop()
        threading.Thread(
            target=self._watch, args=(host, text), name="grain-shard-alarm-watch", daemon=True
        ).start()

    def _watch(self, host: int, text: str) -> None:
        """Ends this process if its training loop stays blocked after another host failed.

        The loop is blocked if for 10 seconds its thread stays at one instruction and asks for no
        batch. With GRAIN_SHARD_END_PROCESS=0 the process does not end.

        Args:
            host: Number of the failed host.
            text: The failure, for the log.
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
    """The thread of a process that receives the failures of other hosts, for all its iterators.

    The store has numbered messages for each host. To end the thread, the host writes a message to
    itself. The thread must end before the interpreter does: with Python 3.11, a thread that returns
    from a call into the runtime after that aborts the process ("FATAL: exception not rethrown").

    Attributes:
        alarms: The alarm of each open iterator, by the iterator's name (`Alarm.series`).
        asked: Number of times that an iterator of this process was asked for a batch.
        left_last: The alarm of the last iterator that was closed before its end; None if there is
            none.
    """

    def __init__(self):
        self._store = Store()
        self.asked: int = 0
        self.alarms: dict[str, Alarm] = {}
        self.left_last: Alarm | None = None
        self._thread = threading.Thread(target=self._listen, name="grain-shard-alarm", daemon=True)
        self._thread.start()
        # Exit hooks run in reverse order. So this hook runs before the hook of JAX, which waits for
        # all hosts.
        atexit.register(self._at_exit)

    def tell(self, alarm: Alarm, error: BaseException) -> None:
        """Sends an error of this host to all other hosts of an iterator.

        Args:
            alarm: The alarm of the iterator.
            error: The error.
        """
        message = {"series": alarm.series, "host": self._store.host, "text": describe_error(error)}
        try:
            for host in alarm.others:
                self._write(host, message)
        except AgreementError as failure:
            logging.error("grain_shard: other hosts could not be told of a failure: %s", failure)

    def _write(self, host: int, message: dict[str, Any]) -> None:
        """Writes a message for a host, under the first free number."""
        keys = (_MESSAGE.format(host, number) for number in itertools.count())
        next(key for key in keys if self._store.put_once(key, message))

    def _listen(self) -> None:
        number = 0
        while True:
            try:
                key = _MESSAGE.format(self._store.host, number)
                message = self._store.wait(key, _TURN_MS)
                if message is None:
                    continue
                if not message:
                    return  # an empty message, which this process sends to itself at its exit
                number += 1
                self._store.put(_HEARD.format(message["series"]), "")
                alarm = self.alarms.get(message["series"])
                if alarm is not None and not alarm.all_know:
                    alarm.hear(message["host"], message["text"])
            except AgreementError:  # raised if the runtime has ended
                return
            except Exception:
                logging.exception("grain_shard: a report of another host could not be handled")

    def _at_exit(self) -> None:
        unhandled = _unhandled()
        # Most likely the unhandled error has closed the iterator of `left_last`.
        known = (*self.alarms.values(), self.left_last)
        alarms = [alarm for alarm in known if alarm is not None and not alarm.is_at_end]
        if unhandled is not None and alarms:
            for alarm in alarms:
                alarm.sound(unhandled)
            if self._store.host == 0:
                self._wait_for_others(alarms)
            _end()
        with contextlib.suppress(AgreementError):
            self._write(self._store.host, {})
        self._thread.join(_JOIN_S)

    def _wait_for_others(self, alarms: Sequence[Alarm]) -> None:
        """Waits until all other hosts have received the error of this host, 5 seconds at most.

        Args:
            alarms: The alarms of the iterators that failed.
        """
        until = time.monotonic() + _HEARD_S
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


def _unhandled() -> BaseException | None:
    """Returns the error that ends this process; None if no error does.

    ``sys.last_value`` alone does not tell this. IPython, pytest and a Python prompt keep errors
    there after which they go on. An error that nothing handles leaves the outermost frame, too.
    """
    error = getattr(sys, "last_value", None)
    trace = None if error is None else error.__traceback__
    is_unhandled = trace is not None and trace.tb_frame.f_back is None
    is_prompt = hasattr(sys, "ps1")  # there, no error ends the process
    return error if is_unhandled and not is_prompt else None


def _end() -> None:
    """Ends this process with exit status 1, without exit hooks."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
