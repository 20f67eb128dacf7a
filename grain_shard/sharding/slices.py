"""Slices: which one a device is in, and where a mesh is cut by them.

A TPU slice is the chips that one fast network joins. Large jobs join several slices over the
data-centre network, which is slower by far; their meshes are those of
`jax.experimental.mesh_utils.create_hybrid_device_mesh`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from jax.sharding import Mesh


def slice_of(device: Any) -> int:
    """The slice of a device; 0 where devices know of none.

    A GPU's `slice_index` is not asked for: it tells which hosts NVLink joins, often each alone, and
    the network between those is the one that they train over.
    """
    return 0 if device.platform == "gpu" else getattr(device, "slice_index", 0)


@dataclass(frozen=True)
class CutMesh:
    """A mesh whose axes each stay in a slice, or else only lead from one to another.

    An axis of which a part leads to other slices and a part does not is cut in two. The devices
    keep their order, so a compiled program may take arrays of either mesh.

    Example:
        >>> from grain_shard import hosts_mesh
        >>> cut = CutMesh.of(hosts_mesh({"data": 2, "model": 4}, hosts=2, devices_per_host=4))
        >>> cut.parts["model"], cut.in_slice  # all of it is one slice
        (('model',), ('data', 'model'))

    Attributes:
        mesh: The mesh that was given, or the same devices with more axes.
        parts: By axis of the given mesh, the axes that it became, the outer one first.
        in_slice: The axes of `mesh` that stay in a slice, in its order.
        num_slices: Slices that have a device in the mesh.
    """

    mesh: Mesh
    parts: dict[str, tuple[str, ...]]
    in_slice: tuple[str, ...]
    num_slices: int

    @classmethod
    def of(cls, mesh: Mesh) -> CutMesh:
        """Cuts a mesh."""
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
        """The axes that those of the given mesh became."""
        return tuple(part for name in names for part in self.parts[name])


def _neighbours_in_slice(slices: np.ndarray, dim: int) -> int:
    """The largest size of blocks along a dim, all of one size, that no slice ends inside of."""
    size = slices.shape[dim]
    along = np.moveaxis(slices, dim, 0).reshape(size, -1)
    starts = np.flatnonzero((along[1:] != along[:-1]).any(axis=1)) + 1
    return math.gcd(size, *starts.tolist())
