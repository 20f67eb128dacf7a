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

from grain_shard.digest import MANY_DIGITS, element_digest
from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.sharding.layout import BatchLayout, describe_parts
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import check_fits, check_held
from grain_shard.trees import Batch, FlatBatch


class _Leaf(NamedTuple):
    """The placement of one leaf, in host batches of one size.

    Attributes:
        path: Path in the batch.
        sharding: None if the leaf stays on the host.
        dtype: The given dtype.
        shape: Shape in a host batch, ``[host_batch_size, ...]``.
        cut: The same shape, in microbatches if there are some.
        global_shape: Shape of the global array.
    """

    path: str
    sharding: Sharding | None
    dtype: np.dtype
    shape: tuple[int, ...]
    cut: tuple[int, ...]
    global_shape: tuple[int, ...]

    def fits(self, array: np.ndarray) -> bool:
        """Returns True if the array is like this leaf; the widths of texts may differ."""
        same_dtype = self.sharding is None or array.dtype == self.dtype
        return same_dtype and array.shape == self.shape


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
        self._is_padding, self._host_batch_sizes = is_padding, host_batch_sizes
        self.digest = ""  # of this host's rows of the first batch, unless all are padding
        self._structure: Any = None  # of the first batch
        self._leaves: list[_Leaf] = []  # of the first batch
        # By the number of rows in a host batch. Made once: a batch of twenty leaves would take a
        # twentieth longer if each batch computed its shapes anew.
        self._leaves_by_rows: dict[int, list[_Leaf]] = {}

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
        leaves = self._leaves_by_rows.get(rows, self._leaves)
        pairs = list(zip(leaves, arrays, strict=False))
        if structure != self._structure or not all(leaf.fits(array) for leaf, array in pairs):
            self._refuse(batch, leaves)
        return structure.unflatten([self._place(leaf, array) for leaf, array in pairs])

    def abstract(self, batch: Batch, final: ShardingTree | None = None) -> Batch:
        """Returns the result of a call, with a `jax.ShapeDtypeStruct` for each `jax.Array`.

        Args:
            batch: As for a call.
            final: The shardings to which the devices move the result of a call, if they do.

        Raises:
            ShardingError: The batch does not fit its shardings.
        """
        on_host, structure = jax.tree.flatten(self._learn(batch))
        shardings = (final or self._shardings).match(structure.unflatten(on_host))
        return structure.unflatten(
            [
                array
                if sharding is None
                else jax.ShapeDtypeStruct(
                    leaf.global_shape,
                    jax.dtypes.canonicalize_dtype(leaf.dtype),
                    sharding=sharding,
                )
                for array, leaf, sharding in zip(on_host, self._leaves, shardings, strict=True)
            ]
        )

    def _place(self, leaf: _Leaf, rows: np.ndarray) -> jax.Array | np.ndarray:
        array = rows.reshape(leaf.cut)
        if leaf.sharding is None:
            return array
        layout, global_shape, shard = self._layout, leaf.global_shape, array.__getitem__
        check_held(
            leaf.path, rows, lambda row: layout.rows(layout.global_batch_size(len(rows)))[row]
        )
        if global_shape and len(layout.shards) < layout.divisor:
            shard = lambda index: array[self._host_index(index, global_shape)]  # noqa: E731
        return jax.make_array_from_callback(global_shape, leaf.sharding, shard)

    def _shape(self, shape: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
        """Returns a leaf's shape if it has `num_rows` rows, local or global, in microbatches."""
        count = self._shardings.microbatches
        rows = (num_rows,) if count is None else (count, num_rows // count)
        return (*rows, *shape[1:]) if shape else ()

    def _host_index(self, index: Any, global_shape: tuple[int, ...]) -> Any:
        """Returns the index, in this host's array, of a shard of the global array."""
        dim = 0 if self._shardings.microbatches is None else 1  # the dim of the rows
        first, stop, _ = index[dim].indices(global_shape[dim])
        start = self._layout.host_row(first, global_shape[dim])
        return (*index[:dim], slice(start, start + stop - first), *index[dim + 1 :])

    def _learn(self, batch: Batch) -> Batch:
        """Learns the leaves of the first batch, and returns the batch cut into microbatches."""
        flat = FlatBatch.of(batch)
        if flat.rows % (len(self._layout.shards) * self._layout.microbatches):
            parts = describe_parts(len(self._layout.shards), self._layout.microbatches)
            flat.refuse(
                f"the {flat.rows} rows of this host do not split into its {parts}.",
                remedy=f"put PadToDivisible({self._layout.multiple}) and ShardBatch before"
                " DevicePut.",
            )
        arrays = [array.reshape(self._shape(array.shape, flat.rows)) for array in flat.arrays]
        cut = flat.structure.unflatten(arrays)
        shardings = self._shardings.match(cut)
        for rows in {flat.rows, *self._host_batch_sizes}:
            self._leaves_by_rows[rows] = [
                _Leaf(
                    path,
                    sharding,
                    array.dtype,
                    (rows, *array.shape[1:])[: array.ndim],
                    self._shape(array.shape, rows),
                    self._shape(array.shape, self._layout.global_batch_size(rows)),
                )
                for path, array, sharding in zip(flat.paths, flat.arrays, shardings, strict=True)
            ]
        leaves = self._leaves_by_rows[flat.rows]
        for leaf, array in zip(leaves, flat.arrays, strict=True):
            if leaf.sharding is not None:
                check_fits(leaf.path, array, leaf.sharding, leaf.global_shape)
        if self._is_padding is not None and not self._is_padding(flat):
            self.digest = element_digest(flat.arrays, MANY_DIGITS)
        self._structure, self._leaves = flat.structure, leaves
        return cut

    def describe(self) -> dict[str, str]:
        """Returns the global shape, dtype and spec of the first batch's leaves, by path."""
        return {
            leaf.path: describe_leaf(jax.ShapeDtypeStruct(leaf.global_shape, leaf.dtype))
            + (f" {leaf.sharding.spec}" if isinstance(leaf.sharding, NamedSharding) else "")
            for leaf in self._leaves
            if leaf.sharding is not None
        }

    def _refuse(self, batch: Batch, leaves: Sequence[_Leaf]) -> None:
        flat = FlatBatch.of(batch)
        path = min({leaf.path for leaf in leaves} ^ set(flat.paths), default=None)
        problem, unlike = "the batch has another tree structure than the first batch.", None
        if flat.structure == self._structure:
            pairs = zip(leaves, flat.arrays, strict=True)
            leaf, unlike = next(pair for pair in pairs if not pair[0].fits(pair[1]))
            path, before = leaf.path, describe_leaf(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
            problem = f"the leaf was {before} in the first batch of this host, and has changed."
        raise ShardingError(
            problem,
            path=path,
            leaf=None if unlike is None else describe_leaf(unlike),
            mesh_axes=self.mesh_axes,
            remedy="give all batches one tree, and each leaf one shape and dtype, so that a step"
            " compiles once.",
        )
