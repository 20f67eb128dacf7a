"""Host memory that a device can use without a copy."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

# XLA's CPU backend uses memory that begins at a multiple of 64 bytes without a copy, and copies any
# other memory. (Seen with jaxlib 0.10 and 0.12. A multiple of 32 is not enough, and numpy promises
# only 16.) In such an array, each shard whose size is a multiple of 64 bytes begins so, too.
ALIGNMENT_BYTES = 64


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array that begins at a multiple of `ALIGNMENT_BYTES`."""
    if dtype.hasobject:  # numpy must know that the memory holds objects
        return np.empty(shape, dtype)
    raw = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT_BYTES, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return np.ndarray(shape, dtype, raw, start)


def copied(array: np.ndarray) -> np.ndarray:
    """Returns a contiguous plain copy that begins at a multiple of `ALIGNMENT_BYTES`."""
    copy = empty(array.shape, array.dtype)
    copy[...] = array
    return copy


def owned(tree: Any) -> Any:
    """Returns the tree with copies of its arrays, because their maker may write to them again.

    Call it in the thread that got the tree, before that thread asks for the next one.
    """
    return jax.tree.map(_owned_leaf, tree)


def _owned_leaf(leaf: Any) -> Any:
    # A masked array stays masked, so that it is refused later: a copy would lose its mask.
    plain = isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray)
    return copied(leaf) if plain else leaf
