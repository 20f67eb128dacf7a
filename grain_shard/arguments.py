"""What the words of a command line stand for; argparse names the argument in its message."""

from __future__ import annotations

import argparse
import threading


def positive_integer(text: str) -> int:
    """A whole number, of 1 or more."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def positive_seconds(text: str) -> float:
    """A time in seconds, no longer than a wait can be."""
    seconds = float(text)
    if not 0 < seconds <= threading.TIMEOUT_MAX:
        raise argparse.ArgumentTypeError("must be positive, and finite")
    return seconds
