"""Ends this process if its training loop stays blocked after another host failed.

The loop is most likely blocked in a collective, which Python cannot interrupt.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from absl import logging

from grain_shard.hosts import exits

# A process ends if its training loop is blocked for `_STILL_S` seconds. This is checked every
# `_LOOK_S` seconds.
_STILL_S, _LOOK_S = 10.0, 0.5
# An environment variable. If it is "0", a process does not end when its training loop is blocked.
_END_PROCESS = "GRAIN_SHARD_END_PROCESS"


def end_if_blocked(loop: Callable[[], tuple[int, Any]], is_over: Callable[[], bool]) -> None:
    """Waits until the training loop has moved on, and ends the process if it does not.

    The loop is blocked if for 10 seconds its thread stays at one instruction and asks for no batch.
    Only the pauses between the looks count: a machine that stands still for long blocks no loop.
    With GRAIN_SHARD_END_PROCESS=0 the process does not end.

    Args:
        loop: Returns the identifier of the loop's thread, and the number of batches asked for.
        is_over: Returns True once the loop has got the error.
    """
    where, still_s = None, 0.0
    while still_s < _STILL_S:
        if is_over():
            return
        thread, asked = loop()
        frame = sys._current_frames().get(thread)
        now = asked, id(frame), frame and frame.f_lasti
        if now != where:
            where, still_s = now, 0.0
        time.sleep(_LOOK_S)
        still_s += _LOOK_S
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
