"""Rows of padding: zeros or the user's values, and False in the mask."""

from __future__ import annotations

import functools
import numbers
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.trees import MASK_KEY, ROOT, FlatBatch, child, is_text


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
        for keys, value in jax.tree_util.tree_flatten_with_path(self.pad_value, is_leaf=_is_none)[
            0
        ]:
            if not isinstance(value, numbers.Number | np.generic):
                raise ShardingError(
                    f"pad_value{jax.tree_util.keystr(keys)} is {value!r}, which is no number.",
                    remedy='pass a number, or a tree of them: {"tokens": tokenizer.pad_id}.',
                )

    def values(self, tree: Any) -> list[np.ndarray]:
        """Returns the pad value of each leaf of a tree of arrays, as a scalar of the leaf's dtype.

        Raises:
            ShardingError: A leaf cannot hold its value, or the tree lacks a leaf of `pad_value`.
        """
        pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
        if type(self.pad_value) is int and self.pad_value == 0:
            return [np.zeros((), np.asarray(leaf).dtype) for _, leaf in pairs]
        found, used = [], set()
        for keys, leaf in pairs:
            value, depth = self._walk(keys)
            used.add(jax.tree_util.keystr(keys[:depth]))
            path, array = ROOT + jax.tree_util.keystr(keys), np.asarray(leaf)
            if is_text(array) or self._is_mask(keys):
                value = 0
            found.append(_as_dtype(value, array, path))
        for keys, _ in jax.tree_util.tree_flatten_with_path(self.pad_value)[0]:
            if jax.tree_util.keystr(keys) not in used:
                has = ", ".join(ROOT + jax.tree_util.keystr(keys) for keys, _ in pairs)
                raise ShardingError(
                    "pad_value names a leaf that the batch does not have.",
                    path=ROOT + jax.tree_util.keystr(keys),
                    remedy=f"mend its name; the batch has {has}.",
                )
        return found

    def _walk(self, keys: Any) -> tuple[Any, int]:
        """Returns the value for a leaf, and the number of the leaf's keys that lead to it."""
        node = self.pad_value
        for depth, key in enumerate(keys):
            if isinstance(node, numbers.Number | np.generic):
                return node, depth
            try:
                node = child(node, key)
            except (KeyError, IndexError, AttributeError, TypeError):
                return 0, len(keys)
        if not isinstance(node, numbers.Number | np.generic):
            raise ShardingError(
                "pad_value goes deeper than the batch.",
                path=ROOT + jax.tree_util.keystr(keys),
                remedy="give this leaf a single number.",
            )
        return node, len(keys)

    def _is_mask(self, keys: Any) -> bool:
        return len(keys) == 1 and getattr(keys[0], "key", None) == self.mask_key

    def like(self, tree: Any) -> Any:
        """Returns a batch of padding with the shapes and dtypes of another batch.

        Scalars are unchanged: they belong to the whole batch, and are the same on every host.
        """
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
        pairs = zip(batch.arrays, values, strict=True)
        return all(_same(array, value) for array, value in pairs if array.ndim)


def _same(array: np.ndarray, value: np.ndarray) -> bool:
    if value != value:  # NaN, which is not equal to itself
        return bool((array != array).all())
    return bool((array == value).all())


def _is_none(leaf: Any) -> bool:
    return leaf is None


def _as_dtype(value: Any, array: np.ndarray, path: str) -> np.ndarray:
    if _fits(value, array.dtype):
        return np.zeros((), array.dtype) if is_text(array) else np.asarray(value, array.dtype)
    raise ShardingError(
        f"its dtype cannot hold pad_value={value!r}.",
        path=path,
        leaf=describe_leaf(array),
        remedy="give each leaf a value of its own, by a dict; one that is left out gets 0.",
    )


@functools.lru_cache(maxsize=256)
def _fits(value: Any, dtype: np.dtype) -> bool:
    """Returns True if an integer or boolean dtype holds a value exactly; other dtypes round it."""
    if dtype.kind == "b":
        return value in (0, 1)
    if dtype.kind in "iu":
        info = np.iinfo(dtype)
        return value == value // 1 and info.min <= value <= info.max
    return True
