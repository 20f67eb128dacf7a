"""Padding of a batch with extra rows, and the mask of the real rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.host_arrays import empty
from grain_shard.reading.pad_rows import PadRows
from grain_shard.sharding.layout import round_up
from grain_shard.trees import Batch, FlatBatch

Remainder = Literal["pad", "drop", "error"]
# The end of a remedy.
_NO_MASK = (
    'mask_key=None with remainder="drop": without a mask, means include the zeros of padding.'
)
REMAINDERS: tuple[str, ...] = get_args(Remainder)


@dataclass(frozen=True)
class Padding:
    """The padding of batches.

    Attributes:
        divisor: The padded number of rows is a multiple of this.
        remainder: "pad" pads a short batch, "drop" drops it, "error" refuses it.
        rows: The values of rows of padding, and the key of the mask.
        global_batch_size: Rows of a full batch before padding; None for the dataset's own size.
    """

    divisor: int
    remainder: Remainder = "pad"
    rows: PadRows = PadRows()  # noqa: RUF009 (it is frozen)
    global_batch_size: int | None = None

    def size(self, global_batch_size: int) -> int:
        """Returns the rows of a full batch, including its padding."""
        return round_up(self.global_batch_size or global_batch_size, self.divisor)


def pad_batch(batch: Batch, size: int, padding: PadRows, bad_rows: Sequence[int] = ()) -> Batch:
    """Returns the batch with rows of padding added up to `size`, and the mask.

    Args:
        batch: A tree of arrays ``[m, ...]``, m <= size; scalars are unchanged.
        size: Rows to pad to.
        padding: Values of these rows, and the key of the mask, ``bool[size]``.
        bad_rows: Rows of the batch to overwrite with padding, in place.

    Raises:
        ShardingError: A mask is requested and the batch is not a mapping, or has that key already;
            a leaf cannot hold its pad value; or a leaf of `pad_value` does not exist.
    """
    flat, mask_key = FlatBatch.of(batch), padding.mask_key
    arrays, missing = flat.arrays, size - flat.rows
    # Computed even if no row is missing, so that an error is raised at the first batch.
    values = padding.values(flat.structure.unflatten(arrays))
    if missing:
        padding.made()
        arrays = [
            _with_rows(array, missing, value) if array.ndim else array
            for array, value in zip(arrays, values, strict=True)
        ]
    bad = list(bad_rows)
    if bad:
        for array, value in zip(arrays, values, strict=True):
            if array.ndim:
                array[bad] = value
    padded = flat.structure.unflatten(arrays)
    if mask_key is None:
        return padded
    if not isinstance(padded, Mapping):
        flat.refuse(
            f"the batch is a {type(padded).__name__}, so there is no place for the mask.",
            remedy=f"turn records into dicts with .map before .batch, or pass {_NO_MASK}",
        )
    if not all(isinstance(key, str) for key in padded):
        flat.refuse(
            "the batch's keys are no strings, among which JAX could sort that of the mask.",
            remedy=f"give records string keys in .map, or pass {_NO_MASK}",
        )
    if mask_key in padded:
        raise ShardingError(
            f"the batch already has a leaf {mask_key!r}, the key of the mask.",
            path=f"batch[{mask_key!r}]",
            leaf=describe_leaf(padded[mask_key]),
            remedy=f"pass another mask_key, or {_NO_MASK}",
        )
    mask = np.arange(size) < flat.rows
    mask[bad] = False
    return {**padded, mask_key: mask}


def _with_rows(array: np.ndarray, count: int, value: np.ndarray) -> np.ndarray:
    padded = empty((len(array) + count, *array.shape[1:]), array.dtype)
    padded[: len(array)] = array
    padded[len(array) :] = value
    return padded
