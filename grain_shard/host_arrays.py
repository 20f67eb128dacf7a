"""Host memory that a device can take over as it is."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

# XLA's CPU backend uses memory that begins at a multiple of this as it stands, and copies any other
# (seen with jaxlib 0.10 and 0.12: 32 is too little, and numpy itself promises 16). Of an array that
# does, so does every shard whose bytes are a multiple of it.
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
    """The tree with copies in the place of its arrays, which whoever made them may write to again.

    To be called before the maker is asked for anything else, so by the thread that asks it.
    """
    return jax.tree.map(_owned_leaf, tree)


def _owned_leaf(leaf: Any) -> Any:
    # A masked array stays one: a plain copy would lose its mask, in place of being refused later.
    plain = isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray)
    return copied(leaf) if plain else leaf
