"""The alarm: a host that fails tells all others, so that none waits for it in vain.

Hosts that make their batches without a word to each other do not notice that one has failed. They
go on to the next collective, which waits for that host, and nothing in Python gets them out of it.
So a host whose iterator raises says so in the distributed runtime's key-value store, and a thread
of every process listens. There the iterator raises that failure in its turn. If the training loop
stands still and does not come to its iterator any more, the process says where it stands, and ends
(unless GRAIN_SHARD_END_PROCESS is 0, for notebooks and supervisors).

A process that ends because of such an error leaves at once: at its exit JAX would wait for all
others, for minutes. So does one whose training loop has failed by itself, and it tells the others.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import itertools
import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
from absl import logging

from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts.rounds import exists_already, is_timeout, runtime_client

_MESSAGE = "grain_shard/messages/{}/{}"  # the host that it is for, and its number
_HEARD = "grain_shard/heard/{}/{}"  # the series that has failed, and a host that knows
# The longest time, in seconds, that the listening thread waits for a message in one call. Between
# two calls it takes its turn at the other work that this process does in the runtime.
TURN_S = 10.0
# Seconds that the training loop may stand still after another host failed, and between two checks.
_STILL_S, _LOOK_S = 10.0, 0.5
# Seconds that the first process waits for the others to receive an error, and between two checks.
# The store is in the first process, and ends with it.
_HEARD_S, _LOOK_AGAIN_S = 5.0, 0.05
# Seconds that a process waits at its end for the listening thread, which it has woken.
_JOIN_S = 30.0
# An environment variable: where it is "0", a process whose loop stands still does not end.
_END_PROCESS = "GRAIN_SHARD_END_PROCESS"
# An attribute of the errors that end the run on all hosts.
_ENDS_ALL = "grain_shard_ends_all_hosts"


class Alarm:
    """Between an iterator of this host and its like on the others.

    Args:
        series: The name of the iterator's rounds, the same on all hosts.
        hosts: These hosts.
        stop: Ends whatever the training loop may be waiting for in the iterator.

    Attributes:
        is_at_end: Whether the loop has had all batches.
    """

    def __init__(self, series: str, hosts: Sequence[int], stop: Callable[[], None]):
        self._series, self._hosts, self._stop = series, list(hosts), stop
        self._failure: AgreementError | None = None
        self.is_at_end = False
        self._loop = threading.main_thread().ident or 0  # or another one that asks for batches
        # Receives an item once the loop knows of the failure, or the iterator is closed. No Event,
        # since the garbage collector may close an iterator in any thread at any place.
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._listener = listener_of(runtime_client())
        self._listener.alarms[series] = self

    def sound(self, error: BaseException) -> None:
        """Tells the other hosts that the iterator raises an error of this host's."""
        if not hasattr(error, _ENDS_ALL):  # it is raised again by each further call
            self._listener.tell(self._series, self._hosts, describe_error(error))
        self.raised(error)

    def raised(self, error: BaseException) -> None:
        """The iterator raises an error of which the other hosts know.

        If it is not handled, this process does not wait for the others when it ends.
        """
        self._over.put(None)
        with contextlib.suppress(AttributeError):  # of a class with slots; the process then waits
            setattr(error, _ENDS_ALL, self.hosts_by_series)

    @property
    def hosts_by_series(self) -> tuple[str, list[int]]:
        """The name of the rounds, and the hosts."""
        return self._series, self._hosts

    def raise_failure(self) -> None:
        """Raises the failure of another host if there is one; called whenever a batch is asked for.

        Raises:
            AgreementError: That failure, in the name of its host.
        """
        self._loop = threading.get_ident()
        self._listener.asked += 1
        if self._failure is not None:
            self.raised(self._failure)
            raise self._failure

    def close(self) -> None:
        """The iterator is closed, so that no failure concerns it any more."""
        self._over.put(None)
        if not self.is_at_end:
            self._listener.left_last = self.hosts_by_series
        self._listener.alarms.pop(self._series, None)

    def hear(self, host: int, text: str) -> None:
        """Another host has failed; the thread that listens says so."""
        text = f"host {host} failed, and this host cannot go on without it.\n  {text}"
        logging.error("grain_shard: %s", text)
        self._failure = AgreementError(text)
        self._stop()
        threading.Thread(
            target=self._watch, args=(host, text), name="grain-shard-alarm-watch", daemon=True
        ).start()

    def _watch(self, host: int, text: str) -> None:
        """Ends this process, unless told not to, if the loop stands still before it knows."""
        where, since = None, time.monotonic()
        while True:
            with contextlib.suppress(queue.Empty):
                return self._over.get(timeout=_LOOK_S)
            frame = sys._current_frames().get(self._loop)
            now = self._listener.asked, id(frame), frame and frame.f_lasti
            if now != where:
                where, since = now, time.monotonic()
            elif time.monotonic() - since > _STILL_S:
                break
        ends = os.environ.get(_END_PROCESS) != "0"
        try:
            logging.error(
                "grain_shard: %s\n  The training loop has stood still for %g s since then, most"
                " likely in a collective that waits for host %d for ever, so this process %s."
                " Where its threads stand:",
                text,
                _STILL_S,
                host,
                "ends here" if ends else f"should end; it stays, as {_END_PROCESS}=0 says",
            )
            if sys.__stderr__ is not None:
                faulthandler.dump_traceback(file=sys.__stderr__)
        finally:
            if ends:
                _end()


class Listener:
    """Hears of the failures of all iterators of this process, in one thread.

    It is inside the runtime all the time, so it does what else is to be done there now and then.

    Every host has numbered messages of its own in the store. So it can write one to itself, too, by
    which its thread ends. The interpreter's exit must not find that thread in the runtime: with
    Python 3.11 it aborts the process when it comes back ("FATAL: exception not rethrown").

    Attributes:
        alarms: Whom to tell, by the names of the series.
        asked: How often an iterator of this process was asked for a batch.
        left_last: The series and the hosts of the last iterator that was closed before its end.
        client: The client of the runtime.
        take_turn: Called by the thread, every `TURN_S`.
    """

    def __init__(self, client: Any):
        self.client, self.asked = client, 0
        self.alarms: dict[str, Alarm] = {}
        self.left_last: tuple[str, list[int]] | None = None
        self.take_turn: Callable[[], None] = _nothing
        self._thread = threading.Thread(target=self._listen, name="grain-shard-alarm", daemon=True)
        self._thread.start()
        # Hooks run last in, first out: this one runs before JAX's, which waits for all hosts.
        atexit.register(self._at_exit)

    def tell(self, series: str, hosts: Sequence[int], text: str) -> None:
        """Tells the others among these hosts that this one has failed."""
        this_host = jax.process_index()
        message = {"series": series, "host": this_host, "text": text}
        try:
            for host in hosts:
                if host != this_host:
                    self._write(host, message)
        except jax.errors.JaxRuntimeError as error:
            logging.error("grain_shard: the other hosts could not be told: %s", error)

    def _write(self, host: int, message: Any) -> None:
        for number in itertools.count():
            try:
                self.client.key_value_set(_MESSAGE.format(host, number), json.dumps(message))
            except jax.errors.JaxRuntimeError as error:
                if not exists_already(error):
                    raise
            else:
                return

    def _listen(self) -> None:
        for number in itertools.count():
            message = self._message(number)
            if message is None:
                return
            series = message["series"]
            heard = _HEARD.format(series, jax.process_index())
            with contextlib.suppress(jax.errors.JaxRuntimeError):
                self.client.key_value_set(heard, "", allow_overwrite=True)
            if (alarm := self.alarms.pop(series, None)) is not None:
                try:
                    alarm.hear(message["host"], message["text"])
                except Exception:
                    logging.exception("grain_shard: %s", message["text"])

    def _message(self, number: int) -> dict[str, Any] | None:
        """A message once it is there; None at the end."""
        key = _MESSAGE.format(jax.process_index(), number)
        while True:
            try:
                return json.loads(self.client.blocking_key_value_get(key, int(TURN_S * 1e3)))
            except jax.errors.JaxRuntimeError as error:
                if not is_timeout(error):
                    return None  # the runtime has ended
            try:
                self.take_turn()
            except jax.errors.JaxRuntimeError:
                pass  # the next wait says whether the runtime has ended
            except Exception:
                self.take_turn = _nothing
                logging.exception("grain_shard: failures of other hosts are still listened for")

    def _at_exit(self) -> None:
        for error in _chain(getattr(sys, "last_value", None)):  # those that were not handled
            if (failed := getattr(error, _ENDS_ALL, None)) is not None:
                if jax.process_index() == 0:
                    self._wait_for_others(*failed)
                _end()
        self._tell_of_the_loop()
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            self._write(jax.process_index(), None)
        self._thread.join(_JOIN_S)

    def _tell_of_the_loop(self) -> None:
        """Tells the others of an error that was not handled and has ended the loop here."""
        unhandled = getattr(sys, "last_value", None)
        if unhandled is None:
            return
        told = [a.hosts_by_series for a in self.alarms.values() if not a.is_at_end]
        if self.left_last is not None:  # most likely by that error, which has let go of it
            told.append(self.left_last)
        for series, hosts in told:
            self.tell(series, hosts, describe_error(unhandled))
        if told:
            if jax.process_index() == 0:
                self._wait_for_others(*told[0])
            _end()

    def _wait_for_others(self, series: str, hosts: Sequence[int]) -> None:
        """Waits some seconds at most until all hosts, except the failed one, received the error."""
        until = time.monotonic() + _HEARD_S
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            while time.monotonic() < until:
                heard = self.client.key_value_dir_get(_HEARD.format(series, ""))
                if len(heard) >= len(hosts) - 1:
                    return
                time.sleep(_LOOK_AGAIN_S)


@functools.lru_cache(maxsize=1)  # the runtime may be shut down and begun anew
def listener_of(client: Any) -> Listener:
    """Returns the listener of this process; the first call starts it."""
    return Listener(client)


def _nothing() -> None:
    """Does nothing: the turn of a process in which no other module has asked for one."""


def _chain(error: BaseException | None) -> list[BaseException]:
    """Returns an error and its chain of causes and contexts."""
    chain = []
    while error is not None and error not in chain:
        chain.append(error)
        error = error.__cause__ or error.__context__
    return chain


def _end() -> None:
    """Ends this process without its exit handlers."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)
