"""Converts the states of Grain's iterators and of data loaders to plain JSON, and back.

JSON turns tuples into lists. Grain's `ConcatThenSplitIterDataset` compares a part of its state with
a tuple. If that part has become a list, as in Grain's own checkpoints, the iterator ignores it and
continues with other rows, without an error. JSON has no bytes either, and the state of a
`grain.DataLoader` is bytes. So tuples and bytes are marked in the JSON.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import grain
import numpy as np

from grain_shard.errors import StateError

_TUPLE, _BYTES = "__tuple__", "__bytes__"


@dataclass(frozen=True)
class NoState:
    """A placeholder for the state of an iterator that has no state.

    Attributes:
        name: Name of the iterator.
    """

    name: str

    def refuse(self) -> NoReturn:
        """Raises a `StateError`, because the iterator has no state."""
        raise StateError(
            f"a {self.name} has no state: its position cannot be saved or restored.\n"
            "  remedy: pass a Grain dataset or a grain.DataLoader, or give the iterator"
            " get_state() and set_state(state)."
        )


def to_json(state: Any) -> Any:
    """Converts a state with numpy's scalars, tuples and bytes in it to plain JSON.

    Example:
        >>> to_json({"next": np.int64(3), "slice": (0, 7)})
        {'next': 3, 'slice': {'__tuple__': [0, 7]}}

    Raises:
        StateError: An iterator has no state, so there is a `NoState` in its place.
    """
    if isinstance(state, NoState):
        state.refuse()
    if isinstance(state, dict):
        return {key: to_json(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return {_TUPLE: [to_json(value) for value in state]}
    if isinstance(state, list):
        return [to_json(value) for value in state]
    if isinstance(state, bytes):
        return {_BYTES: state.decode("latin-1")}  # latin-1 maps every byte to one character
    return state.item() if isinstance(state, np.generic) else state


def from_json(state: Any) -> Any:
    """Restores tuples and bytes that `to_json` converted. Numpy's scalars stay Python numbers.

    Example:
        >>> from_json({"slice": {"__tuple__": [0, 7]}})
        {'slice': (0, 7)}
    """
    if isinstance(state, dict):
        if set(state) == {_TUPLE}:
            return tuple(from_json(value) for value in state[_TUPLE])
        if set(state) == {_BYTES}:
            return state[_BYTES].encode("latin-1")
        return {key: from_json(value) for key, value in state.items()}
    return [from_json(value) for value in state] if isinstance(state, list) else state


def restore(iterator: grain.DatasetIterator, state: Any, name: str) -> None:
    """Sets the state of a Grain iterator.

    Args:
        iterator: The iterator.
        state: The state, which another pipeline may have saved.
        name: The iterator's name in messages.

    Raises:
        StateError: The iterator cannot take the state.
    """
    try:
        iterator.set_state(state)
    except (KeyError, TypeError, IndexError) as error:
        raise StateError(
            f"{name} cannot restore this state: {type(error).__name__}: {error}.\n"
            "  remedy: restore with the pipeline that saved the state."
        ) from error
