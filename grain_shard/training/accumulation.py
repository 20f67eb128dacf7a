"""`microbatches`: cuts a batch inside a training step, to accumulate gradients."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.tree_util import KeyPath

from grain_shard.errors import ShardingError, describe_leaf, require_int
from grain_shard.sharding.layout import round_up
from grain_shard.sharding.specs import num_shards
from grain_shard.trees import Batch, path_of


def microbatches(batch: Batch, n: int) -> Batch:
    """Cuts a batch into microbatches, inside `jax.jit`, for `jax.lax.scan`.

    Microbatch i has the rows i, i + n, i + 2n, ... of the batch. So it has a part of every shard,
    and no row moves to another device.

    Args:
        batch: A tree of arrays ``[rows, ...]`` and scalars, which may have a mask.
        n: Number of microbatches. It must divide the rows of each shard. With Auto axes a jitted
            function does not know the shards. Then only the rows of the batch are checked, and
            devices exchange rows if `n` does not divide the rows of each shard.

    Returns:
        The same tree with arrays ``[n, rows / n, ...]``, whose rows and later dims are sharded as
        before. A scalar is repeated: ``[n]``.

    Raises:
        ShardingError: `n` is not a positive integer, or does not divide the rows of each shard.

    Example:
        >>> batch = {"x": jnp.arange(6), "valid_mask": jnp.arange(6) < 5}
        >>> for name, leaf in jax.jit(microbatches, static_argnums=1)(batch, 2).items():
        ...     print(name, leaf.tolist())
        valid_mask [[True, True, True], [True, True, False]]
        x [[0, 2, 4], [1, 3, 5]]
    """
    require_int("n", n, 1)
    return jax.tree_util.tree_map_with_path(partial(_cut, n), batch)


def _cut(n: int, keys: KeyPath, leaf: Any) -> jax.Array:
    """Cuts one leaf; raises an error if `n` does not divide the rows of each shard."""
    if not jnp.ndim(leaf):
        return jnp.broadcast_to(leaf, (n,))
    rows, *dims = leaf.shape
    sharding = jax.typeof(leaf).sharding
    shards = num_shards(sharding)  # over Explicit axes: under jit a type does not name Auto axes
    if rows % (n * shards):
        mesh = sharding.mesh
        auto_sizes = [
            size
            for size, axis_type in zip(mesh.axis_sizes, mesh.axis_types, strict=True)
            if axis_type == AxisType.Auto
        ]
        # Auto axes may shard the rows, too. So the batch size in the remedy also suits the largest
        # number of shards that Auto axes can make of these rows.
        most_shards = shards * math.gcd(math.prod(auto_sizes), rows // shards)
        in_shards = f" in {shards} shards" if shards > 1 else ""
        raise ShardingError(
            f"{rows} rows{in_shards} do not split into {n} microbatches.",
            path=path_of(keys),
            leaf=describe_leaf(leaf),
            spec=sharding.spec if shards > 1 else None,
            mesh_axes=mesh.shape.items(),
            remedy=f"use a batch size of {round_up(rows, n * most_shards)}, or a number of"
            " microbatches that divides the rows of each shard.",
        )
    # Row i + k * n becomes row k of microbatch i.
    return jnp.moveaxis(leaf.reshape(rows // n, n, *dims), 1, 0)
