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
    """The placement of one leaf.

    Attributes:
        path: Path in the batch.
        sharding: None if the leaf stays on the host.
        shape: Shape in the first batch of this host, ``[host_batch_size, ...]``.
        dtype: The given dtype.
    """

    path: str
    sharding: Sharding | None
    shape: tuple[int, ...]
    dtype: np.dtype

    def alike(self, array: np.ndarray, num_rows: int) -> bool:
        same_dtype = self.sharding is None or array.dtype == self.dtype  # text widths may differ
        return same_dtype and array.shape == (num_rows, *self.shape[1:])[: len(self.shape)]


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
        # The structure, leaves and rows of the first batch.
        self._structure: Any = None
        self._leaves: list[_Leaf] = []
        self._num_rows = 0

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
        if rows not in self._host_batch_sizes:
            rows = self._num_rows
        pairs = list(zip(self._leaves, arrays, strict=False))
        if structure != self._structure or not all(
            leaf.alike(array, rows) for leaf, array in pairs
        ):
            self._refuse(batch, rows)
        return structure.unflatten([self._place(leaf, array, rows) for leaf, array in pairs])

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
                    self._global_shape(leaf.shape, self._num_rows),
                    jax.dtypes.canonicalize_dtype(leaf.dtype),
                    sharding=sharding,
                )
                for array, leaf, sharding in zip(on_host, self._leaves, shardings, strict=True)
            ]
        )

    def _place(self, leaf: _Leaf, rows: np.ndarray, num_rows: int) -> jax.Array | np.ndarray:
        array = rows.reshape(self._shape(leaf.shape, num_rows))
        if leaf.sharding is None:
            return array
        layout = self._layout
        check_held(
            leaf.path, rows, lambda row: layout.rows(layout.global_batch_size(num_rows))[row]
        )
        global_shape, shard = self._global_shape(leaf.shape, num_rows), array.__getitem__
        if global_shape and len(layout.shards) < layout.divisor:
            shard = lambda index: array[self._host_index(index, global_shape)]  # noqa: E731
        return jax.make_array_from_callback(global_shape, leaf.sharding, shard)

    def _shape(self, shape: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
        """Returns a leaf's shape if it has `num_rows` rows, local or global, in microbatches."""
        count = self._shardings.microbatches
        rows = (num_rows,) if count is None else (count, num_rows // count)
        return (*rows, *shape[1:]) if shape else ()

    def _global_shape(self, shape: tuple[int, ...], num_rows: int) -> tuple[int, ...]:
        return self._shape(shape, self._layout.global_batch_size(num_rows))

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
                f"the host's {flat.rows} rows do not split into its {parts}.",
                remedy=f"put PadToDivisible({self._layout.multiple}) and ShardBatch before it.",
            )
        arrays = [array.reshape(self._shape(array.shape, flat.rows)) for array in flat.arrays]
        cut = flat.structure.unflatten(arrays)
        self._leaves = []
        for path, array, sharding in zip(
            flat.paths, flat.arrays, self._shardings.match(cut), strict=True
        ):
            if sharding is not None:
                check_fits(path, array, sharding, self._global_shape(array.shape, flat.rows))
            self._leaves.append(_Leaf(path, sharding, array.shape, array.dtype))
        if self._is_padding is not None and not self._is_padding(flat):
            self.digest = element_digest(flat.arrays, MANY_DIGITS)
        self._structure, self._num_rows = flat.structure, flat.rows
        return cut

    def describe(self) -> dict[str, str]:
        """Returns the global shape, dtype and spec of the first batch's leaves, by path."""
        return {
            leaf.path: describe_leaf(
                jax.ShapeDtypeStruct(self._global_shape(leaf.shape, self._num_rows), leaf.dtype)
            )
            + (f" {leaf.sharding.spec}" if isinstance(leaf.sharding, NamedSharding) else "")
            for leaf in self._leaves
            if leaf.sharding is not None
        }

    def _refuse(self, batch: Batch, num_rows: int) -> None:
        flat = FlatBatch.of(batch)
        path = min({leaf.path for leaf in self._leaves} ^ set(flat.paths), default=None)
        problem, unlike = "the batch is another tree than the first one.", None
        if flat.structure == self._structure:
            pairs = zip(self._leaves, flat.arrays, strict=True)
            leaf, unlike = next(pair for pair in pairs if not pair[0].alike(pair[1], num_rows))
            path, shape = leaf.path, (num_rows, *leaf.shape[1:])[: len(leaf.shape)]
            before = describe_leaf(jax.ShapeDtypeStruct(shape, leaf.dtype))
            problem = f"the first batch had {before} here, on this host."
        raise ShardingError(
            problem,
            path=path,
            leaf=None if unlike is None else describe_leaf(unlike),
            mesh_axes=self.mesh_axes,
            remedy="give all batches one tree, one shape and one dtype, so that a step compiles"
            " once.",
        )
