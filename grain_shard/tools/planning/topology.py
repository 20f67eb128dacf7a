"""Makes meshes without their devices, for planning and compiling: of a TPU slice, or of hosts.

The devices of these meshes cannot compute, and no JAX backend starts.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import jax
from jax.experimental.mesh_utils import create_hybrid_device_mesh
from jax.sharding import Mesh

from grain_shard.errors import GrainShardError, ShardingError, require_int

# The `device_kind` of devices that only stand in for real ones.
UNKNOWN_KIND = "unknown device"
# Without these variables libtpu asks the metadata server of a TPU VM, and logs errors if there is
# none. Their values do not matter, because the topology is given by its name.
_NO_TPU_HERE = {
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_ID": "0",
    # Several processes may load libtpu at once, because none of them opens a chip.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def topology_mesh(topology: str, axes: Mapping[str, int], *, slices: int = 1) -> Mesh:
    """Returns the mesh that `jax.make_mesh` makes on a TPU slice, without the slice.

    On several slices it is the mesh of `jax.experimental.mesh_utils.create_hybrid_device_mesh`,
    with ``allow_split_physical_axes=True``. The slices are spread over the first axis. If the
    number of slices does not divide the size of this axis, they are spread over the next axes as
    well. For another order, make a `jax.sharding.Mesh` of the same devices: `plan` takes any mesh.

    libtpu (``pip install "grain-shard[plan]"``, Linux on x86-64) knows the chips, the hosts and
    the neighbours of each chip. It gives four chips to a host; for hosts of eight chips use
    `hosts_mesh`. As on a TPU VM, a chip is one JAX device, or two on v2, v3 and TPU7x.

    The function tells libtpu that there is no TPU. So on a TPU VM, call it in a process that does
    not train.

    Args:
        topology: Kind and shape: "v4:4x4x4", "v5e:16x16", "v5p:4x4x8", "v6e:8x8", "tpu7x:4x4x4".
        axes: Name and size of each mesh axis, in order, over all slices together.
        slices: Number of slices of this topology. The data-centre network joins them.

    Returns:
        A mesh for planning and compiling (`jax.jit(...).lower(...).compile()`). Its devices cannot
        compute.

    Raises:
        GrainShardError: libtpu is not installed.
        ShardingError: libtpu does not know the topology, or the axes do not fit it.

    Example:
        >>> mesh = topology_mesh("v5e:16x16", {"data": 32, "model": 8})  # doctest: +SKIP
        >>> mesh.devices.shape, mesh.devices.flat[0].device_kind  # doctest: +SKIP
        ((32, 8), 'TPU v5 lite')
    """
    if find_spec("libtpu") is None:
        raise GrainShardError(
            "the topology of a TPU slice needs libtpu, which is not installed.\n"
            '  remedy: pip install "grain-shard[plan]" (Linux on x86-64), or give the number of'
            " hosts and devices instead."
        )
    from jax.experimental import topologies

    require_int("slices", slices, 1)
    # A v4 chip has two cores. By default JAX shows them as one device, which libtpu calls megacore.
    options: dict[str, Any] = {}
    if topology.lower().startswith("v4:"):
        options["chip_config_name"] = "megacore"
    if slices > 1:
        options["num_slices"] = slices
    before = dict(os.environ)
    os.environ.update(_NO_TPU_HERE | before)  # a variable that the user has set stays
    try:
        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=topology, **options
        ).devices
    except Exception as error:  # RuntimeError; for some names and versions IndexError
        raise ShardingError(
            f"libtpu does not know the topology {topology!r}: {error}",
            remedy="write the kind of TPU and the shape of a slice of whole hosts, such as"
            ' "v5e:4x8" or "v5p:2x2x4".',
        ) from error
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
    return _mesh(axes, devices, slices)


def hosts_mesh(axes: Mapping[str, int], *, hosts: int, devices_per_host: int) -> Mesh:
    """Returns the mesh that `jax.make_mesh` makes on hosts with GPUs or CPUs, without the hosts.

    The mesh is for planning only. Its devices cannot compute.

    Args:
        axes: Name and size of each mesh axis, in order.
        hosts: Number of hosts (JAX processes).
        devices_per_host: Number of devices of each host.

    Raises:
        ShardingError: The axes do not fit the devices.

    Example:
        >>> mesh = hosts_mesh({"data": 4, "model": 2}, hosts=2, devices_per_host=4)
        >>> [[device.process_index for device in row] for row in mesh.devices]
        [[0, 0], [0, 0], [1, 1], [1, 1]]
    """
    require_int("hosts", hosts, 1)
    require_int("devices_per_host", devices_per_host, 1)
    count = range(hosts * devices_per_host)
    return _mesh(axes, [_StandIn(id=i, process_index=i // devices_per_host) for i in count])


@dataclass(frozen=True)
class _StandIn:
    """Stands in for a `jax.Device`, with the attributes that a mesh and a layout read."""

    id: int
    process_index: int
    platform: str = "unknown"
    device_kind: str = UNKNOWN_KIND


def _mesh(axes: Mapping[str, int], devices: Sequence[Any], slices: int = 1) -> Mesh:
    """Returns a mesh of all the devices, in the order that JAX chooses.

    Raises:
        ShardingError: The axes do not fit the devices.
    """
    for name, size in axes.items():
        require_int(f"mesh axis {name}", size, 1)
    if math.prod(axes.values()) != len(devices):
        raise ShardingError(
            f"the axes make a mesh of {math.prod(axes.values())} devices, but there are"
            f" {len(devices)} devices.",
            mesh_axes=axes.items(),
            remedy=f"give axes whose sizes multiply to {len(devices)}.",
        )
    try:
        if slices > 1:
            return _hybrid_mesh(axes, devices, slices)
        return jax.make_mesh(tuple(axes.values()), tuple(axes), devices=devices)
    except NotImplementedError as error:  # JAX knows no such mesh on this topology
        raise ShardingError(
            f"jax.make_mesh finds no order of the devices for these axes: {error}",
            mesh_axes=axes.items(),
            remedy="use axis sizes that are products of the topology's own sizes, or pass plan() a"
            " Mesh with the devices in an order of your own.",
        ) from error


def _hybrid_mesh(axes: Mapping[str, int], devices: Sequence[Any], slices: int) -> Mesh:
    """Returns a mesh in which the first axes lead from slice to slice.

    On 4 slices, axes of the sizes (2, 6) are spread over (2, 2) slices, and within a slice they
    have the sizes (1, 3).
    """
    between, within = [], []
    # After the loop `slices_left` is 1, because the number of slices divides the number of devices,
    # which is the product of the axis sizes.
    slices_left = slices
    for size in axes.values():
        between.append(math.gcd(size, slices_left))
        within.append(size // between[-1])
        slices_left //= between[-1]
    arranged = create_hybrid_device_mesh(within, between, devices, allow_split_physical_axes=True)
    return Mesh(arranged, tuple(axes))
