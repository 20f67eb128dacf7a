"""Host memory that a device can take over as it is."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

# XLA's CPU backend takes over memory that begins at a multiple of 64 bytes as it is, and copies any
# other memory once more. (Seen with jaxlib 0.10 and 0.12. A multiple of 32 is not enough, and numpy
# itself promises 16.) If an array begins so, each shard does that is a multiple of 64 bytes long.
ALIGNMENT_BYTES = 64


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """An array of unset values that begins at a multiple of `ALIGNMENT_BYTES`."""
    if dtype.hasobject:  # these must not lie in memory that numpy does not know them to be in
        return np.empty(shape, dtype)
    raw = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT_BYTES, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return np.ndarray(shape, dtype, raw, start)


def copied(array: np.ndarray) -> np.ndarray:
    """A copy that begins at a multiple of `ALIGNMENT_BYTES`, contiguous and a plain array."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def owned(tree: Any) -> Any:
    """The tree with copies of its arrays, since who made the arrays may write to them again.

    Call it in the thread that got the tree, before that thread asks for the next one.
    """
    return jax.tree.map(_owned_leaf, tree)


def _owned_leaf(leaf: Any) -> Any:
    # A masked array stays one: a plain copy would lose its mask, in place of being refused later.
    plain = isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray)
    return copied(leaf) if plain else leaf
