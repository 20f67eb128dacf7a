"""Records stacked to a batch: each must look like the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.trees import Batch, as_arrays, flatten


class RecordStacker:
    """Stacks records that look like one of them.

    Args:
        value: That one.
    """

    def __init__(self, value: Any):
        self.paths, leaves, _ = flatten(value)
        arrays = as_arrays(self.paths, leaves)
        self.structure = jax.tree.structure(value)
        self.shapes, self.dtypes = [a.shape for a in arrays], [a.dtype for a in arrays]
        self._of_many: dict[int, Any] = {}  # the structure of so many records

    def empty_batch(self) -> Batch:
        """A batch of this structure with no rows."""
        shapes_dtypes = zip(self.shapes, self.dtypes, strict=True)
        return self.structure.unflatten([np.zeros((0, *s), d) for s, d in shapes_dtypes])

    def stack(self, values: Sequence[Any], records: np.ndarray) -> Batch:
        """The records as one batch; each must look like the first one that was read."""
        # All records in one call: one by one that costs more than to copy them.
        count = len(values)
        leaves, structure = jax.tree.flatten(tuple(values))
        if count not in self._of_many:
            self._of_many[count] = jax.tree_util.treedef_tuple([self.structure] * count)
        if structure != self._of_many[count]:
            for value, record in zip(values, records, strict=True):
                if jax.tree.structure(value) != self.structure:
                    self._refuse_structure(value, record)
        width = len(self.paths)
        return self.structure.unflatten(
            [self._stack_leaf(i, leaves[i::width], records) for i in range(width)]
        )

    def _stack_leaf(self, i: int, column: Sequence[Any], records: np.ndarray) -> np.ndarray:
        shape, dtype = self.shapes[i], self.dtypes[i]
        text = dtype.kind in "US"  # its dtype carries a width, which may differ from row to row
        kinds = {(np.shape(value), getattr(value, "dtype", None)) for value in column}
        if text or kinds != {(shape, dtype)}:
            for value, record in zip(column, records, strict=True):
                self._check_row(i, np.asarray(value), record)
        if shape and not text:
            # Not np.stack, which makes a view of each row first.
            return np.concatenate(column).reshape(len(column), *shape)
        return np.stack(column) if shape else np.asarray(column)

    def _check_row(self, i: int, row: np.ndarray, record: int) -> None:
        shape, dtype = self.shapes[i], self.dtypes[i]
        same_dtype = row.dtype.kind == dtype.kind if dtype.kind in "US" else row.dtype == dtype
        if row.shape != shape or not same_dtype:
            raise ShardingError(
                f"record {record} holds {describe_leaf(row)}, other records hold"
                f" {dtype}[{', '.join(map(str, shape))}].",
                path=self.paths[i],
                leaf=describe_leaf(row),
                remedy="give every record one shape and dtype before .batch (pad or cast in .map),"
                " or pass a batch_fn that does.",
            )

    def _refuse_structure(self, value: Any, record: int) -> None:
        paths, leaves, _ = flatten(value)
        as_arrays(paths, leaves)  # a None is named by its path
        differing = sorted(set(paths) ^ set(self.paths))
        raise ShardingError(
            f"record {record} has another structure than the other records"
            f" (only on one side: {', '.join(differing) or 'the containers'}).",
            path=differing[0] if differing else None,
            remedy="return the same tree for every record from .map.",
        )
