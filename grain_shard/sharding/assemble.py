"""Global `jax.Array`s from this host's rows, without communication with other hosts.

`jax.device_put` of host data onto a sharding that spans processes compares the data of all these
processes. That is a collective, which may hang in a background thread. So this module calls
`jax.make_array_from_callback`, which takes the global shape and asks only for the shards of this
process's devices, one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from jax.sharding import NamedSharding, Sharding

from grain_shard.digest import element_digest
from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import check_fits, check_held
from grain_shard.trees import Batch, FlatBatch


class _Leaf(NamedTuple):
    """The path, sharding, dtype and shapes of one leaf, for host batches of one size.

    Attributes:
        path: Path in the batch, e.g. ``batch['tokens']``.
        sharding: Sharding of the global array; None for text, which stays on the host.
        dtype: Dtype of the numpy array in a host batch. JAX may convert it, e.g. to 32 bits.
        shape: Shape in a host batch: ``[host_batch_size, ...]``, or () for a scalar.
        global_shape: Shape of the global array.
    """

    path: str
    sharding: Sharding | None
    dtype: np.dtype
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]

    def fits(self, array: np.ndarray) -> bool:
        """Returns True if an array of a host batch has the dtype and the shape of this leaf.

        Any dtype fits a text leaf, because text arrays may differ in width (<U5, <U7).
        """
        same_dtype = self.sharding is None or array.dtype == self.dtype
        return same_dtype and array.shape == self.shape


class Assembler:
    """Makes global batches of `jax.Array`s from this host's batches.

    All batches must have the tree, shapes and dtypes of the first one. Only the number of rows may
    differ, if `host_batch_sizes` lists several.

    Args:
        shardings: Shardings of the leaves.
        layout: The rows of the global batch that this host holds.
        is_padding: Returns True if all rows of a host batch are padding. Such a batch gets no
            `digest`, because it is the same on all hosts. None for no digest at all.
        host_batch_sizes: Every allowed number of rows of a host batch. () allows only the number of
            the first batch.
        to_devices: False checks the batches, and leaves them on the host as NumPy arrays.
    """

    def __init__(
        self,
        shardings: ShardingTree,
        layout: BatchLayout,
        *,
        is_padding: Callable[[FlatBatch], bool] | None = None,
        host_batch_sizes: Sequence[int] = (),
        to_devices: bool = True,
    ):
        self._shardings, self._layout, self._to_devices = shardings, layout, to_devices
        self.mesh_axes: tuple[tuple[str, int], ...] = shardings.mesh_axes
        self._is_padding, self._host_batch_sizes = is_padding, host_batch_sizes
        # A digest of this host's first batch, which hosts compare. It is "" before that batch,
        # without `is_padding`, and if all rows of the batch are padding.
        self.digest = ""
        # The tree structure and the leaves of the first batch.
        self._structure: Any = None
        self._leaves: list[_Leaf] = []
        # The leaves by the number of rows in a host batch. Computing the shapes of twenty leaves
        # anew for each batch would take 5 % longer.
        self._leaves_by_rows: dict[int, list[_Leaf]] = {}

    @jax.transfer_guard_host_to_device("allow")  # placing a batch is an explicit transfer
    def __call__(self, batch: Batch) -> Batch:
        """Returns the global batch that this host's batch is a part of.

        Args:
            batch: A tree of numpy arrays ``[host_batch_size, ...]`` and scalars. The arrays must
                never be written to again: JAX's CPU backend may use their memory without a copy,
                and ``may_alias=False`` does not prevent that (jax#38086).

        Returns:
            The same tree with `jax.Array` leaves ``[global_batch_size, ...]``. Text leaves stay
            numpy arrays with this host's rows.

        Raises:
            ShardingError: The batch does not fit its shardings, or its tree, shapes or dtypes
                differ from the first batch.
        """
        if self._structure is None:
            self._learn(batch)
        values, structure = jax.tree.flatten(batch)
        arrays = [np.asarray(value) for value in values]
        rows = next((array.shape[0] for array in arrays if array.ndim), 0)
        leaves = self._leaves_by_rows.get(rows, self._leaves)
        if structure != self._structure or not all(map(_Leaf.fits, leaves, arrays)):
            self._refuse(batch, leaves)
        return structure.unflatten([*map(self._put, leaves, arrays)])

    def abstract(self, batch: Batch, final: ShardingTree | None = None) -> Batch:
        """Returns the global batch of a host batch, with a `jax.ShapeDtypeStruct` per `jax.Array`.

        The given batch then counts as the first batch: later batches must have its tree, shapes and
        dtypes.

        Args:
            batch: A host batch: a tree of numpy arrays ``[host_batch_size, ...]`` and scalars.
            final: Shardings to which the devices move the global batch afterwards; None if they do
                not move it.

        Raises:
            ShardingError: The batch does not fit its shardings.
        """
        on_host, structure = jax.tree.flatten(self._learn(batch))
        shardings = (final or self._shardings).match(structure.unflatten(on_host))

        def on_devices(array: np.ndarray, leaf: _Leaf, sharding: Sharding | None) -> Any:
            if sharding is None:
                return array
            if not self._to_devices:
                return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
            return jax.ShapeDtypeStruct(leaf.global_shape, dtype, sharding=sharding)

        return structure.unflatten(map(on_devices, on_host, self._leaves, shardings))

    def _put(self, leaf: _Leaf, rows: np.ndarray) -> jax.Array | np.ndarray:
        """Returns the global array of a leaf, given this host's rows of it.

        Text, and every leaf if `to_devices` is False, is returned as it is.
        """
        if leaf.sharding is None:
            return rows
        layout, global_shape = self._layout, leaf.global_shape
        check_held(
            leaf.path, rows, lambda row: layout.rows(layout.global_batch_size(len(rows)))[row]
        )
        if not self._to_devices:
            return rows
        # JAX asks for each shard by its slices in the global array. They are also its slices in
        # `rows` if this host holds the whole batch.
        read_shard = rows.__getitem__
        if global_shape and len(layout.shards) < layout.divisor:
            read_shard = lambda index: rows[self._host_index(index, global_shape)]  # noqa: E731
        return jax.make_array_from_callback(global_shape, leaf.sharding, read_shard)

    def _host_index(self, index: Any, global_shape: tuple[int, ...]) -> Any:
        """Returns the slices of this host's array that hold one shard of the global array.

        Args:
            index: The slices of the shard in the global array, one per dim.
            global_shape: Shape of the global array.
        """
        first, stop, _ = index[0].indices(global_shape[0])
        start = self._layout.host_row(first, global_shape[0])
        return (slice(start, start + stop - first), *index[1:])

    def _learn(self, batch: Batch) -> Batch:
        """Stores the structure, the leaves and the digest of the first batch.

        `_leaves_by_rows` gets the leaves for each number of rows that a host batch may have.

        Returns:
            The batch as numpy arrays.

        Raises:
            ShardingError: The batch does not split into this host's shards, or a leaf does not fit
                its sharding.
        """
        flat = FlatBatch.of(batch)
        if flat.rows % len(self._layout.shards):
            flat.refuse(
                f"the {flat.rows} rows of this host do not split into its"
                f" {len(self._layout.shards)} shards.",
                remedy=f"put PadToDivisible({self._layout.divisor}) and ShardBatch before"
                " DevicePut.",
            )
        arrays = flat.structure.unflatten(flat.arrays)
        shardings = self._shardings.match(arrays)
        # `[: array.ndim]` leaves () of the shape of a scalar, which has no rows.
        for rows in {flat.rows, *self._host_batch_sizes}:
            self._leaves_by_rows[rows] = [
                _Leaf(
                    path,
                    sharding,
                    array.dtype,
                    (rows, *array.shape[1:])[: array.ndim],
                    (self._layout.global_batch_size(rows), *array.shape[1:])[: array.ndim],
                )
                for path, array, sharding in zip(flat.paths, flat.arrays, shardings, strict=True)
            ]
        leaves = self._leaves_by_rows[flat.rows]
        for leaf in leaves:
            check_fits(leaf.path, leaf.dtype, leaf.sharding, leaf.global_shape)
        # A batch that is all padding is the same on all hosts, so a digest of it proves nothing.
        if self._is_padding is not None and not self._is_padding(flat):
            self.digest = element_digest(flat.arrays)
        if text := [leaf.path for leaf in leaves if leaf.sharding is None]:
            # Logged once, not in each epoch. Otherwise an error of jax.jit would be the first sign.
            logging.log_first_n(
                logging.WARNING,
                "grain_shard: %s holds text, which stays on the host as a NumPy array of this"
                " host's rows. jax.jit takes no text: take it out of the batch before a step.",
                1,
                ", ".join(text),
            )
        self._structure, self._leaves = flat.structure, leaves
        return arrays

    def describe(self) -> dict[str, str]:
        """Returns the global shape, dtype and spec of the first batch's leaves, as text by path.

        Leaves that stay on the host are left out.
        """
        return {
            leaf.path: describe_leaf(jax.ShapeDtypeStruct(leaf.global_shape, leaf.dtype))
            + (f" {leaf.sharding.spec}" if isinstance(leaf.sharding, NamedSharding) else "")
            for leaf in self._leaves
            if leaf.sharding is not None
        }

    def _refuse(self, batch: Batch, leaves: Sequence[_Leaf]) -> None:
        """Raises the error for a batch whose structure, or a leaf, differs from the first batch."""
        flat = FlatBatch.of(batch)
        changed = None  # the leaf that differs, if the tree is the same
        if flat.structure == self._structure:
            pairs = zip(leaves, flat.arrays, strict=True)
            leaf, changed = next(pair for pair in pairs if not pair[0].fits(pair[1]))
            path, before = leaf.path, describe_leaf(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
            problem = f"the leaf was {before} in the first batch of this host, and has changed."
        else:
            only_in_one = {leaf.path for leaf in leaves} ^ set(flat.paths)
            path = min(only_in_one, default=None)
            problem = "the batch has another tree structure than the first batch."
        raise ShardingError(
            problem,
            path=path,
            leaf=None if changed is None else describe_leaf(changed),
            mesh_axes=self.mesh_axes,
            remedy="give all batches the same tree, and each leaf the same shape and dtype in every"
            " batch, so that a training step compiles once.",
        )
