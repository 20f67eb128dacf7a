"""The lines of the user's program that called this package, or that other threads run."""

from __future__ import annotations

import collections
import inspect
import os
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from types import FrameType

_OWN = ("grain_shard", "grain")
_STDLIB = sysconfig.get_path("stdlib")


def user_frame() -> FrameType | None:
    """Returns the frame of the innermost caller that is not in this package or in Grain."""
    return next((frame for frame in _outwards(inspect.currentframe()) if not _is_own(frame)), None)


def loop_line() -> str:
    """Returns the innermost line of the user's program that called this package: ``train.py:40``.

    If only installed libraries called it, the result is a line of theirs; "?" without a caller.
    """
    callers = [f for f in _outwards(inspect.currentframe()) if not _is_own(f) and not _is_python(f)]
    frame = _users(callers)
    return "?" if frame is None else _line(frame)


def lines_in_pipelines() -> list[str]:
    """Returns where threads are in sources and functions that this package or Grain has called.

    Returns:
        A text for each line, such as ``source.py:17 in __getitem__ (2 threads)``. It is the
        innermost line of the user's program or, if there is none, of an installed library.
    """
    at = collections.Counter(map(_called_line, sys._current_frames().values()))
    return [f"{line} ({n} threads)" if n > 1 else line for line, n in at.most_common() if line]


def _called_line(innermost: FrameType) -> str:
    """Returns the line of one thread; "" if this package and Grain have called nothing in it."""
    frames = [*_outwards(innermost)]
    outermost_own = max((i for i, frame in enumerate(frames) if _is_own(frame)), default=0)
    called = [f for f in frames[:outermost_own] if not _is_own(f) and not _is_python(f)]
    frame = _users(called)
    return "" if frame is None else f"{_line(frame)} in {frame.f_code.co_name}"


def _users(frames: Sequence[FrameType]) -> FrameType | None:
    """Returns the first frame of the user's program; the first frame if all are of libraries."""
    return next((f for f in frames if not _is_installed(f)), next(iter(frames), None))


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _line(frame: FrameType) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _is_own(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").split(".")[0] in _OWN


def _is_python(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    return file.startswith(("<frozen", os.path.join(_STDLIB, ""))) and not _is_in_packages(file)


def _is_installed(frame: FrameType) -> bool:
    return _is_own(frame) or _is_python(frame) or _is_in_packages(frame.f_code.co_filename)


def _is_in_packages(file: str) -> bool:
    return not {"site-packages", "dist-packages"}.isdisjoint(os.path.dirname(file).split(os.sep))
