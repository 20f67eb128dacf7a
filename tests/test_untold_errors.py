"""Errors whose text, repr or notes fail: the loop gets them with their record, and no other error.

Errors that cannot be sent to another process: test_workers.py, too.
"""

import threading

import grain
import pytest

from tests.conftest import data_mesh
from tests.pipelines import shared_out

slow = pytest.mark.slow


class Mute(Exception):
    """An error without a text. If it is locked, it cannot be sent to another process."""

    def __init__(self, *, locked=False):
        super().__init__()
        self.lock = threading.Lock() if locked else None

    def __str__(self):
        raise LookupError("the text fails")


class Shy:
    """An object without a repr."""

    def __repr__(self):
        raise LookupError("the repr fails")


class ShyError(Shy, Exception):
    """An error without a repr."""


def noted(error, note):
    error.__notes__ = [note]
    return error


# For each kind of error, a function that makes one, and its class.
ERRORS = {
    "a text": (Mute, Mute),
    "a text, not to be sent": (lambda: Mute(locked=True), Mute),
    "a repr": (ShyError, ShyError),
    "the repr of a key": (lambda: KeyError(Shy()), KeyError),
    "a note": (lambda: noted(ValueError(), Mute()), ValueError),
    "a note, not to be sent": (lambda: noted(Mute(locked=True), Mute()), Mute),
    "one of a group": (lambda: ExceptionGroup("two", [Mute(), ShyError()]), ExceptionGroup),
    "one of a group, not to be sent": (
        lambda: ExceptionGroup("two", [Mute(locked=True), ShyError()]),
        ExceptionGroup,
    ),
}
# An error that cannot be sent comes from a worker process as a RuntimeError with this text.
SENT_AS = {
    "a text, not to be sent": "Mute: (the text of this error cannot be read)",
    "a note, not to be sent": "Mute: (the text of this error cannot be read)",
    "one of a group, not to be sent": "ExceptionGroup: two (2 sub-exceptions)",
}


def records(make):
    def decode(i):
        if i == 5:
            raise make()
        return {"id": i}

    return grain.MapDataset.range(8).map(decode)


@pytest.mark.parametrize("num_workers", [0, pytest.param(1, marks=slow)])
@pytest.mark.parametrize("kind", ERRORS)
class TestAnErrorThatLacks:
    def test_in_random_access(self, kind, num_workers):
        ds = records(ERRORS[kind][0]).batch(4)
        error = raised(ds.shard_to(data_mesh(2), num_workers=num_workers), kind, num_workers)
        assert has_note("record 5 of the dataset before .batch", error)

    def test_in_feeds(self, kind, num_workers):
        ds = shared_out(records(ERRORS[kind][0]), 2, 4)
        error = raised(ds.shard_to(data_mesh(2), num_workers=num_workers), kind, num_workers)
        # Record 5 of all records is record 2 of feed 1.
        assert has_note("record 2 of the dataset before .to_iter_dataset", error)
        assert has_note("in feed 1 of 2", error)


def raised(ds, kind, num_workers):
    """The error with which the loop ends, of the class that this kind of error should have."""
    text = SENT_AS.get(kind) if num_workers else None
    with iter(ds) as batches, pytest.raises(RuntimeError if text else ERRORS[kind][1]) as caught:
        list(batches)
    if text:
        assert str(caught.value) == text
    return caught.value


def has_note(text, error):
    return any(text in note for note in error.__notes__ if isinstance(note, str))
