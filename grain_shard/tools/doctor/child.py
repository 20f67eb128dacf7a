"""Questions that may hang or crash: asked of a process of their own, and not for ever."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any


def ask(module: str, words: Sequence[str], *, timeout_s: float, if_late: str) -> Any:
    """Runs a module as a program, and returns its last line, which is JSON.

    Args:
        module: The module.
        words: Its arguments.
        timeout_s: Seconds until it is killed.
        if_late: The likely reason of no answer, and the remedy.

    Raises:
        TimeoutError: It was late.
        RuntimeError: It failed; the message has the last line that it wrote, or its signal.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # Ctrl-C is for the one who asks, who then kills it
    )
    try:
        output, complaints = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no answer within {timeout_s:g} s: {if_late}") from None
    finally:
        process.kill()
        # A process that waits for a broken mount does not even end when it is killed.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1)
        for stream in (process.stdout, process.stderr):
            assert stream is not None
            stream.close()
    if process.returncode:
        last = complaints.strip().splitlines()[-1:] or [f"exit code {process.returncode}"]
        raise RuntimeError(last[0])
    return json.loads(output.splitlines()[-1])
