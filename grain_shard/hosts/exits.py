"""The end of this process: its reason, in words, and an end that waits for no other host.

Python tells its exit handlers neither that `sys.exit` was called nor its argument. So once an
iterator runs on several hosts, `sys.exit` is replaced by a function that notes the argument first.
"""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

_noted: list[Any] = []  # the argument of the last call of `sys.exit`; empty before the first call
_exit = sys.exit


def note_exits() -> None:
    """Replaces `sys.exit` by a function that notes its argument; a second call does nothing."""
    global _exit
    if sys.exit is not _noted_exit:
        _exit, sys.exit = sys.exit, _noted_exit


def _noted_exit(status: Any = None, /) -> NoReturn:
    _noted[:] = [status]
    _exit(status)


def reason(otherwise: str) -> str:
    """Returns the reason for which this process ends, such as ``sys.exit: out of memory``.

    Args:
        otherwise: The reason if `sys.exit` was not called.
    """
    if not _noted:
        return otherwise
    text = _noted[0]
    return (
        f"sys.exit({text or 0})" if text is None or isinstance(text, int) else f"sys.exit: {text}"
    )


def status() -> int:
    """Returns the exit status that `sys.exit` asked for; 0 if it was not called.

    The status of a plain ``raise SystemExit(3)`` is not known, because Python calls no hook for it.
    """
    status = _noted[0] if _noted else 0
    return (status or 0) & 0xFF if status is None or isinstance(status, int) else 1


def unhandled() -> BaseException | None:
    """Returns the error that ends this process; None if no error does.

    ``sys.last_value`` alone does not tell this. IPython, pytest and a Python prompt keep errors
    there after which they go on. An error that nothing handles leaves the outermost frame, too.
    """
    error = getattr(sys, "last_value", None)
    trace = None if error is None else error.__traceback__
    is_unhandled = trace is not None and trace.tb_frame.f_back is None
    is_prompt = hasattr(sys, "ps1")  # there, no error ends the process
    return error if is_unhandled and not is_prompt else None


def end(status: int = 1) -> NoReturn:
    """Ends this process without exit hooks, in which JAX would wait for the other hosts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
