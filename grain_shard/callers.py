"""The lines of the user's program that called this package, or that other threads run."""

from __future__ import annotations

import collections
import inspect
import os
import sys
import sysconfig
import threading
from types import FrameType

_OWN = ("grain_shard", "grain")
_PACKAGE, _STDLIB = os.path.dirname(__file__), sysconfig.get_path("stdlib")


def user_frame() -> tuple[FrameType | None, int]:
    """Returns the innermost caller that is not in this package or in Grain.

    Returns:
        Its frame, None if there is no such caller; and its ``stacklevel`` for a `warnings.warn` in
        the function that calls this one.
    """
    frame, level = inspect.currentframe(), 0
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OWN:
        frame, level = frame.f_back, level + 1
    return frame, level


def program_line(frame: FrameType | None) -> str:
    """Returns the innermost line of the user's program on a stack, as ``train.py:17``.

    Args:
        frame: The innermost frame of the stack.

    Returns:
        The line; "" if all frames are of this package, of installed ones, or of Python itself.
    """
    while frame is not None and _is_installed(frame.f_code.co_filename):
        frame = frame.f_back
    return "" if frame is None else f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def lines_of_other_threads() -> list[str]:
    """Returns the lines of the user's program that other threads are at, each with a count."""
    this = threading.get_ident()
    at = collections.Counter(
        program_line(frame) for thread, frame in sys._current_frames().items() if thread != this
    )
    return [f"{line} ({n} threads)" if n > 1 else line for line, n in at.most_common() if line]


def _is_installed(file: str) -> bool:
    folders = os.path.dirname(file).split(os.sep)
    return (
        file.startswith(("<frozen", os.path.join(_PACKAGE, ""), os.path.join(_STDLIB, "")))
        or "site-packages" in folders
        or "dist-packages" in folders
    )
