"""`ShardByMesh`: the slice of a source that a host reads, which depends on the rows it holds."""

from __future__ import annotations

from typing import Any

import grain

from grain_shard.errors import ShardingError
from grain_shard.sharding.sharding_tree import ShardingTree


class ShardByMesh(grain.sharding.ShardOptions):
    """The slice of a source for this host, in place of `grain.sharding.ShardByJaxProcess`.

    A slice is a part of the source's records. If a model or sequence axis spans several hosts, they
    hold the same rows and get the same slice. `ShardByJaxProcess` would give each of these hosts a
    slice of its own, by process index, and the model would train on wrong data.

    Example:
        >>> import jax
        >>> options = ShardByMesh(jax.make_mesh((1,), ("data",), devices=jax.devices()[:1]))
        >>> options.shard_index, options.shard_count
        (0, 1)

    Args:
        mesh_or_sharding: As for `shard_to`: a `Mesh`, a `Sharding`, a device, or a tree prefix of
            shardings. None takes the mesh of `jax.set_mesh`.
        spec: As for `shard_to`: a `PartitionSpec` or a tree prefix of them.
        drop_remainder: True drops the last records of the source, so that every slice has the same
            number of records.

    Raises:
        ShardingError: Two hosts share some of their rows, but not all, so no slice fits both.
    """

    def __init__(
        self, mesh_or_sharding: Any = None, spec: Any = None, drop_remainder: bool = False
    ):
        target = ShardingTree.of(mesh_or_sharding, spec)
        layouts = target.layouts()
        slices = sorted({layout.shards for layout in layouts.values()})
        # Two different slices must have no shard in common. Then all slices together have as many
        # shards as a batch: the `divisor`, which all layouts share.
        if sum(map(len, slices)) != next(iter(layouts.values())).divisor:
            raise ShardingError(
                "two hosts share some of their rows, but not all. So the source cannot be cut into"
                " slices for the hosts.",
                mesh_axes=target.mesh_axes,
                remedy="order the mesh's devices so that any two hosts hold either the same rows or"
                ' no row in common. Or let every host read all rows, and pass rows="global" to'
                " .shard_to.",
            )
        super().__init__(
            shard_index=slices.index(target.layout().shards),
            shard_count=len(slices),
            drop_remainder=drop_remainder,
        )
