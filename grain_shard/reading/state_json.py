"""The states of Grain's iterators, and of loaders, as plain JSON, and back.

JSON has no tuples, and turns them into lists. Grain's `ConcatThenSplitIterDataset` compares a part
of its state with a tuple. After a detour through JSON, even with Grain's own checkpoints, it
ignores that part and continues with other rows, without an error. JSON has no bytes either, and
the state of a `grain.DataLoader` is bytes.
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
    """The placeholder in a state for an iterator that has none.

    Attributes:
        name: Name of the iterator.
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
    """Converts numpy's scalars, tuples and bytes in a state to plain JSON.

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
        return {_BYTES: state.decode("latin-1")}  # latin-1 maps every byte to one character
    return state.item() if isinstance(state, np.generic) else state


def from_json(state: Any) -> Any:
    """Undoes `to_json`, except for numpy's scalars.

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
        state: A state, possibly of another pipeline.
        name: The iterator's name in messages.

    Raises:
        StateError: The iterator refuses the state.
    """
    try:
        iterator.set_state(state)
    except (KeyError, TypeError, IndexError) as error:
        raise StateError(
            f"{name} cannot take this state: {type(error).__name__}: {error}.\n"
            "  remedy: restore with the pipeline that saved it."
        ) from error
