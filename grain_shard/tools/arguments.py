"""Types for the arguments of a command line, with errors that name the allowed values."""

from __future__ import annotations

import argparse
import threading

from grain_shard.errors import GrainShardError


class UsageError(GrainShardError):
    """The arguments of a command do not fit together, or name a file that is missing.

    A command ends with exit code 2 after this error, and with 1 after any other error.
    """


def positive_integer(text: str) -> int:
    """Returns the number that the text holds.

    Raises:
        ArgumentTypeError: The text is not a whole number of at least 1.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive_seconds(text: str) -> float:
    """Returns the seconds that the text holds: at most `threading.TIMEOUT_MAX`, for use as a wait.

    Raises:
        ArgumentTypeError: The text is not a positive number of seconds.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
