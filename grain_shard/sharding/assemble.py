"""From this host's rows to global `jax.Array`s, without a word to any other host.

`jax.device_put` of host data onto a sharding that spans processes compares the data across them,
which is a collective and in a background thread a hang. `jax.make_array_from_callback` with the
global shape given asks for the shards of this process's devices, one by one, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import check_fits
from grain_shard.trees import Batch, FlatBatch


class _Leaf(NamedTuple):
    """How one leaf is placed; its sharding is None if it stays on the host."""

    path: str
    sharding: Sharding | None
    host_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    dtype: np.dtype

    def alike(self, array: np.ndarray) -> bool:
        same_dtype = self.sharding is None or array.dtype == self.dtype  # text has its own widths
        return same_dtype and array.shape == self.host_shape

    def resized(self, host_rows: int, global_rows: int) -> _Leaf:
        """The leaf in a batch of another size; a scalar has no rows."""
        if not self.host_shape:
            return self
        return self._replace(
            host_shape=(host_rows, *self.host_shape[1:]),
            global_shape=(global_rows, *self.global_shape[1:]),
        )


class Assembler:
    """Places one batch after another, all of them like the first, but for the rows if that is said.

    Args:
        shardings: Of the leaves.
        layout: Which rows of the global batch this host passes.
        is_padding: If a digest of the first batch is wanted, to be compared with other hosts':
            whether a batch is all padding, which is the same everywhere.
        host_batch_sizes: If batches are of several sizes, all of them, in rows of this host.
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
        self.mesh_axes = shardings.mesh_axes
        self._structure: Any = None
        self._is_padding, self._host_batch_sizes = is_padding, host_batch_sizes
        self.digest = ""  # of this host's rows of the first batch, if any row is real
        self._leaves: list[_Leaf] = []  # of the first batch
        self._leaves_of_size: dict[int, list[_Leaf]] = {}

    def __call__(self, batch: Batch) -> Batch:
        """The global batch.

        Args:
            batch: A tree of numpy arrays ``[host_batch_size, ...]`` and scalars. The arrays must
                never be written to again: JAX's CPU backend may use their memory as it is, and
                ``may_alias=False`` does not keep it from that (jax#38086).

        Returns:
            The tree with `jax.Array` leaves ``[global_batch_size, ...]``; text stays as it is.

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
        placed = [
            array if leaf.sharding is None else self._place(array, leaf.global_shape, leaf.sharding)
            for array, leaf in zip(arrays, leaves, strict=True)
        ]
        return structure.unflatten(placed)

    def abstract(self, batch: Batch) -> Batch:
        """What a call would return, with a `jax.ShapeDtypeStruct` in place of each `jax.Array`.

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
                value
                if leaf.sharding is None
                else jax.ShapeDtypeStruct(
                    leaf.global_shape,
                    jax.dtypes.canonicalize_dtype(leaf.dtype),
                    sharding=leaf.sharding,
                )
                for value, leaf in zip(values, self._leaves, strict=True)
            ]
        )

    def _place(
        self, array: np.ndarray, global_shape: tuple[int, ...], sharding: Sharding
    ) -> jax.Array:
        def shard(index: tuple[slice, ...] | None) -> np.ndarray:
            return array[self._host_index(index, global_shape)]

        return jax.make_array_from_callback(global_shape, sharding, shard)

    def _host_index(self, index: Any, global_shape: tuple[int, ...]) -> Any:
        """Where a shard of the global array lies in what this host holds."""
        if self._layout.holds_all or not global_shape:
            return index
        first, stop, _ = index[0].indices(global_shape[0])
        start = self._layout.host_row(first, global_shape[0])
        return (slice(start, start + stop - first), *index[1:])

    def _learn(self, batch: Batch) -> None:
        flat = FlatBatch.of(batch)
        global_rows = self._layout.global_batch_size(flat.rows)
        shardings = self._shardings.match(flat.structure.unflatten(flat.arrays))
        if len(self._layout.rows(global_rows)) != flat.rows:
            flat.refuse(
                f"the host's {flat.rows} rows do not split into its"
                f" {len(self._layout.shards)} shards.",
                remedy=f"put PadToDivisible({self._layout.divisor}) and ShardBatch before it.",
            )
        for path, array, sharding in zip(flat.paths, flat.arrays, shardings, strict=True):
            shape = (global_rows, *array.shape[1:]) if array.ndim else ()
            if sharding is not None:
                check_fits(path, array, sharding, shape)
            self._leaves.append(_Leaf(path, sharding, array.shape, shape, array.dtype))
        for rows in self._host_batch_sizes:
            global_rows = self._layout.global_batch_size(rows)
            self._leaves_of_size[rows] = [leaf.resized(rows, global_rows) for leaf in self._leaves]
        if self._is_padding is not None and not self._is_padding(flat):
            self.digest = flat.digest()
        self._structure = flat.structure

    def describe(self) -> dict[str, str]:
        """Every leaf of the first batch: its global shape, dtype and spec, by its path."""
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
                    f"the first batch had {leaf.dtype}[{', '.join(map(str, leaf.host_shape))}]"
                    " here, on this host.",
                    path=leaf.path,
                    leaf=describe_leaf(array),
                    mesh_axes=self.mesh_axes,
                    remedy=remedy,
                )
