"""Converts states of iterators to plain JSON and back.

JSON turns tuples into lists. Grain's `ConcatThenSplitIterDataset` compares a part of its state with
a tuple. If that part has become a list, as in Grain's own checkpoints, the iterator ignores it and
continues with other rows, without an error. JSON has no bytes and no arrays either. So `sealed`
marks tuples, bytes and arrays, and adds a digest. By the digest, `unsealed` notices that a storage
changed the state.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grain
import numpy as np
from absl import logging

from grain_shard.digest import digest
from grain_shard.errors import GrainShardError, StateError, describe_leaf, shortened

UNCHANGED = (
    "  remedy: pass set_state() the value that get_state() returned, unchanged. If a storage"
    " changes it, store json.dumps(state) as text."
)
# Marks of values that JSON lacks. Such a value becomes a dict whose only key is the mark.
_TUPLE, _BYTES, _ARRAY, _TENSOR, _PAIRS = (
    *("__tuple__", "__bytes__", "__array__"),
    "__tensor__",  # of PyTorch, as in the state of its generators
    "__pairs__",  # a dict with a key that is not text, or that is a mark
)
_MARKS = {_TUPLE, _BYTES, _ARRAY, _TENSOR, _PAIRS}
_CHECK = "check"  # the key of the digest that `sealed` adds
_MOST_LEVELS = 100  # of dicts and lists inside each other
_MOST_NAMED = 8  # most levels that a message names
_MOST_BITS = 5_000  # of an int; Python writes and reads at most 4,300 digits

_Path = tuple[Any, ...]  # the keys that lead to a value in a state


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
            " get_state() and set_state(state), or state_dict() and load_state_dict(state)."
        )


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the state of an iterator as plain JSON, with a digest of it under the key "check".

    Example:
        >>> sealed({"next": np.int64(3), "slice": (0, 7)})
        {'next': 3, 'slice': {'__tuple__': [0, 7]}, 'check': '6708f9fa'}

    Raises:
        StateError: The state has a value that is not text, a number, bytes, an array, a tensor, a
            tuple, a list or a dict; or an iterator has no state, and has a `NoState` in its place.
    """
    plain = {key: _to_json(value, (key,)) for key, value in state.items()}
    return {**plain, _CHECK: _digest(plain)}


def unsealed(saved: Any, name: str) -> dict[str, Any]:
    """Returns the state of an iterator that `sealed` converted, as the iterator returned it.

    NumPy's scalars stay Python numbers.

    Args:
        saved: The result of `sealed`, as `from_storage` returned it.
        name: The name of the state, for messages.

    Raises:
        StateError: A value was changed, added or lost.
    """
    plain = {key: saved[key] for key in saved if key != _CHECK} if isinstance(saved, dict) else None
    if plain is None or saved.get(_CHECK) != _digest(plain):
        raise StateError(f"{name} is not as get_state() returned it: values differ.\n{UNCHANGED}")
    return _from_json(plain)


def from_storage(state: Any) -> dict[str, Any]:
    """Returns a state as ``get_state`` returned it, with ints in place of arrays without axes.

    Some storages, such as NumPy's files, return such an array for an int.

    Example:
        >>> from_storage({"kind": "feeds", "step": np.array(3)})
        {'kind': 'feeds', 'step': 3}

    Raises:
        StateError: The state is not a dict, or has a value that is not JSON. The message names the
            path of the value and its type.
    """
    plain = _from_storage(state, ())
    if not isinstance(plain, dict):
        raise _foreign((), state)
    return plain


def restore(iterator: grain.DatasetIterator, state: Any, name: str) -> None:
    """Sets the state of a Grain iterator, which a message calls `name`.

    Raises:
        StateError: The iterator cannot take the state, which another pipeline may have saved.
    """
    try:
        iterator.set_state(state)
    except GrainShardError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise StateError(
            f"{name} cannot restore this state: {type(error).__name__}: {error}.\n"
            "  remedy: restore with the pipeline that saved the state."
        ) from error


def why_unsaved(state: Mapping[str, Any]) -> str:
    """Returns why `sealed` refuses the state of an iterator, with the remedy; "" if it does not."""
    try:
        sealed(state)
    except StateError as error:
        return str(error)
    return ""


def warn_unsaved(why: str) -> None:
    """Logs that a loop cannot be saved, before the first save fails.

    Args:
        why: What `why_unsaved` returned.
    """
    logging.warning("this loop cannot be resumed: %s", why)


def _digest(plain: Any) -> str:
    return digest(json.dumps(plain, sort_keys=True))


def _is_json(value: Any) -> bool:
    if isinstance(value, int):
        return value.bit_length() <= _MOST_BITS
    return value is None or isinstance(value, str | float)


def _to_json(value: Any, path: _Path) -> Any:
    """Returns a value as JSON: ``(0, 7)`` becomes ``{"__tuple__": [0, 7]}``.

    Args:
        value: A part of the state.
        path: The keys that lead to this part, for an error.
    """
    if isinstance(value, NoState):
        value.refuse()
    torch: Any = sys.modules.get("torch")  # a program that has a tensor has imported PyTorch
    if torch is not None and isinstance(value, torch.Tensor):
        # NumPy refuses bfloat16, a tensor on a GPU, and a tensor that needs gradients.
        with contextlib.suppress(TypeError, RuntimeError):
            return {_TENSOR: _of_array(value.numpy())}
    if isinstance(value, np.generic | np.ndarray) and not value.shape:
        value = value.item()
    # Containers below more levels reach the error at the end.
    if len(path) < _MOST_LEVELS:
        if isinstance(value, Mapping):
            if all(type(key) is str and key not in _MARKS for key in value):
                return {key: _to_json(item, (*path, key)) for key, item in value.items()}
            # JSON has only text as keys, and a key like `_TUPLE` would be taken for a mark.
            return {_PAIRS: [_to_json(list(item), (*path, item[0])) for item in value.items()]}
        if isinstance(value, list | tuple):
            items = [_to_json(item, (*path, index)) for index, item in enumerate(value)]
            return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return {_ARRAY: _of_array(value)}
    if _is_json(value):
        return value
    raise StateError(
        f"the state of the iterator cannot be saved: {_described(path, value)}.\n"
        "  remedy: let get_state() of the iterator return text, numbers, bytes, NumPy arrays,"
        f" tensors of PyTorch on the CPU, None, and at most {_MOST_LEVELS} levels of tuples, lists"
        " and dicts of them."
    )


def _of_array(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _to_array(content: list[Any]) -> np.ndarray:
    dtype, shape, values = content
    return np.frombuffer(base64.b64decode(values), dtype).reshape(shape).copy()


def _from_json(saved: Any) -> Any:
    """Returns the value that `_to_json` converted."""
    if isinstance(saved, list):
        return [_from_json(item) for item in saved]
    if not isinstance(saved, dict):
        return saved
    mark: str
    content: Any
    mark, content = next(iter(saved.items()), ("", None))  # a marked dict has no other key
    if mark == _TUPLE:
        return tuple(map(_from_json, content))
    if mark == _BYTES:
        return base64.b64decode(content)
    if mark == _ARRAY:
        return _to_array(content)
    if mark == _TENSOR:
        return importlib.import_module("torch").from_numpy(_to_array(content))
    if mark == _PAIRS:
        return dict(map(_from_json, content))
    return {key: _from_json(item) for key, item in saved.items()}


def _from_storage(value: Any, path: _Path) -> Any:
    kind = getattr(getattr(value, "dtype", None), "kind", None)
    if kind in ("b", "i", "u") and value.shape == ():
        value = value.item()
    if len(path) < _MOST_LEVELS:
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {key: _from_storage(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [_from_storage(item, (*path, index)) for index, item in enumerate(value)]
    if _is_json(value):
        return value
    raise _foreign(path, value)


def _described(path: _Path, value: Any) -> str:
    named = "".join(f"[{shortened(key)}]" for key in path[:_MOST_NAMED])
    return f"state{named}{'...' * (len(path) > _MOST_NAMED)} is of type {describe_leaf(value)}"


def _foreign(path: _Path, value: Any) -> StateError:
    problem = f"this state is not as get_state() returned it: {_described(path, value)}"
    return StateError(f"{problem}, which is not JSON.\n{UNCHANGED}")
