"""Rows stacked to a batch: each must look like the first one that was read."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.host_arrays import empty
from grain_shard.trees import Batch, as_arrays, flatten, is_text

# Rows are made and written into the batch this many bytes at a time, so that a batch in the making
# takes little more than its own memory, and small rows go many at once.
_BYTES_AT_A_TIME = 2**20


class RowStacker:
    """Stacks rows that look like one of them.

    Args:
        row: That one.
        name: What to call a row in messages; ``{}`` in it stands for where the row comes from.
    """

    def __init__(self, row: Any, name: str):
        paths, leaves, _ = flatten(row)
        self.paths: list[str] = paths
        self.name: str = name
        self.structure: Any = jax.tree.structure(row)
        # Copies: a row may be a view of much more, which it would keep in memory.
        self.likes: list[np.ndarray] = [np.array(like) for like in as_arrays(self.paths, leaves)]
        self._of_many: dict[int, Any] = {}  # the structure of so many rows

    @property
    def rows_at_a_time(self) -> int:
        """How many rows to make before they are written."""
        row_bytes = sum(like.nbytes for like in self.likes)
        return max(1, _BYTES_AT_A_TIME // max(1, row_bytes))

    @property
    def like(self) -> Any:
        """The row that all must look like, in arrays."""
        return self.structure.unflatten(self.likes)

    @functools.cached_property
    def empty_row(self) -> Any:
        """A row of zeros that looks like all others."""
        return self.structure.unflatten([np.zeros_like(like) for like in self.likes])

    def leaves_of(self, rows: Sequence[Any], origins: Iterable[Any]) -> list[Any]:
        """The leaves of all rows, row by row.

        Raises:
            ShardingError: A row is another tree.
        """
        # All rows in one call: one by one that costs more than to copy them.
        leaves, structure = jax.tree.flatten(tuple(rows))
        if len(rows) not in self._of_many:
            of_many = jax.tree_util.treedef_tuple([self.structure] * len(rows))
            self._of_many[len(rows)] = of_many
        if structure != self._of_many[len(rows)]:
            for row, origin in zip(rows, origins, strict=True):
                if jax.tree.structure(row) != self.structure:
                    self._refuse_structure(row, origin)
        return leaves

    def check(self, i: int, column: Sequence[Any], origins: Iterable[Any]) -> None:
        """Checks one leaf of many rows.

        Raises:
            ShardingError: It has another shape or dtype in one of them.
        """
        like = self.likes[i]
        text = is_text(like)  # its dtype carries a width, which may differ from row to row
        kinds = {(np.shape(value), getattr(value, "dtype", None)) for value in column}
        if not text and kinds == {(like.shape, like.dtype)}:
            return
        for value, origin in zip(column, origins, strict=True):
            array = np.asarray(value)
            same_dtype = array.dtype.kind in "US" if text else array.dtype == like.dtype
            if array.shape != like.shape or not same_dtype:
                raise ShardingError(
                    f"{self.name.format(origin)} holds {describe_leaf(array)}, others hold"
                    f" {like.dtype}[{', '.join(map(str, like.shape))}].",
                    path=self.paths[i],
                    leaf=describe_leaf(array),
                    remedy="give every row one shape and dtype before .batch (pad or cast in .map),"
                    " or pass a batch_fn that does.",
                )

    def _refuse_structure(self, row: Any, origin: Any) -> None:
        paths, leaves, _ = flatten(row)
        as_arrays(paths, leaves)  # a None is named by its path
        differing = sorted(set(paths) ^ set(self.paths))
        raise ShardingError(
            f"{self.name.format(origin)} has another structure than the others"
            f" (only on one side: {', '.join(differing) or 'the containers'}).",
            path=differing[0] if differing else None,
            remedy="return the same tree for every row from .map.",
        )


class Stack:
    """A batch in the making.

    Args:
        stacker: What its rows look like.
        num_rows: How many there will be.
    """

    def __init__(self, stacker: RowStacker, num_rows: int):
        self._stacker, self._num_rows = stacker, num_rows
        self._arrays = [empty((num_rows, *like.shape), like.dtype) for like in stacker.likes]
        self._texts: dict[int, list[Any]] = {
            i: [None] * num_rows for i, like in enumerate(stacker.likes) if is_text(like)
        }

    def write(self, rows: Sequence[Any], start: int, origins: Iterable[Any]) -> None:
        """Writes some rows; several threads may, each its own.

        Args:
            rows: Trees of arrays and scalars; each must look like the others.
            start: Which row of the batch the first of them is.
            origins: Where each comes from, for messages.
        """
        leaves, width = self._stacker.leaves_of(rows, origins), len(self._arrays)
        stop = start + len(rows)
        for i, array in enumerate(self._arrays):
            column = leaves[i::width]
            self._stacker.check(i, column, origins)
            if i in self._texts:
                self._texts[i][start:stop] = column
            elif array.ndim > 1:
                # Not np.stack, which makes a view of each row first.
                part = array[start:stop]
                joined = part.reshape(len(part) * part.shape[1], *part.shape[2:])
                np.concatenate(column, out=joined)
            else:
                array[start:stop] = column

    def batch(self) -> Batch:
        """The rows, once all are written, as a tree of arrays ``[num_rows, ...]``.

        Nothing else refers to them.
        """
        arrays = list(self._arrays)
        for i, texts in self._texts.items():
            arrays[i] = np.stack(texts) if texts else arrays[i]
        return self._stacker.structure.unflatten(arrays)
