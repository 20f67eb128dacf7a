"""The states of Grain's iterators as plain JSON, and back.

JSON has no tuples and would give lists for them. Grain's `ConcatThenSplitIterDataset` compares a
part of its state with a tuple, so that after a detour by JSON, also with Grain's own checkpoints,
it takes no remainder for one and goes on with other rows, in silence.
"""

from __future__ import annotations

from typing import Any

import numpy as np

_TUPLE = "__tuple__"


def to_json(state: Any) -> Any:
    """The state without numpy's scalars and without tuples.

    Example:
        >>> to_json({"next": np.int64(3), "slice": (0, 7)})
        {'next': 3, 'slice': {'__tuple__': [0, 7]}}
    """
    if isinstance(state, dict):
        return {key: to_json(value) for key, value in state.items()}
    if isinstance(state, tuple):
        return {_TUPLE: [to_json(value) for value in state]}
    if isinstance(state, list):
        return [to_json(value) for value in state]
    return state.item() if isinstance(state, np.generic) else state


def from_json(state: Any) -> Any:
    """What `to_json` was given, up to numpy's scalars.

    Example:
        >>> from_json({"slice": {"__tuple__": [0, 7]}})
        {'slice': (0, 7)}
    """
    if isinstance(state, dict):
        if set(state) == {_TUPLE}:
            return tuple(from_json(value) for value in state[_TUPLE])
        return {key: from_json(value) for key, value in state.items()}
    return [from_json(value) for value in state] if isinstance(state, list) else state
