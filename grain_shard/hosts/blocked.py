"""Ends this process if its training loop stays blocked after another host failed.

The loop is most likely blocked in a collective, which Python cannot interrupt.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import Any, NoReturn

from absl import logging

# Seconds without a move after which a loop counts as blocked.
_STILL_S = 10.0
# An environment variable. If it is "0", a process whose training loop is blocked does not end.
_END_PROCESS = "GRAIN_SHARD_END_PROCESS"


class Blocked:
    """Checks now and then whether a training loop still moves, after another host has failed.

    The loop is blocked if its thread has stayed at one line for 10 seconds and has not asked for a
    batch. The seconds are the pauses between the checks, not the clock's: so a machine that was
    suspended does not seem blocked.
    """

    def __init__(self):
        self._where: Any = None
        self._still_s = 0.0

    def look(self, thread: int, asked: int, pause_s: float) -> bool:
        """Checks the loop once; returns True if it is blocked and this process must end.

        A blocked loop is reported once, with the stacks of all threads.

        Args:
            thread: The identifier of the loop's thread.
            asked: Number of times that the loops of this process have asked for a batch.
            pause_s: Seconds since the last call.
        """
        frame = sys._current_frames().get(thread)  # None if the thread has ended
        where = asked, id(frame), frame and frame.f_lineno
        self._still_s = self._still_s + pause_s if where == self._where else 0.0
        self._where = where
        # True at only one of the calls at which the loop counts as blocked: the first of them.
        is_first_report = self._still_s < _STILL_S + pause_s
        if self._still_s < _STILL_S or not is_first_report:
            return False
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
        except Exception:  # a closed stderr must not keep the process
            pass
        return ends


def end_process() -> NoReturn:
    """Ends this process without exit hooks, in which JAX would wait for the other hosts."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(1)
