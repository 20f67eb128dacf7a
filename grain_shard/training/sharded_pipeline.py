"""A pipeline from a batch size per device."""

from __future__ import annotations

from typing import Any

import grain
from jax.sharding import Mesh

from grain_shard.errors import require_int
from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.transforms.chain import shard_to


def create_sharded_pipeline(
    source: Any, mesh: Mesh, batch_size_per_device: int = 64
) -> ShardedDataset:
    """A pipeline of global batches that gives every shard the same number of rows, on any mesh.

    On a mesh of one device it is an ordinary loader, so a program needs no second path for it.

    Example:
        >>> import jax
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> for batch in create_sharded_pipeline([{"x": 1}, {"x": 2}, {"x": 3}], mesh, 2):
        ...     print(batch["x"], batch["valid_mask"])
        [1 2] [ True  True]
        [3 0] [ True False]

    Args:
        source: Records by index: a sequence, a Grain source, or a `grain.MapDataset` that shuffles
            and decodes them. Or a stream of them, a `grain.IterDataset`, on one host.
        mesh: The mesh of all processes. Its axis "data", or its only axis, shards the rows.
        batch_size_per_device: Rows of one shard; devices that differ only along other axes hold
            the same rows.

    Returns:
        The result of `shard_to`. The last batch is padded, and each has a ``valid_mask``.

    Raises:
        ShardingError: The mesh has several axes, none of them "data"; there is no record; or a
            stream does not name its rows on each of several hosts (call `shard_to` then).
    """
    require_int("batch_size_per_device", batch_size_per_device, 1)
    if not isinstance(source, grain.MapDataset | grain.IterDataset):
        source = grain.MapDataset.source(source)
    shards = ShardingTree.of(mesh).layout().divisor
    return shard_to(source.batch(batch_size_per_device * shards), mesh)
