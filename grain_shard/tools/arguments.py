"""Types for the arguments of a command line, with errors that name the values they take."""

from __future__ import annotations

import argparse
import threading

from grain_shard.errors import GrainShardError


class UsageError(GrainShardError):
    """The arguments of a command do not fit together, or name a file that is missing.

    Commands end with exit code 2 after it, and with 1 after any other error.
    """


def positive_integer(text: str) -> int:
    """A whole number, of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive_seconds(text: str) -> float:
    """A time in seconds, no longer than Python can wait."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
