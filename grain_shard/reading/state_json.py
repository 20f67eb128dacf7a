"""The states of Grain's iterators, and of loaders, as plain JSON, and back.

JSON has no tuples and would give lists for them. Grain's `ConcatThenSplitIterDataset` compares a
part of its state with a tuple, so that after a detour by JSON, also with Grain's own checkpoints,
it takes no remainder for one and goes on with other rows, in silence. Nor has JSON bytes, which is
what the state of a `grain.DataLoader` is.
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
    """Stands in a state for an iterator that has none.

    Attributes:
        name: A word for the iterator.
    """

    name: str

    def refuse(self) -> NoReturn:
        """Raises a `StateError`."""
        raise StateError(
            f"a {self.name} has no state: nothing tells where it stands, or brings it back"
            " there.\n  remedy: pass a Grain dataset or a grain.DataLoader, or give the iterator"
            " get_state() and set_state(state)."
        )


def to_json(state: Any) -> Any:
    """The state without numpy's scalars, tuples and bytes.

    Example:
        >>> to_json({"next": np.int64(3), "slice": (0, 7)})
        {'next': 3, 'slice': {'__tuple__': [0, 7]}}

    Raises:
        StateError: An iterator has no state.
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
        return {_BYTES: state.decode("latin-1")}  # in which any byte is one character
    return state.item() if isinstance(state, np.generic) else state


def from_json(state: Any) -> Any:
    """Undoes `to_json`, but for numpy's scalars.

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
    """Sets the state of an iterator of Grain's.

    Args:
        iterator: The iterator.
        state: A state that some pipeline gave.
        name: The iterator's name in messages.

    Raises:
        StateError: The iterator cannot take it.
    """
    try:
        iterator.set_state(state)
    except (KeyError, TypeError, IndexError) as error:
        raise StateError(
            f"{name} cannot take this state: {type(error).__name__}: {error}.\n"
            "  remedy: restore with the pipeline that saved it."
        ) from error
