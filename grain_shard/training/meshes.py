"""Makes meshes for any number of devices, and the shardings and pipelines of their batches.

The axes of the meshes made here are of type Auto: the compiler chooses how intermediate values are
sharded, so any model runs on them. For Explicit axes call `jax.make_mesh`. Everything in this
package takes both types. An axis name that a mesh does not have raises a `ShardingError`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grain
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from grain_shard.errors import ShardingError, require_int
from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import named_sharding, num_shards
from grain_shard.transforms.chain import shard_to


def create_1d_mesh(axis_name: str = "data", devices: Sequence[Any] | None = None) -> Mesh:
    """Returns a mesh with one axis, for data parallelism or FSDP.

    Args:
        axis_name: Name of the axis.
        devices: The devices of the mesh; None takes the devices of all processes.

    Example:
        >>> dict(create_1d_mesh(devices=jax.devices()[:4]).shape)
        {'data': 4}
    """
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), (axis_name,), (AxisType.Auto,), devices=devices)


def create_2d_mesh(
    axis_names: tuple[str, str] = ("data", "model"),
    second_axis_size: int | None = None,
    devices: Sequence[Any] | None = None,
) -> Mesh:
    """Returns a mesh with two axes, e.g. for data and model parallelism.

    Args:
        axis_names: Names of the first and the second axis.
        second_axis_size: Number of devices along the second axis. None makes the mesh as square as
            possible, with the longer axis first: 8 devices give (4, 2), 4 give (2, 2), and 7 give
            (7, 1).
        devices: The devices of the mesh; None takes the devices of all processes.

    Raises:
        ShardingError: `second_axis_size` does not divide the number of devices.

    Example:
        >>> dict(create_2d_mesh(devices=jax.devices()[:8]).shape)
        {'data': 4, 'model': 2}
    """
    devices = jax.devices() if devices is None else devices
    divisors = [size for size in range(1, len(devices) + 1) if len(devices) % size == 0]
    if second_axis_size is None:
        second_axis_size = max(size for size in divisors if size * size <= len(devices))
    if second_axis_size not in divisors:
        raise ShardingError(
            f"{len(devices)} devices do not split into rows of {second_axis_size}.",
            remedy=f"pass second_axis_size as one of {', '.join(map(str, divisors))}.",
        )
    shape = (len(devices) // second_axis_size, second_axis_size)
    return jax.make_mesh(shape, axis_names, (AxisType.Auto,) * 2, devices=devices)


def create_named_sharding(mesh: Mesh, *axes: str | tuple[str, ...] | None) -> NamedSharding:
    """Returns a `NamedSharding` that shards each dim of an array over the mesh axis named for it.

    Args:
        mesh: The mesh.
        *axes: An entry for each dim: a mesh axis, a tuple of mesh axes, or None for a dim that is
            not sharded. Further dims of the array are not sharded. Without any entry, every device
            holds the whole array.

    Example:
        >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
        >>> create_named_sharding(mesh, "data", None, "model").shard_shape((8, 3, 6))
        (2, 3, 3)
    """
    return named_sharding(mesh, PartitionSpec(*axes))


def create_data_parallel_sharding(
    mesh: Mesh, data_axis: str | tuple[str, ...] = "data"
) -> NamedSharding:
    """Returns the sharding of a batch whose rows, dim 0, are sharded over the data axis.

    If several mesh axes shard the rows, pass all of them: ``("data", "fsdp")``.

    Example:
        >>> sharding = create_data_parallel_sharding(jax.make_mesh((8,), ("data",)))
        >>> sharding.shard_shape((16, 3))
        (2, 3)
    """
    return create_named_sharding(mesh, data_axis)


def global_batch_size(
    batch_size_per_device: int, mesh: Mesh, data_axis: str | tuple[str, ...] = "data"
) -> int:
    """Returns the rows of a global batch in which every shard has `batch_size_per_device` rows.

    Only the devices along `data_axis` count. Devices that differ only along other axes hold the
    same rows.

    Example:
        >>> global_batch_size(64, jax.make_mesh((4, 2), ("data", "model")))
        256
    """
    return batch_size_per_device * num_shards(create_data_parallel_sharding(mesh, data_axis))


def create_sharded_pipeline(
    source: Any, mesh: Mesh, batch_size_per_device: int = 64
) -> ShardedDataset:
    """Returns a pipeline of global batches in which every shard has `batch_size_per_device` rows.

    On a mesh of one device it is an ordinary data loader, so the same program runs on one device
    and on many.

    Example:
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> for batch in create_sharded_pipeline([{"x": 1}, {"x": 2}, {"x": 3}], mesh, 2):
        ...     print(batch["x"], batch["valid_mask"])
        [1 2] [ True  True]
        [3 0] [ True False]

    Args:
        source: The records: a sequence, a Grain source, or a `grain.MapDataset` that shuffles and
            decodes them. On one host, a stream of records (`grain.IterDataset`) is possible, too.
        mesh: The mesh of all processes. Its axis "data", or its only axis, shards the rows.
        batch_size_per_device: Rows of one shard. Devices that differ only along other axes hold
            the same rows.

    Returns:
        The dataset that `shard_to` returns. The last batch is padded, and each batch has a
        ``valid_mask``.

    Raises:
        ShardingError: The mesh has several axes, none of them "data". Or there is no record. Or the
            source is a stream and there are several hosts: call `shard_to` with ``rows=`` instead.
    """
    require_int("batch_size_per_device", batch_size_per_device, 1)
    if not isinstance(source, grain.MapDataset | grain.IterDataset):
        source = grain.MapDataset.source(source)
    shards = ShardingTree.of(mesh).layout().divisor
    return shard_to(source.batch(batch_size_per_device * shards), mesh)
