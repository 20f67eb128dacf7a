"""Padding of batches: the padded number of rows, the pad values, and the mask of real rows."""

from __future__ import annotations

import functools
import itertools
import numbers
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from grain_shard.errors import ShardingError, describe_leaf, require_choice, require_int
from grain_shard.host_arrays import empty
from grain_shard.sharding.layout import round_up
from grain_shard.trees import (
    MASK_KEY,
    Batch,
    FlatBatch,
    flatten,
    is_empty,
    is_numeric,
    is_text,
    path_of,
)

Remainder = Literal["pad", "drop", "error"]
REMAINDER = "remainder"  # the name of the option, in states and in messages
SHORT_REMEDY = 'pass remainder="pad" (adds zeros and a mask) or remainder="drop".'
# The end of a remedy, for a user who does without the mask.
_NO_MASK = (
    'mask_key=None with remainder="drop" to .shard_to and PadToDivisible. (Without a mask,'
    " padding would count in every mean.)"
)


@dataclass(frozen=True)
class Padding:
    """The rules by which batches are padded.

    Example:
        >>> padding = Padding(4, pad_value={"tokens": -1})
        >>> padding.size(6), padding.like({"tokens": np.arange(2), "x": np.ones(2)})
        (8, {'tokens': array([-1, -1]), 'x': array([0., 0.])})

    Attributes:
        divisor: The padded number of rows is a multiple of this number.
        remainder: "pad" pads a short batch, "drop" drops it, "error" raises an error for it.
        mask_key: The key of the mask in a batch; None for no mask.
        global_batch_size: Rows of a full batch before padding; None for the dataset's own size.
        pad_value: The value of padding: a number for all leaves, or a tree prefix with numbers for
            some leaves. Any other leaf is padded with 0. Text is padded with "", and the mask with
            False.
    """

    divisor: int
    remainder: Remainder = "pad"
    mask_key: str | None = MASK_KEY
    global_batch_size: int | None = None
    pad_value: Any = 0

    def __post_init__(self) -> None:
        require_int("divisor", self.divisor, 1)
        if self.global_batch_size is not None:
            require_int("global_batch_size", self.global_batch_size, 1)
        require_choice(REMAINDER, self.remainder, get_args(Remainder))
        values = jax.tree_util.tree_flatten_with_path(self.pad_value, lambda v: v is None)[0]
        for keys, value in values:
            if not _is_number(value):
                raise ShardingError(
                    f"pad_value{jax.tree_util.keystr(keys)} is {value!r}, not a number.",
                    remedy='pass a number, or a tree of them: {"tokens": tokenizer.pad_id}.',
                )

    @property
    def pads_short(self) -> bool:
        """True if a short batch is padded."""
        return self.remainder == "pad"

    @property
    def drops_short(self) -> bool:
        """True if a short batch is left out."""
        return self.remainder == "drop"

    @property
    def refuses_short(self) -> bool:
        """True if a short batch is an error, whose remedy is `SHORT_REMEDY`."""
        return self.remainder == "error"

    def fingerprint(self) -> dict[str, str]:
        """Returns the field of a saved state that must be the same when the state is restored."""
        return {REMAINDER: self.remainder}

    def described(self) -> dict[str, Any]:
        """Returns the rules that all hosts must have, by name, to compare them."""
        return {**self.fingerprint(), "pad_value": repr(self.pad_value)}

    def size(self, global_batch_size: int) -> int:
        """Returns the number of rows of a full batch, including padding.

        Args:
            global_batch_size: The batch size of the dataset. It is not used if the attribute
                `global_batch_size` is set.
        """
        return round_up(self.global_batch_size or global_batch_size, self.divisor)

    def values(self, tree: Any) -> list[np.ndarray]:
        """Returns the pad value of each leaf of a tree of arrays, as a 0-d array of its dtype.

        A value in `pad_value` is for a leaf, or for all leaves of a tree.

        Raises:
            ShardingError: A leaf cannot hold its value, or the tree lacks a leaf of `pad_value`.
        """
        pairs = jax.tree_util.tree_flatten_with_path(self.pad_value, is_leaf=is_empty)[0]
        given = {path_of(keys): value for keys, value in pairs}
        found: list[np.ndarray] = []  # the result
        used = set[str]()  # the paths in the tree to which a path in `given` may refer
        # A None in the tree is not an array to pad, but `pad_value` may have a value for it.
        for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_empty)[0]:
            # The paths of the nodes from the root to the leaf. At most one of them has a value.
            nodes = [path_of(keys[:depth]) for depth in range(len(keys) + 1)]
            value = next((given[path] for path in nodes if not is_empty(given.get(path))), 0)
            # An empty tree in `pad_value` fits a tree, but not an array.
            is_array = not is_empty(leaf)
            used.update(nodes[:-1] if is_array and is_empty(given.get(nodes[-1])) else nodes)
            if is_array:
                value = 0 if self._is_mask(keys) else value
                found.append(_as_dtype(value, np.asarray(leaf), keys))
        for path in (path for path in given if path not in used):
            leaves = flatten(tree)[0]
            if deeper := [leaf for leaf in leaves if path.startswith(leaf)]:
                raise ShardingError(
                    "pad_value has a tree for this leaf, but the leaf is a single array.",
                    path=deeper[0],
                    remedy="give this leaf a single number in pad_value.",
                )
            raise ShardingError(
                "pad_value names a leaf that the batch does not have.",
                path=path,
                remedy=f"correct its name in pad_value: the batch has {', '.join(leaves)}.",
            )
        return found

    def warn_if_unmasked(self) -> None:
        """Warns if batches have no mask. Called whenever rows of padding are made."""
        if self.mask_key is None:
            warnings.warn(
                "a batch has rows of padding and no mask, so a mean over the batch includes the"
                ' padding. Pass remainder="drop". Or leave out mask_key=None, make each record a'
                " dict, and divide sums by the sum of the mask.",
                stacklevel=1,  # always this line, so that Python shows the warning once
            )

    def _is_mask(self, keys: Any) -> bool:
        return len(keys) == 1 and getattr(keys[0], "key", None) == self.mask_key

    def like(self, tree: Any) -> Any:
        """Returns a batch whose rows are all padding, with the shapes and dtypes of another batch.

        Scalars are copied from that batch, because they belong to the whole batch and are the same
        on every host.
        """
        self.warn_if_unmasked()
        leaves, structure = jax.tree.flatten(tree)
        return structure.unflatten(
            [
                np.full_like(leaf, value) if np.ndim(leaf) else leaf
                for leaf, value in zip(leaves, self.values(tree), strict=True)
            ]
        )

    def are_all_of(self, batch: FlatBatch) -> bool:
        """Returns True if every row of a batch has only pad values."""
        values = self.values(batch.tree)
        return all(
            # If the pad value is NaN, it equals a NaN in the batch. `x != x` finds NaNs.
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
        f"the leaf's dtype cannot hold pad_value={value!r}.",
        path=path_of(keys),
        leaf=describe_leaf(array),
        remedy="pass pad_value as a dict with a value per leaf. Leaves without a value get 0.",
    )


# Typed, because the equal keys 1.0 and 1+0j would otherwise share one result, but no float dtype
# holds a complex number.
@functools.lru_cache(maxsize=256, typed=True)
def _fits(value: Any, dtype: np.dtype) -> bool:
    """Returns True if a dtype can hold a value. A float or complex dtype may round the value."""
    if np.iscomplexobj(value) and dtype.kind != "c":
        return False
    try:
        with np.errstate(all="ignore"):
            held = np.array(value, dtype).item()
    except (TypeError, ValueError, OverflowError):
        return False
    if held == value or (held != held and value != value):  # `x != x` finds NaNs
        return True
    try:
        largest = float(jnp.finfo(dtype).max)
    except ValueError:  # not a dtype of floats
        return False
    # A value beyond the largest float of the dtype becomes inf or NaN. In a float of four or six
    # bits it becomes the largest float, so the value itself is compared as well.
    return bool(np.isfinite(held)) and abs(value.real) <= largest


def pad_batch(batch: FlatBatch, size: int, padding: Padding, bad_rows: Sequence[int] = ()) -> Batch:
    """Returns a batch padded to `size` rows, with a mask if the rules have a key for it.

    Args:
        batch: Arrays ``[m, ...]``, m <= size; scalars are unchanged.
        size: Number of rows to pad to.
        padding: The rules: values of padding, and the key of the mask. The mask is ``bool[size]``,
            False in rows of padding.
        bad_rows: Row numbers of the batch to overwrite with padding, in place. These rows are
            placeholders.

    Raises:
        ShardingError: A mask is wanted, and the batch is not a mapping with string keys or has the
            mask's key already; a leaf cannot hold its pad value; or `pad_value` names a leaf that
            the batch does not have.
    """
    arrays, mask_key = batch.arrays, padding.mask_key
    bad = [*bad_rows, *range(batch.rows, size)]  # all rows to fill with padding
    # The default 0 fits every leaf. Any other pad value is checked even if no row is missing, so
    # that a wrong value raises an error at the first batch.
    is_zero = type(padding.pad_value) is int and padding.pad_value == 0
    if bad or not is_zero:
        values = padding.values(batch.tree)
        if batch.rows < size:
            arrays = [_with_rows(array, size) if array.ndim else array for array in arrays]
        if bad:
            padding.warn_if_unmasked()
            for array, value in zip(arrays, values, strict=True):
                if array.ndim:
                    array[bad] = value
    padded = batch.structure.unflatten(arrays)
    if mask_key is None:
        return padded
    if not isinstance(padded, Mapping):
        if all(map(is_text, arrays)):
            batch.refuse(
                "each record is text or bytes, but only a dict of arrays can hold the mask.",
                remedy="decode the records into dicts by .map(decode) before .batch.",
            )
        batch.refuse(
            f"the batch is a {type(padded).__name__}, but only a dict can hold the mask.",
            remedy=f"turn records into dicts with .map before .batch, or pass {_NO_MASK}",
        )
    if not all(map(isinstance, padded, itertools.repeat(str))):
        batch.refuse(
            "the keys of the batch are not strings, so JAX cannot sort the mask's key among them.",
            remedy=f"give records string keys in .map, or pass {_NO_MASK}",
        )
    if mask_key in padded:
        raise ShardingError(
            f"the batch already has a leaf {mask_key!r}, and mask_key gives the mask this name.",
            path=f"batch[{mask_key!r}]",
            leaf=describe_leaf(padded[mask_key]),
            remedy=f"pass another mask_key, or pass {_NO_MASK}",
        )
    mask = np.ones(size, bool)
    mask[bad] = False
    return {**padded, mask_key: mask}


def _with_rows(array: np.ndarray, size: int) -> np.ndarray:
    """Returns a copy with `size` rows. The added rows are uninitialized."""
    longer = empty((size, *array.shape[1:]), array.dtype)
    longer[: len(array)] = array
    return longer
