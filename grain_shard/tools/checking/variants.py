"""The user's pipeline with other options: other threads, workers, hosts or meshes."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.sharding.layout import BatchLayout, batch_axes
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import num_shards
from grain_shard.transforms.device_put import DevicePut

_MOST_MESHES = 2


def with_options(ds: ShardedDataset, **options: Any) -> ShardedDataset:
    """Returns the same pipeline with other fields of `Settings`."""
    return _placed(ds, ds.parents[0], **options)


def read_alone(ds: ShardedDataset) -> ShardedDataset:
    """Returns the same pipeline, read by one thread of this process, which reads little ahead."""
    few = {"cpu_buffer_size": 1, "device_buffer_size": 1}
    return with_options(ds, num_threads=1, num_workers=0, executor=None, **few)


def of_host(ds: ShardedDataset, layout: BatchLayout) -> ShardedDataset:
    """Returns the pipeline whose `host` has the batches of another host. Do not iterate over it.

    Raises:
        ShardingError: The shards of the layout do not divide the batch.
    """
    return _placed(ds, _kept(ds, layout))


def on_mesh(ds: ShardedDataset, shardings: ShardingTree) -> ShardedDataset:
    """Returns the same pipeline with its batches on another mesh of this process.

    Raises:
        ShardingError: The shards of the mesh do not divide the batch.
    """
    kept = _kept(ds, shardings.layout())
    return read_alone(_placed(ds, kept, shardings=shardings))


def other_meshes(ds: ShardedDataset, batch_rows: int) -> list[ShardingTree]:
    """Returns shardings on other meshes: one with the fewest devices, and one with the most.

    Only the size of the first mesh axis that shards the rows is changed. The result is empty if no
    mesh axis shards the rows, or if this axis also shards another dim.

    Args:
        ds: The pipeline.
        batch_rows: Number of rows of a batch, with padding. All shards must divide it.
    """
    target = ds.shardings
    named = target.named()
    # The first mesh axis that shards the rows of any leaf.
    axis = next((axis for s in named for axis in batch_axes(s.spec)[:1]), None)
    if axis is None or any(axis in jax.tree.leaves(tuple(s.spec)[1:]) for s in named):
        return []
    # If leaves are on different meshes, the mesh with the most shards of the rows counts.
    mesh = cast(Mesh, max(named, key=num_shards).mesh)
    other_axes_size = math.prod(mesh.devices.shape) // mesh.shape[axis]
    devices = jax.local_devices(backend=mesh.devices.flat[0].platform)
    found: list[ShardingTree] = []
    for size in range(1, len(devices) // other_axes_size + 1):
        if size != mesh.shape[axis]:
            moved = _resized(target, axis, size, devices)
            if batch_rows % moved.layout().divisor == 0:
                found.append(moved)
    return found if len(found) <= _MOST_MESHES else [found[0], found[-1]]


def _resized(target: ShardingTree, axis: str, size: int, devices: list[Any]) -> ShardingTree:
    """Returns the shardings on a mesh of the first devices, with another size of one axis."""

    def moved(sharding: Any) -> Any:
        if not isinstance(sharding, NamedSharding):
            return sharding
        mesh = cast(Mesh, sharding.mesh)
        shape = [size if name == axis else mesh.shape[name] for name in mesh.axis_names]
        chosen = np.array(devices[: math.prod(shape)]).reshape(shape)
        return NamedSharding(Mesh(chosen, mesh.axis_names, mesh.axis_types), sharding.spec)

    return replace(target, prefix=jax.tree.map(moved, target.prefix))


def _kept(ds: ShardedDataset, layout: BatchLayout) -> Any:
    """Returns the dataset before placement, with the rows of another layout."""
    (parent,) = cast(Any, ds.parents)
    return parent.after(replace(parent.host_rows, layout=layout))


def _placed(ds: ShardedDataset, parent: Any, **options: Any) -> ShardedDataset:
    return replace(cast(DevicePut, ds.settings), **options)(parent)
