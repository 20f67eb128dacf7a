"""Finds the TPU slice of each device, and cuts the axes of a mesh where a slice ends.

A TPU slice is a set of chips that one fast network joins. Large jobs join several slices over the
much slower data-centre network; `jax.experimental.mesh_utils.create_hybrid_device_mesh` makes their
meshes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh


def slice_of(device: Any) -> int:
    """Returns the index of the slice that a device belongs to; 0 if the device has no slice.

    All GPUs are in slice 0. Their `slice_index` numbers groups of hosts that NVLink joins, often a
    single host. It is ignored, because GPUs train over the network between such groups.
    """
    return 0 if device.platform == "gpu" else getattr(device, "slice_index", 0)


@dataclass(frozen=True)
class CutMesh:
    """A mesh in which each axis either stays within a slice or only leads from slice to slice.

    An axis of the user's mesh that does both is cut into two axes. The devices keep their order, so
    a compiled program can take arrays of either mesh.

    Example:
        >>> from grain_shard import hosts_mesh
        >>> cut = CutMesh.of(hosts_mesh({"data": 2, "model": 4}, hosts=2, devices_per_host=4))
        >>> cut.parts["model"], cut.in_slice  # all devices are in one slice
        (('model',), ('data', 'model'))

    Attributes:
        mesh: The user's mesh, or a mesh of the same devices with more axes.
        parts: For each axis of the user's mesh, the axes of `mesh` that replace it: the axis
            itself, or two axes, the one between slices first.
        in_slice: The axes of `mesh` that stay within a slice, in the mesh's order.
        num_slices: Number of slices that have a device in the mesh.
    """

    mesh: Mesh
    parts: dict[str, tuple[str, ...]]
    in_slice: tuple[str, ...]
    num_slices: int

    @classmethod
    def of(cls, mesh: Mesh) -> CutMesh:
        """Returns the mesh, with each axis that crosses the border of a slice cut into two axes."""
        slices = np.vectorize(slice_of, otypes=[np.int64])(mesh.devices)
        parts: dict[str, tuple[str, ...]] = {}
        sizes: dict[str, int] = {}
        in_slice: list[str] = []
        for dim, (name, size) in enumerate(mesh.shape.items()):
            inner = _neighbours_in_slice(slices, dim)
            cut = {f"{name}.slices": size // inner, f"{name}.in_slice": inner}
            found = {name: size} if inner in (1, size) else cut
            parts[name] = tuple(found)
            sizes |= found
            if inner > 1 or size == 1:
                in_slice.append(parts[name][-1])
        if len(sizes) > len(parts):
            mesh = Mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes))
        return cls(mesh, parts, tuple(in_slice), len(np.unique(slices)))

    def axes(self, names: Iterable[str]) -> tuple[str, ...]:
        """Returns the axes of `mesh` that replace the named axes of the user's mesh, in order."""
        return tuple(part for name in names for part in self.parts[name])


def _neighbours_in_slice(slices: np.ndarray, dim: int) -> int:
    """Returns the largest block size along a dim such that no block crosses a slice's border.

    Args:
        slices: The slice of each device, in the shape of the mesh.
        dim: The dim of the mesh that is cut into equal blocks.
    """
    size = slices.shape[dim]
    along = np.moveaxis(slices, dim, 0).reshape(size, -1)
    starts = np.flatnonzero((along[1:] != along[:-1]).any(axis=1)) + 1
    return math.gcd(size, *starts.tolist())
