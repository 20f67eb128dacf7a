"""Compares arrays bit by bit, and shows two that differ."""

from __future__ import annotations

from typing import Any

import numpy as np

from grain_shard.errors import describe_leaf
from grain_shard.trees import is_text

# Most characters of a value in a message, and of a value that is shown as bytes.
_SHOWN, _SHOWN_BYTES = 60, 200


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns True if two arrays have the same dtype, shape and bits, or the same text."""
    if is_text(a) or is_text(b):  # dtypes of NumPy's text differ by their width
        return a.tolist() == b.tolist()
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


def shown_apart(one: np.ndarray, other: np.ndarray) -> tuple[str, str]:
    """Returns two texts that show the difference of two arrays.

    The texts are the beginnings of the arrays. If these look the same, they are the dtypes and
    shapes, or else the first values that differ. Values that also look the same, such as two NaNs
    with different bits, are shown as bytes.
    """
    texts = _shown(one), _shown(other)
    if texts[0] != texts[1]:
        return texts
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return describe_leaf(one), describe_leaf(other)
    pairs = zip(map(_bits, one.flat), map(_bits, other.flat), strict=True)
    first = next(i for i, (a, b) in enumerate(pairs) if a != b)
    at = [int(i) for i in np.unravel_index(first, one.shape)]
    values = [str(x.flat[first])[:_SHOWN] for x in (one, other)]
    if values[0] == values[1]:
        values = [repr(_bits(x.flat[first]))[:_SHOWN_BYTES] for x in (one, other)]
    return f"{values[0]} at {at}", f"{values[1]} at {at}"


def _shown(value: np.ndarray) -> str:
    text = np.array2string(value, threshold=8, edgeitems=2, separator=", ")
    return " ".join(text.split())[:_SHOWN]


def _bits(value: Any) -> Any:
    return value.tobytes() if isinstance(value, np.generic) else value
