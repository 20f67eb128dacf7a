"""`Listener`: the thread of a process that hears of other hosts' failures, for all its iterators.

Each host puts one value into the key-value store, which all hosts read about twice a second: the
errors of its iterators and, once its process ends, the number of batches that each loop received.

After a failure, a process skips the usual exit, in which JAX would wait for the other hosts for
minutes, and its status is 1. The exit is the usual one only if all processes end within 14 seconds
and none by an error: then the programs have handled the failure.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import threading
import time
from typing import Any, NoReturn

import jax
from absl import logging

from grain_shard.errors import AgreementError, describe_error
from grain_shard.hosts.alarm import Alarm
from grain_shard.hosts.blocked import end_process
from grain_shard.hosts.ends import AgreedEnd
from grain_shard.hosts.rounds import Rounds, Store
from grain_shard.threads.pool import Pool

# The topic under which each host tells the others of errors and of its end.
_TOLD = "told"
# Seconds between two looks at the store, while the program runs and at its exit. With many hosts it
# is at least four milliseconds per host, because the first host's process serves all calls.
_TURN_S, _FOR_A_HOST_S, _TURN_AT_EXIT_S = 0.5, 0.004, 0.2
# After a failure, most seconds that a process waits for the others to end. The store is in the
# first process, and ends with it.
_OTHERS_END_S = 14.0
# At the exit, most seconds to wait for the listening thread; and, without a failure, for the other
# hosts to leave their loops. After that JAX itself waits for them, for 300 seconds.
_JOIN_S, _OTHERS_LEAVE_S = 30.0, 60.0


class Listener:
    """The thread of a process that tells and hears of failures, for all its iterators.

    The thread must end before the interpreter does: with Python 3.11, a thread that returns from a
    call into the runtime after that aborts the process ("FATAL: exception not rethrown").
    """

    def __init__(self):
        self._store = Store()
        # By name of the iterator. A closed iterator stays, because other hosts may still use it.
        self._alarms: dict[str, Alarm] = {}
        # What this host tells the others. "failed": the text of an error, by iterator. Once this
        # process ends: "left": the number of batches that each loop received, of loops that did not
        # come to the end of the data; "error": the error that ended the process; "skips": if the
        # process skips the usual exit.
        self._told: dict[str, Any] = {"failed": {}, "left": None, "error": None, "skips": False}
        self._another_skips = False
        self._telling = threading.Lock()
        self._failed_at = 0.0  # time at which a host failed; 0 if none has
        at_least_s = _FOR_A_HOST_S * jax.process_count()
        self._turn_s = max(_TURN_S, at_least_s)
        self._turn_at_exit_s = max(_TURN_AT_EXIT_S, at_least_s)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="grain-shard-alarm", daemon=True)
        self._thread.start()
        # Exit hooks run in reverse order, so this one runs before JAX's, which waits for all hosts.
        atexit.register(self._at_exit)

    def open(
        self,
        rounds: Rounds,
        stage: Pool[Any] | AgreedEnd[Any],
        first: int,
        total: int | None,
    ) -> Alarm:
        """Returns the `Alarm` of a new iterator."""
        alarm = Alarm(rounds, stage, first, total, functools.partial(self._tell, rounds.name))
        self._alarms[alarm.series] = alarm
        return alarm

    def agreed(self) -> None:
        """Forgets earlier failures, because the hosts have begun another iterator together.

        So all hosts have handled those failures, and no host uses an iterator that is closed here.
        """
        for alarm in list(self._alarms.values()):
            if alarm.is_closed:
                self._alarms.pop(alarm.series, None)
        self._failed_at = 0.0
        if self._told["failed"]:
            with self._telling:
                self._told["failed"] = {}
                self._store.delete(f"{_TOLD}/{self._store.host}")

    def _tell(self, series: str, text: str) -> None:
        self._failed_at = self._failed_at or time.monotonic()
        try:
            with self._telling:
                self._told["failed"][series] = text
                self._store.put(_TOLD, self._told)
        except AgreementError as failure:
            logging.error("grain_shard: other hosts could not be told of a failure: %s", failure)

    def _listen(self) -> None:
        while not self._is_over.wait(self._turn_s):
            try:
                self._look()
                asked = sum(alarm.asked for alarm in list(self._alarms.values()))
                blocked = [a.is_blocked(asked, self._turn_s) for a in list(self._alarms.values())]
            except AgreementError:
                if not jax.distributed.is_initialized():
                    return
                # The store had too many calls at once: the next look succeeds.
            except Exception:
                logging.exception("grain_shard: a report of another host could not be handled")
            else:
                if any(blocked):
                    self._end()

    def _look(self) -> bool:
        """Passes what other hosts tell on to the alarms; returns True if all processes have ended.

        Raises:
            AgreementError: The runtime has ended.
        """
        by_host = self._store.get_all(_TOLD)
        for host, told in by_host.items():
            for series, text in told["failed"].items():
                if (alarm := self._alarms.get(series)) is not None and not alarm.all_know:
                    self._failed_at = self._failed_at or time.monotonic()
                    alarm.hear(text)
            for series, batches in (told["left"] or {}).items():
                if host != self._store.host and series in self._alarms:
                    self._alarms[series].hear_end(host, batches, told["error"])
        self._another_skips = any(told["skips"] for told in by_host.values())
        num_ended = sum(told["left"] is not None for told in by_host.values())
        return num_ended == jax.process_count()

    def _at_exit(self) -> None:
        """Tells the other hosts that this process ends, and decides how: an exit hook.

        * Other hosts may still be in a loop that this process left. It waits until they have ended
          too, for a minute at most, and then ends as usual.
        * A host has failed, perhaps during that wait. If all processes end soon and without an
          error, this one ends as usual. If not, it skips the usual exit.
        """
        self._is_over.set()
        self._thread.join(_JOIN_S)
        # This error may be old. Only the way in which this process ends depends on it.
        error = getattr(sys, "last_value", None)
        began = time.monotonic()
        skips = False  # True once it is clear that this process skips the usual exit
        all_ended = False
        with contextlib.suppress(AgreementError):
            waits_for_loops = self._tell_end(error)
            while (waits_for_loops or self._failed_at) and not (skips or all_ended):
                time.sleep(self._turn_at_exit_s)
                all_ended = self._look()  # may find a failure, and set `_failed_at`
                waited_s = time.monotonic() - began
                if self._failed_at:
                    skips = bool(error) or self._another_skips or waited_s > _OTHERS_END_S
                else:
                    waits_for_loops = waited_s < _OTHERS_LEAVE_S
        if self._failed_at and (skips or not all_ended):
            self._end()  # without the usual exit

    def _tell_end(self, error: BaseException | None) -> bool:
        """Tells the other hosts that this process ends.

        Returns True if other hosts may still be in this process's loops.

        Args:
            error: The last uncaught error; None if there was none.
        """
        left = {a.series: a.taken for a in list(self._alarms.values()) if a.may_go_on}
        said = error and describe_error(error).partition("\n")[0]
        self._put(left=left, error=said)
        return bool(left)

    def _put(self, **told: Any) -> None:
        with self._telling:
            self._told |= told
            self._store.put(_TOLD, self._told)

    def _end(self) -> NoReturn:
        """Ends this process without the usual exit, on the first host after all others."""
        with contextlib.suppress(AgreementError):
            self._put(left=self._told["left"] or {}, skips=True)
            until = self._failed_at + _OTHERS_END_S
            while self._store.host == 0 and not self._look() and time.monotonic() < until:
                time.sleep(self._turn_at_exit_s)
        end_process()


@functools.lru_cache(maxsize=1)  # by the client, as a restarted JAX runtime has a new one
def listener_of(client: Any) -> Listener:
    """Returns the listener of this process, which the first call starts."""
    return Listener()
