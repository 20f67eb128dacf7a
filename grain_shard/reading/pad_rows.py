"""Rows of padding: zeros or the user's values, and False in the mask."""

from __future__ import annotations

import functools
import numbers
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.trees import (
    MASK_KEY,
    FlatBatch,
    flatten,
    is_none,
    is_numeric,
    is_text,
    path_of,
)


@dataclass(frozen=True)
class PadRows:
    """Rows of padding.

    Example:
        >>> PadRows({"tokens": -1}).like({"tokens": np.arange(2), "x": np.ones(2)})
        {'tokens': array([-1, -1]), 'x': array([0., 0.])}

    Attributes:
        pad_value: A number for all leaves, or a tree prefix of numbers. Leaves outside the prefix
            are padded with 0. Text is padded with "", and masks with False.
        mask_key: The key of the mask in a batch; None for no mask.
    """

    pad_value: Any = 0
    mask_key: str | None = MASK_KEY

    def __post_init__(self) -> None:
        values = jax.tree_util.tree_flatten_with_path(self.pad_value, is_leaf=is_none)[0]
        for keys, value in values:
            if not _is_number(value):
                raise ShardingError(
                    f"pad_value{jax.tree_util.keystr(keys)} is {value!r}, which is no number.",
                    remedy='pass a number, or a tree of them: {"tokens": tokenizer.pad_id}.',
                )

    def values(self, tree: Any) -> list[np.ndarray]:
        """Returns the pad value of each leaf of a tree of arrays, as a scalar of the leaf's dtype.

        Raises:
            ShardingError: A leaf cannot hold its value, or the tree lacks a leaf of `pad_value`.
        """
        if type(self.pad_value) is int and self.pad_value == 0:
            return [_as_dtype(0, np.asarray(leaf), ()) for leaf in jax.tree.leaves(tree)]
        pairs = jax.tree_util.tree_flatten_with_path(self.pad_value)[0]
        given, found, used = {path_of(keys): value for keys, value in pairs}, [], set()
        # A None of the tree has no leaf to pad, and a value may be given for it.
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_none)[0]:
            nodes = (path_of(keys[:depth]) for depth in range(len(keys) + 1))
            node = next((path for path in nodes if path in given), None)
            used.add(node)
            value = 0 if node is None or self._is_mask(keys) else given[node]
            if leaf is not None:
                found.append(_as_dtype(value, np.asarray(leaf), keys))
        for path in (path for path in given if path not in used):
            leaves = flatten(tree)[0]
            if deeper := [leaf for leaf in leaves if path.startswith(leaf)]:
                raise ShardingError(
                    "pad_value goes deeper than the batch.",
                    path=deeper[0],
                    remedy="give this leaf a single number.",
                )
            raise ShardingError(
                "pad_value names a leaf that the batch does not have.",
                path=path,
                remedy=f"mend its name; the batch has {', '.join(leaves)}.",
            )
        return found

    def made(self) -> None:
        """Warns, where rows of padding are made, if no mask will mark them."""
        if self.mask_key is None:
            warnings.warn(
                "a batch has rows of padding and no mask, so a mean over the batch includes them:"
                ' zeros, or pad_value. Pass remainder="drop"; or leave out mask_key=None, which'
                " needs records that are dicts, and divide by the sum of the mask.",
                stacklevel=1,  # so that it is shown once
            )

    def _is_mask(self, keys: Any) -> bool:
        return len(keys) == 1 and getattr(keys[0], "key", None) == self.mask_key

    def like(self, tree: Any) -> Any:
        """Returns a batch of padding with the shapes and dtypes of another batch.

        Scalars are unchanged: they belong to the whole batch, and are the same on every host.
        """
        self.made()
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(
            [
                np.full_like(leaf, value) if np.ndim(leaf) else leaf
                for leaf, value in zip(leaves, self.values(tree), strict=True)
            ]
        )

    def are_all_of(self, batch: FlatBatch) -> bool:
        """Returns True if every row of a batch is padding."""
        values = self.values(batch.structure.unflatten(batch.arrays))
        return all(
            # NaN is not equal to itself.
            np.all((array == value) | ((array != array) & (value != value)))
            for array, value in zip(batch.arrays, values, strict=True)
            if array.ndim
        )


def _is_number(value: Any) -> bool:
    numpys = isinstance(value, np.generic) and is_numeric(value.dtype)
    return numpys or isinstance(value, numbers.Number)


def _as_dtype(value: Any, array: np.ndarray, keys: Sequence[Any]) -> np.ndarray:
    if is_text(array):
        return np.array(next(iter(array.flat), "")[:0], array.dtype)
    if type(value) is int and value == 0:
        return np.zeros((), array.dtype)
    if _fits(value, array.dtype):
        return np.asarray(value, array.dtype)
    raise ShardingError(
        f"its dtype cannot hold pad_value={value!r}.",
        path=path_of(keys),
        leaf=describe_leaf(array),
        remedy="give each leaf a value of its own, by a dict; one that is left out gets 0.",
    )


@functools.lru_cache(maxsize=256, typed=True)  # 1.0 is 1+0j, but not for a dtype
def _fits(value: Any, dtype: np.dtype) -> bool:
    """Returns True if a dtype holds a value exactly, or the dtype is a float that rounds it."""
    if np.iscomplexobj(value) and dtype.kind != "c":
        return False
    try:
        with np.errstate(all="ignore"):
            held = np.array(value, dtype).item()
    except (TypeError, ValueError, OverflowError):
        return False
    if held == value or (held != held and value != value):
        return True
    # Floats beyond the largest become inf, NaN or, in four and six bits, the largest.
    return (
        jnp.issubdtype(dtype, np.inexact)
        and np.isfinite(held)
        and abs(value.real) <= float(jnp.finfo(dtype).max)
    )
