"""Records stacked to a batch: each must look like the first one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.trees import Batch, as_arrays, flatten


class RecordStacker(NamedTuple):
    """Stacks records; knows what each looks like from the first one read."""

    structure: Any
    paths: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype]

    @classmethod
    def of(cls, value: Any) -> RecordStacker:
        paths, leaves, _ = flatten(value)
        arrays = as_arrays(paths, leaves)
        return cls(
            jax.tree.structure(value), paths, [a.shape for a in arrays], [a.dtype for a in arrays]
        )

    def empty_batch(self) -> Batch:
        """A batch of this structure with no rows."""
        shapes_dtypes = zip(self.shapes, self.dtypes, strict=True)
        return self.structure.unflatten([np.zeros((0, *s), d) for s, d in shapes_dtypes])

    def stack(self, values: Sequence[Any], records: np.ndarray) -> Batch:
        """The records as one batch; each must look like the first one that was read."""
        flat = []
        for value, record in zip(values, records, strict=True):
            leaves, structure = jax.tree.flatten(value)
            if structure != self.structure:
                self._refuse_structure(value, record)
            flat.append(leaves)
        columns = zip(*flat, strict=True)
        return self.structure.unflatten(
            [self._stack_leaf(i, column, records) for i, column in enumerate(columns)]
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
