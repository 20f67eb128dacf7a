"""NumPy arrays whose memory a CPU device can use without a copy."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np

# XLA's CPU backend uses an array without a copy if its address is a multiple of 64 bytes. It copies
# any other array. (Seen with jaxlib 0.10 and 0.12. A multiple of 32 is not enough, and numpy only
# promises a multiple of 16.) If the address of an array and the size of its shards are multiples of
# 64 bytes, the address of each shard is one, too.
ALIGNMENT_BYTES = 64
# An array of at most this many bytes is copied in a few microseconds.
_FEW_BYTES = 2**16


def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Returns an uninitialized array, whose memory begins at a multiple of `ALIGNMENT_BYTES`.

    The memory of an array of Python objects may begin anywhere.
    """
    if dtype.hasobject:  # an array of objects must not be made of raw bytes
        return np.empty(shape, dtype)
    raw = np.empty(math.prod(shape) * dtype.itemsize + ALIGNMENT_BYTES, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT_BYTES
    return np.ndarray(shape, dtype, raw, start)


def copied(array: np.ndarray) -> np.ndarray:
    """Returns a contiguous copy of an array.

    The memory of the copy begins at a multiple of `ALIGNMENT_BYTES`, except for Python objects.
    """
    copy = empty(array.shape, array.dtype)
    if array.flags.c_contiguous and 0 < array.nbytes <= _FEW_BYTES and not array.dtype.hasobject:
        # NumPy would release the interpreter's lock, and then wait for other threads to get it
        # back, which takes longer than the copy. A batch of 20 leaves of 16 KB would take 4 % more.
        copy.reshape(-1).view(np.uint8).data[:] = np.asarray(array).reshape(-1).view(np.uint8).data
    else:
        copy[...] = array
    return copy


def owned(tree: Any) -> Any:
    """Returns a tree with copies of its NumPy arrays.

    An iterator may reuse its arrays for its next tree. So call this before `next`, in the same
    thread.
    """
    return jax.tree.map(_owned_leaf, tree)


def _owned_leaf(leaf: Any) -> Any:
    # A masked array is not copied, because a copy would lose its mask. A later check refuses it.
    plain = isinstance(leaf, np.ndarray) and not isinstance(leaf, np.ma.MaskedArray)
    return copied(leaf) if plain else leaf
