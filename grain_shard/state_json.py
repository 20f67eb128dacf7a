"""Converts states of iterators to plain JSON and back, and takes states back from any storage.

JSON turns tuples into lists. Grain's `ConcatThenSplitIterDataset` compares a part of its state with
a tuple. If that part has become a list, as in Grain's own checkpoints, the iterator ignores it and
continues with other rows, without an error. JSON has no bytes and no arrays either, and a storage
may turn a float into an int. So `sealed` marks what JSON lacks, and adds a digest. With the digest,
`unsealed` refuses a state that lost something in a storage.
"""

from __future__ import annotations

import base64
import importlib
import itertools
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import grain
import jax.numpy as jnp
import numpy as np
from absl import logging

from grain_shard.digest import digest
from grain_shard.errors import GrainShardError, StateError, describe_leaf, shortened

UNCHANGED = (
    "  remedy: pass set_state() the value that get_state() returned, unchanged. If a storage"
    " changes it, store json.dumps(state) as text."
)
# Marks of values that JSON lacks. A dict whose only key is a mark has the value, as JSON.
_TUPLE, _BYTES, _FLOAT, _ARRAY, _TENSOR, _PAIRS = (
    *("__tuple__", "__bytes__", "__float__", "__array__"),
    "__tensor__",  # of PyTorch, as in the state of its generators
    "__pairs__",  # a dict with a key that is no text, or that is a mark
)
_MARKS = {_TUPLE, _BYTES, _FLOAT, _ARRAY, _TENSOR, _PAIRS}
_CHECK = "check"  # the key of the digest that `sealed` adds
# Limits, so that any state is taken or refused within a second.
_MOST_LEVELS = 100  # of dicts and lists inside each other
_MOST_VALUES = 2**19
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
        StateError: The state has a value that is no text, number, bytes, array, tensor, tuple, list
            or dict; or an iterator has no state, so there is a `NoState` in its place.
    """
    count = itertools.count()
    plain = {key: _to_json(value, (key,), count) for key, value in state.items()}
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
    """Returns a state as ``get_state`` returned it, whatever types a storage has given its values.

    Storages such as Orbax, NumPy's and HDF5's files give back arrays without axes and NumPy's
    scalars in place of numbers and text, floats in place of ints, tuples in place of lists, and
    other mappings in place of dicts.

    Example:
        >>> from_storage({"kind": np.str_("feeds"), "step": np.array(3.0)})
        {'kind': 'feeds', 'step': 3}

    Raises:
        StateError: The state is no mapping, or has a value that no state has, such as an array
            with axes. The message names the path of the value and its type.
    """
    plain = _from_storage(state, (), itertools.count())
    if not isinstance(plain, dict):
        raise _foreign((), f"is of type {describe_leaf(state)}, not a dict")
    return plain


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
    """Logs that a loop cannot be saved: now, and not only at the first save.

    Args:
        why: What `why_unsaved` returned.
    """
    logging.warning("this loop cannot be resumed: %s", why)


def _digest(plain: Any) -> str:
    return digest(json.dumps(plain, sort_keys=True))


def _too_many(path: _Path, count: Iterator[int]) -> str:
    """Counts a value; returns the limit that it exceeds, or ""."""
    if len(path) > _MOST_LEVELS:
        return f"has more than {_MOST_LEVELS} levels of dicts and lists, from {_named(path[:1])} on"
    return f"has more than {_MOST_VALUES:,} values" if next(count) > _MOST_VALUES else ""


def _to_json(value: Any, path: _Path, count: Iterator[int]) -> Any:
    if isinstance(value, NoState):
        value.refuse()
    if too_many := _too_many(path, count):
        raise _unsaved((), too_many)
    if isinstance(value, np.generic | np.ndarray) and not value.shape:
        value = value.item()
    if isinstance(value, Mapping):
        if all(type(key) is str and key not in _MARKS for key in value):
            return {key: _to_json(item, (*path, key), count) for key, item in value.items()}
        return {_PAIRS: [_to_json(list(item), (*path, item[0]), count) for item in value.items()]}
    if isinstance(value, list | tuple):
        items = [_to_json(item, (*path, index), count) for index, item in enumerate(value)]
        return items if isinstance(value, list) else {_TUPLE: items}
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, float):
        return {_FLOAT: value.hex()}
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSU":
        return {_ARRAY: _of_array(value)}
    if (array := _of_tensor(value)) is not None:
        return {_TENSOR: _of_array(array)}
    is_int = isinstance(value, int) and value.bit_length() <= _MOST_BITS
    if value is None or is_int or isinstance(value, str):
        return value
    raise _unsaved(path, f"is of type {describe_leaf(value)}")


def _of_array(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, list(array.shape), base64.b64encode(array.tobytes()).decode()]


def _to_array(content: list[Any]) -> np.ndarray:
    dtype, shape, values = content
    return np.frombuffer(base64.b64decode(values), dtype).reshape(shape).copy()


def _of_tensor(value: Any) -> np.ndarray | None:
    """Returns the values of a tensor of PyTorch, if NumPy has its dtype and the CPU has it."""
    torch: Any = sys.modules.get("torch")  # whoever has a tensor has imported it
    if torch is None or not isinstance(value, torch.Tensor):
        return None
    try:
        return value.numpy()
    except (TypeError, RuntimeError):  # bfloat16; on a GPU, or a part of a graph
        return None


def _from_json(saved: Any) -> Any:
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
    if mark == _FLOAT:
        return float.fromhex(content)
    if mark == _ARRAY:
        return _to_array(content)
    if mark == _TENSOR:
        return importlib.import_module("torch").from_numpy(_to_array(content))
    if mark == _PAIRS:
        return dict(map(_from_json, content))
    return {key: _from_json(item) for key, item in saved.items()}


def _from_storage(value: Any, path: _Path, count: Iterator[int]) -> Any:
    if too_many := _too_many(path, count):
        raise _foreign((), too_many)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise _foreign(path, "has keys that are no text")
        return {
            str.__str__(key): _from_storage(item, (*path, key), count)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [_from_storage(item, (*path, index), count) for index, item in enumerate(value)]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a subclass, such as NumPy's, the text alone
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError as error:
            raise _foreign(path, "is bytes that are no text") from error
    if isinstance(value, int):
        if value.bit_length() > _MOST_BITS:
            raise _foreign(path, f"is an int of {value.bit_length():,} bits")
        return int(value)
    if isinstance(value, float) or getattr(value, "shape", None) == ():
        return _from_storage(_item(value, path), path, count)
    raise _foreign(path, f"is of type {describe_leaf(value)}")


def _item(scalar: Any, path: _Path) -> Any:
    """Returns the value of a scalar of any library; of a float, the int that it was."""
    try:
        array = np.asarray(scalar)
        item = array.item()
    except (TypeError, ValueError, RuntimeError) as error:  # a key of JAX, or a deleted array
        raise _foreign(path, f"is of type {describe_leaf(scalar)}, and has no value") from error
    if not jnp.issubdtype(array.dtype, np.floating):
        if hasattr(item, "shape"):  # an array inside an array, perhaps inside itself
            raise _foreign(path, f"is of type {describe_leaf(scalar)}")
        return item
    # A float with more digits than its dtype has may be another int, rounded.
    exact = 2 ** (jnp.finfo(array.dtype).nmant + 1)
    if item == item // 1 and abs(item) < exact:
        return int(item)
    raise _foreign(path, f"is {item!r} of {array.dtype}, and no exact whole number")


def _named(path: _Path) -> str:
    return "state" + "".join(f"[{shortened(key)}]" for key in path)


def _foreign(path: _Path, problem: str) -> StateError:
    return StateError(f"get_state() returned no such state: {_named(path)} {problem}.\n{UNCHANGED}")


def _unsaved(path: _Path, problem: str) -> StateError:
    return StateError(
        f"the state of the iterator cannot be saved: {_named(path)} {problem}.\n"
        "  remedy: let get_state() of the iterator return text, numbers, bytes, NumPy arrays,"
        " tensors of PyTorch on the CPU, None, and tuples, lists and dicts of them."
    )
