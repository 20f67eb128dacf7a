"""Global `jax.Array`s from this host's rows, without communication with other hosts.

`jax.device_put` of host data onto a sharding that spans processes compares the data across them.
That is a collective, which hangs in a background thread. `jax.make_array_from_callback` with the
global shape asks only for the shards of this process's devices, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.sharding.layout import BatchLayout, describe_parts
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import check_fits, check_held
from grain_shard.trees import Batch, FlatBatch


class _Leaf(NamedTuple):
    """The placement of one leaf.

    Attributes:
        path: Path in the batch.
        sharding: None if the leaf stays on the host.
        given_shape: Shape in a host's batch, ``[host_batch_size, ...]``.
        host_shape: `given_shape` with an axis for the microbatches, if there are any.
        global_shape: Shape with the rows of all hosts.
        dtype: The given dtype.
    """

    path: str
    sharding: Sharding | None
    given_shape: tuple[int, ...]
    host_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: np.dtype

    def alike(self, array: np.ndarray) -> bool:
        same_dtype = self.sharding is None or array.dtype == self.dtype  # text widths may differ
        return same_dtype and array.shape == self.given_shape


class Assembler:
    """Places batches one after another. All must be like the first; `host_batch_sizes` may differ.

    Args:
        shardings: Shardings of the leaves.
        layout: The rows of the global batch that this host passes.
        is_padding: Returns True for a batch that is all padding, which is the same on all hosts.
            If given, a digest of the first batch is made, to compare it between hosts.
        host_batch_sizes: All batch sizes, in rows of this host, if there are several.
    """

    def __init__(
        self,
        shardings: ShardingTree,
        layout: BatchLayout,
        *,
        is_padding: Callable[[FlatBatch], bool] | None = None,
        host_batch_sizes: Sequence[int] = (),
    ):
        self._shardings, self._layout = shardings, layout
        self.mesh_axes: tuple[tuple[str, int], ...] = shardings.mesh_axes
        self._structure: Any = None
        self._is_padding, self._host_batch_sizes = is_padding, host_batch_sizes
        self.digest = ""  # of this host's rows of the first batch, unless all are padding
        self._leaves: list[_Leaf] = []  # of the first batch
        self._leaves_of_size: dict[int, list[_Leaf]] = {}

    def __call__(self, batch: Batch) -> Batch:
        """Returns the global batch.

        Args:
            batch: A tree of numpy arrays ``[host_batch_size, ...]`` and scalars. The arrays must
                never be written to again: JAX's CPU backend may use their memory without a copy,
                and ``may_alias=False`` does not prevent that (jax#38086).

        Returns:
            The tree with `jax.Array` leaves ``[global_batch_size, ...]``; text stays on the host.
            With microbatches, leaves are ``[microbatches, rows of one microbatch, ...]``.

        Raises:
            ShardingError: The batch does not fit its shardings, or is unlike the first one.
        """
        if self._structure is None:
            self._learn(batch)
        values, structure = jax.tree.flatten(batch)
        arrays = [np.asarray(value) for value in values]
        rows = next((array.shape[0] for array in arrays if array.ndim), 0)
        leaves = self._leaves_of_size.get(rows, self._leaves)
        if structure != self._structure or not all(
            leaf.alike(array) for leaf, array in zip(leaves, arrays, strict=True)
        ):
            self._refuse(batch, leaves)
        placed = [self._place(array, leaf) for array, leaf in zip(arrays, leaves, strict=True)]
        return structure.unflatten(placed)

    def abstract(self, batch: Batch) -> Batch:
        """Returns the result of a call, with a `jax.ShapeDtypeStruct` for each `jax.Array`.

        Args:
            batch: As for a call.

        Raises:
            ShardingError: The batch does not fit its shardings.
        """
        if self._structure is None:
            self._learn(batch)
        values, structure = jax.tree.flatten(batch)
        return structure.unflatten(
            [
                np.reshape(value, leaf.host_shape)
                if leaf.sharding is None
                else jax.ShapeDtypeStruct(
                    leaf.global_shape,
                    jax.dtypes.canonicalize_dtype(leaf.dtype),
                    sharding=leaf.sharding,
                )
                for value, leaf in zip(values, self._leaves, strict=True)
            ]
        )

    def _place(self, rows: np.ndarray, leaf: _Leaf) -> jax.Array | np.ndarray:
        array = rows.reshape(leaf.host_shape)
        if leaf.sharding is None:
            return array
        layout = self._layout
        check_held(
            leaf.path, rows, lambda row: layout.rows(layout.global_batch_size(len(rows)))[row]
        )
        global_shape, shard = leaf.global_shape, array.__getitem__
        if global_shape and not layout.holds_all:
            shard = lambda index: array[self._host_index(index, global_shape)]  # noqa: E731
        return jax.make_array_from_callback(global_shape, leaf.sharding, shard)

    def _host_index(self, index: Any, global_shape: tuple[int, ...]) -> Any:
        """Returns the index, in this host's array, of a shard of the global array."""
        dim = 0 if self._shardings.microbatches is None else 1  # the dim of the rows
        first, stop, _ = index[dim].indices(global_shape[dim])
        start = self._layout.host_row(first, global_shape[dim])
        return (*index[:dim], slice(start, start + stop - first), *index[dim + 1 :])

    def _leaf(
        self, path: str, sharding: Sharding | None, array: np.ndarray, host_rows: int
    ) -> _Leaf:
        """Returns the placement of a leaf, in a batch with `host_rows` rows of this host."""
        given_shape = (host_rows, *array.shape[1:]) if array.ndim else ()
        host_shape = self._shape(host_rows, array)
        global_shape = self._shape(self._layout.global_batch_size(host_rows), array)
        return _Leaf(path, sharding, given_shape, host_shape, global_shape, array.dtype)

    def _shape(self, num_rows: int, array: np.ndarray) -> tuple[int, ...]:
        """Returns the shape of a leaf that is handed out with `num_rows` rows, local or global."""
        count = self._shardings.microbatches
        rows = (num_rows,) if count is None else (count, num_rows // count)
        return (*rows, *array.shape[1:]) if array.ndim else ()

    def _learn(self, batch: Batch) -> None:
        flat = FlatBatch.of(batch)
        if flat.rows % (len(self._layout.shards) * self._layout.microbatches):
            parts = describe_parts(len(self._layout.shards), self._layout.microbatches)
            flat.refuse(
                f"the host's {flat.rows} rows do not split into its {parts}.",
                remedy=f"put PadToDivisible({self._layout.multiple}) and ShardBatch before it.",
            )
        arrays = [array.reshape(self._shape(flat.rows, array)) for array in flat.arrays]
        shardings = self._shardings.match(flat.structure.unflatten(arrays))
        for path, array, sharding in zip(flat.paths, flat.arrays, shardings, strict=True):
            leaf = self._leaf(path, sharding, array, flat.rows)
            if sharding is not None:
                check_fits(path, array, sharding, leaf.global_shape)
            self._leaves.append(leaf)
        for rows in self._host_batch_sizes:
            self._leaves_of_size[rows] = [
                self._leaf(path, sharding, array, rows)
                for path, array, sharding in zip(flat.paths, flat.arrays, shardings, strict=True)
            ]
        if self._is_padding is not None and not self._is_padding(flat):
            self.digest = flat.digest()
        self._structure = flat.structure

    def describe(self) -> dict[str, str]:
        """Returns the global shape, dtype and spec of the first batch's leaves, by path."""
        return {
            leaf.path: f"{leaf.dtype}[{', '.join(map(str, leaf.global_shape))}]"
            + (f" {leaf.sharding.spec}" if isinstance(leaf.sharding, NamedSharding) else "")
            for leaf in self._leaves
            if leaf.sharding is not None
        }

    def _refuse(self, batch: Batch, leaves: Sequence[_Leaf]) -> None:
        flat = FlatBatch.of(batch)
        remedy = "give all batches one tree, one shape and one dtype, so that a step compiles once."
        if flat.structure != self._structure:
            before = {leaf.path for leaf in self._leaves}
            path = min(before ^ set(flat.paths), default=None)
            raise ShardingError(
                "the batch is another tree than the first one.",
                path=path,
                mesh_axes=self.mesh_axes,
                remedy=remedy,
            )
        for leaf, array in zip(leaves, flat.arrays, strict=True):
            if not leaf.alike(array):
                raise ShardingError(
                    f"the first batch had {leaf.dtype}[{', '.join(map(str, leaf.given_shape))}]"
                    " here, on this host.",
                    path=leaf.path,
                    leaf=describe_leaf(array),
                    mesh_axes=self.mesh_axes,
                    remedy=remedy,
                )
