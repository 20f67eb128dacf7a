"""The line of the user's program that called this package."""

from __future__ import annotations

import inspect
from types import FrameType

_OWN = ("grain_shard", "grain")


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
