"""Types for the arguments of a command line, with errors that say what was expected."""

from __future__ import annotations

import argparse
import threading


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
