"""Ends this process if its training loop stays blocked after another host failed.

The loop is most likely blocked in a collective, which Python cannot interrupt.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from typing import Any, NoReturn

from absl import logging

# A loop is blocked if it has not moved for so many seconds.
_STILL_S = 10.0
# An environment variable. If it is "0", a process does not end when its training loop is blocked.
_END_PROCESS = "GRAIN_SHARD_END_PROCESS"


class Blocked:
    """Looks now and then if a training loop moves, once another host has failed.

    The loop is blocked if for 10 seconds its thread stays at one line and asks for no batch. Only
    the pauses between the looks count: a machine that stands still for long blocks no loop.
    """

    def __init__(self):
        self._where: Any = None
        self._still_s = 0.0

    def look(self, thread: int, asked: int, pause_s: float) -> bool:
        """Returns True if the loop is blocked, and this process has to end.

        The stacks of all threads are printed then.

        Args:
            thread: The identifier of the loop's thread.
            asked: Number of times that this process's loops have asked for a batch.
            pause_s: Seconds since the last look.
        """
        frame = sys._current_frames().get(thread)
        where = asked, id(frame), frame and frame.f_lineno
        self._still_s = self._still_s + pause_s if where == self._where else 0.0
        self._where = where
        if not _STILL_S <= self._still_s < _STILL_S + pause_s:
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
