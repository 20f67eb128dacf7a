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
    """Returns the whole number, 1 or more, that the text holds.

    Raises:
        ArgumentTypeError: The text is no such number.
    """
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def positive_seconds(text: str) -> float:
    """Returns the positive number of seconds that the text holds.

    The most is `threading.TIMEOUT_MAX`, the longest time that a Python thread can wait.

    Raises:
        ArgumentTypeError: The text is no such number.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = float("nan")
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number of seconds")
    return seconds
