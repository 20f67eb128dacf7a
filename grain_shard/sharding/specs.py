"""Functions for one spec on one mesh: check it, make its sharding, and fit it to a leaf."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.sharding.layout import batch_axes, round_up

DATA_AXIS = "data"


def check_fits(path: str, dtype: Any, sharding: Sharding | None, shape: tuple[int, ...]) -> None:
    """Checks that each dim of a leaf splits evenly over the mesh axes that shard the dim.

    Args:
        path: Path of the leaf, e.g. ``batch['tokens']``.
        dtype: Dtype of the leaf, for the message.
        sharding: Sharding of the leaf; None for text, which always fits.
        shape: Global shape of the leaf.

    Raises:
        ShardingError: The number of shards of a dim does not divide the size of the dim.
    """
    if not isinstance(sharding, NamedSharding):
        return
    for dim, entry in enumerate(sharding.spec):
        axes = batch_axes(PartitionSpec(entry))
        count = math.prod(sharding.mesh.shape[axis] for axis in axes)
        if shape[dim] % count:
            up = round_up(shape[dim], count)
            plural = "axis" if len(axes) == 1 else "axes"
            raise ShardingError(
                f"dim {dim} has size {shape[dim]}, which is not divisible by mesh {plural}"
                f" {', '.join(map(repr, axes))} (size {count}).",
                path=path,
                leaf=f"{dtype}[{', '.join(map(str, shape))}]",
                spec=sharding.spec,
                mesh_axes=sharding.mesh.shape.items(),
                remedy=f"pad dim {dim} to {up} before .batch, or drop {', '.join(map(repr, axes))}"
                " from this leaf's spec.",
            )


def check_held(path: str, array: np.ndarray, name_row: Callable[[int], int] = int) -> None:
    """Checks that no integer loses its upper bits, and no float becomes infinite, on the devices.

    Unless x64 is enabled, JAX turns 64-bit numbers into 32-bit ones. The check takes 0.07 ms per
    MiB, about as long as JAX takes to place the array afterwards.

    Args:
        path: Path of the leaf.
        array: The leaf on the host, of any dtype.
        name_row: Takes the index of a row in `array`, and returns the row's index in the global
            batch, for the message.

    Raises:
        ShardingError: A number does not fit into the dtype on the devices.
    """
    kind = array.dtype.kind
    if kind not in "iufc" or array.dtype.itemsize < 8 or not array.size:
        return
    held = jax.dtypes.canonicalize_dtype(array.dtype)
    limits = np.iinfo(held) if kind in "iu" else np.finfo(held)
    # Complex numbers have no order, so only the slower comparison below finds the lost ones.
    if kind != "c" and limits.min <= array.min() and array.max() <= limits.max:
        return
    if kind in "iu":
        lost = (array < limits.min) | (array > limits.max)
    else:  # NaNs and infinite numbers come here, too
        with np.errstate(over="ignore"):
            lost = np.isinf(array.astype(held)) & np.isfinite(array)
        if not lost.any():  # all others were NaN or infinite already, or fit
            return
    index = tuple(np.argwhere(lost)[0].tolist())
    row = f"row {name_row(index[0])} of the batch" if index else "the leaf"
    raise ShardingError(
        f"{row} holds {array[index]}, which does not fit into {held}, the dtype on the devices.",
        path=path,
        leaf=describe_leaf(array),
        remedy='call jax.config.update("jax_enable_x64", True) before any other use of JAX. Or, in'
        " a .map before .batch, drop the leaf, make its numbers smaller, or turn the leaf into"
        " text, which stays on the host.",
    )


def mesh_in_use() -> Mesh:
    """Returns the mesh that `jax.set_mesh` has set.

    Raises:
        ShardingError: No mesh is set.
    """
    mesh = jax.sharding.get_mesh()
    if mesh.empty:
        raise ShardingError(
            "no mesh is given, and no mesh is set by jax.set_mesh.",
            remedy="pass a jax.sharding.Mesh, or make the call inside of `with"
            " jax.set_mesh(mesh):`.",
        )
    return mesh


def default_spec(mesh: Mesh) -> PartitionSpec:
    """Returns the spec that shards dim 0 over the axis "data", or over the mesh's only axis.

    Raises:
        ShardingError: The mesh has several axes, none of them "data".
    """
    names = mesh.axis_names
    if DATA_AXIS in names or len(names) == 1:
        return PartitionSpec(DATA_AXIS if DATA_AXIS in names else names[0])
    raise ShardingError(
        f"no spec is given, and none of the mesh axes {', '.join(map(repr, names))} is called"
        f" {DATA_AXIS!r}.",
        mesh_axes=mesh.shape.items(),
        remedy=f"pass a spec that names the axis of the rows, e.g. PartitionSpec({names[0]!r}).",
    )


def named_sharding(mesh: Mesh, spec: Any) -> NamedSharding:
    """Returns the `NamedSharding` of a spec on the mesh; None means replicated.

    Raises:
        ShardingError: `spec` is not a `PartitionSpec`, or it holds UNCONSTRAINED, an axis that the
            mesh does not have, or an axis twice.
    """
    spec = PartitionSpec() if spec is None else spec
    axes = mesh.shape.items()
    if not isinstance(spec, PartitionSpec):
        is_axis = isinstance(spec, str) and spec in mesh.axis_names
        # The axis that the remedy shows.
        axis = spec if is_axis else mesh.axis_names[0]
        raise ShardingError(
            f"the spec {spec!r} is not a PartitionSpec.",
            mesh_axes=axes,
            remedy=f"pass jax.sharding.PartitionSpec({axis!r}), or a tree of PartitionSpecs.",
        )
    if PartitionSpec.UNCONSTRAINED in spec:
        raise ShardingError(
            "the spec has UNCONSTRAINED, which does not say where the rows of a batch go.",
            spec=spec,
            mesh_axes=axes,
            remedy="replace UNCONSTRAINED by a mesh axis, or by None for a dim without sharding.",
        )
    names = [name for entry in spec for name in batch_axes(PartitionSpec(entry))]
    for name in names:
        if name not in mesh.axis_names:
            raise ShardingError(
                f"the spec names the mesh axis {name!r}, which does not exist.",
                spec=spec,
                mesh_axes=axes,
                remedy=f"name an axis of the mesh ({', '.join(map(repr, mesh.axis_names))}), or"
                f" leave {name!r} out.",
            )
        if names.count(name) > 1:
            raise ShardingError(
                f"the spec names the mesh axis {name!r} twice.",
                spec=spec,
                mesh_axes=axes,
                remedy="use each mesh axis at most once in the spec.",
            )
    return NamedSharding(mesh, spec)


def as_sharding(leaf: Any) -> Sharding:
    """Returns a sharding unchanged, and the `SingleDeviceSharding` of a device.

    Raises:
        ShardingError: `leaf` is neither a device nor a sharding of a supported kind.
    """
    if isinstance(leaf, jax.Device):
        return SingleDeviceSharding(leaf)
    by_mesh = isinstance(leaf, NamedSharding) and isinstance(leaf.mesh, Mesh)
    if by_mesh or isinstance(leaf, SingleDeviceSharding):
        return leaf
    raise ShardingError(
        f"{leaf!r} does not say on which devices to place batches.",
        remedy='pass a Mesh, such as jax.make_mesh((8,), ("data",)), a NamedSharding over a Mesh of'
        " devices, a SingleDeviceSharding, a device, or a tree of these.",
    )


def spec_rank(sharding: Sharding) -> int:
    """Returns the length of a sharding's spec without trailing Nones; 0 if it has no spec."""
    if not isinstance(sharding, NamedSharding):
        return 0
    named = [dim for dim, entry in enumerate(sharding.spec) if entry is not None]
    return max(named, default=-1) + 1


def num_shards(sharding: NamedSharding) -> int:
    """Returns the number of shards into which dim 0 is cut; 1 if it is not sharded."""
    return math.prod(sharding.mesh.shape[axis] for axis in batch_axes(sharding.spec))


def fitted(sharding: Sharding, rank: int) -> Sharding:
    """Returns a sharding with its spec cut to the rank of a leaf; unchanged if it has no spec."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = PartitionSpec(*sharding.spec[:rank])
    return sharding if spec == sharding.spec else sharding.update(spec=spec)
