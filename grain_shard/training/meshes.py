"""Meshes for any number of devices, and what a logical axis means on them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from grain_shard.errors import ShardingError


def create_1d_mesh(axis_name: str = "data", devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of one axis over all devices, for data parallelism or FSDP.

    Its axis type is Auto: the compiler chooses how intermediate values are sharded, so any model
    runs on it. For Explicit axes call `jax.make_mesh`; everything in this package takes both.

    Args:
        axis_name: The axis.
        devices: The devices; None takes those of every process.

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
    """A mesh of two Auto axes over all devices, e.g. data and model parallelism.

    Args:
        axis_names: The axes, the one with the larger stride first.
        second_axis_size: Devices along the second axis. None makes the mesh as square as the
            number of devices allows, the first axis not shorter: 8 devices give (4, 2), 4 give
            (2, 2), a prime number n gives (n, 1).
        devices: The devices; None takes those of every process.

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
            remedy=f"use a second axis of size {', '.join(map(str, divisors))}.",
        )
    shape = (len(devices) // second_axis_size, second_axis_size)
    return jax.make_mesh(shape, axis_names, (AxisType.Auto,) * 2, devices=devices)


def global_batch_size(
    batch_size_per_device: int, mesh: Mesh, data_axis: str | tuple[str, ...] = "data"
) -> int:
    """The global batch, in rows, that gives every shard `batch_size_per_device` rows.

    Devices that differ only along other axes hold the same rows, so they do not count.

    Args:
        batch_size_per_device: Rows of one shard.
        mesh: The mesh of all processes.
        data_axis: The axis, or axes, that shard the batch.

    Raises:
        ShardingError: The mesh has no such axis.

    Example:
        >>> global_batch_size(64, jax.make_mesh((4, 2), ("data", "model")))
        256
    """
    axes = (data_axis,) if isinstance(data_axis, str) else data_axis
    for axis in axes:
        if axis not in mesh.axis_names:
            raise ShardingError(
                f"mesh axis {axis!r} does not exist.",
                mesh_axes=mesh.shape.items(),
                remedy=f"use one of {', '.join(map(repr, mesh.axis_names))}.",
            )
    return batch_size_per_device * math.prod(mesh.shape[axis] for axis in axes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshRules:
    """Which mesh axis shards each logical axis of a model; None replicates it.

    Called with the logical axes of an array it gives what `PartitionSpec` and flax's
    `with_partitioning` take, so that a model is written once and moves between the rules.

    Attributes:
        data: Rows of the batch.
        embed: The model's width: the inputs of a projection up, the outputs of one down.
        mlp: Hidden units.
        heads: Attention heads.
        vocab: Entries of the vocabulary.

    Example:
        >>> tensor_parallel_rules()("embed", "mlp")
        (None, 'model')
    """

    data: str | None = None
    embed: str | None = None
    mlp: str | None = None
    heads: str | None = None
    vocab: str | None = None

    def __call__(self, *logical_axes: str | None) -> tuple[str | None, ...]:
        """The mesh axis of each logical axis; None stays None.

        No mesh axis can shard two dims of an array: it goes to the first that it is for.

        Raises:
            ValueError: There is no such logical axis.
        """
        mesh_axes = dataclasses.asdict(self)
        for axis in logical_axes:
            if axis is not None and axis not in mesh_axes:
                raise ValueError(f"{axis!r} is not a logical axis; they are {list(mesh_axes)}.")
        found: list[str | None] = []
        for axis in logical_axes:
            mesh_axis = axis and mesh_axes[axis]
            found.append(None if mesh_axis in found else mesh_axis)
        return tuple(found)


def data_parallel_rules(data_axis: str = "data") -> MeshRules:
    """Every device holds the whole model and a share of the batch.

    Example:
        >>> data_parallel_rules()("data", "embed"), data_parallel_rules()("embed", "mlp")
        (('data', None), (None, None))
    """
    return MeshRules(data=data_axis)


def fsdp_rules(data_axis: str = "data") -> MeshRules:
    """Every device holds a share of the batch and, along the same axis, of each weight's width.

    Weights are gathered where they are used and their gradients scattered back.

    Example:
        >>> fsdp_rules()("data", "mlp"), fsdp_rules()("embed", "mlp")
        (('data', None), ('data', None))
    """
    return MeshRules(data=data_axis, embed=data_axis)


def tensor_parallel_rules(data_axis: str = "data", model_axis: str = "model") -> MeshRules:
    """Hidden units, heads and vocabulary are split over the model axis, the batch over the other.

    A projection up is then split by its outputs and the next one down by its inputs, so the two
    need one all-reduce between them.

    Example:
        >>> rules = tensor_parallel_rules()
        >>> rules("embed", "mlp"), rules("mlp", "embed")
        ((None, 'model'), ('model', None))
    """
    return MeshRules(data=data_axis, mlp=model_axis, heads=model_axis, vocab=model_axis)
