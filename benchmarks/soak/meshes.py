"""Draws random meshes, with devices in any order, and random specs for the leaves of a batch."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grain_shard.tools.planning.topology import hosts_mesh

SHAPES = ((8,), (4,), (2,), (1,), (2, 4), (4, 2), (2, 2), (1, 8), (8, 1), (2, 2, 2))
NAMES = ("data", "model", "seq")


@dataclasses.dataclass(frozen=True)
class DrawnMesh:
    """A mesh and specs, as a literal.

    Attributes:
        shape: Shape of the mesh. Its axes have the first names of `NAMES`.
        order: Index of the device at each place of the mesh.
        explicit: True if the axes are Explicit, False if they are Auto.
        spec: A `PartitionSpec` for all leaves, or a dict with one for each leaf.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    explicit: bool
    spec: Any

    @property
    def names(self) -> tuple[str, ...]:
        return NAMES[: len(self.shape)]

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        ordered = np.array(devices)[list(self.order)].reshape(self.shape)
        kind = AxisType.Explicit if self.explicit else AxisType.Auto
        return Mesh(ordered, self.names, axis_types=(kind,) * len(self.shape))

    def of_hosts(self, hosts: int) -> Mesh:
        """Returns the mesh with devices of several hosts that do not exist."""
        each = self.size // hosts
        devices = hosts_mesh({"all": self.size}, hosts=hosts, devices_per_host=each).devices
        return self.mesh(devices.flat)

    def spec_of(self, leaf: str) -> P:
        """Returns the spec of a leaf.

        Args:
            leaf: The first key of the leaf's path. A leaf without a spec, such as the mask, is
                sharded like the rows of "id".
        """
        if isinstance(self.spec, Mapping):
            return self.spec.get(leaf, P(*self.spec["id"][:1]))
        return self.spec

    def specs(self) -> list[P]:
        """Returns the distinct specs of the leaves, cut to the dim of the rows."""
        found = self.spec.values() if isinstance(self.spec, Mapping) else [self.spec]
        return list(dict.fromkeys(P(*spec[:1]) for spec in found))

    @property
    def is_of_all_leaves(self) -> bool:
        """True if a single spec covers all leaves, so that any leaf names are possible."""
        return not isinstance(self.spec, Mapping)

    @property
    def divisor(self) -> int:
        """Number of shards that the rows are cut into, over all leaves."""
        sizes = dict(zip(self.names, self.shape, strict=True))
        cuts = [
            math.prod(sizes[axis] for axis in axes_of(spec[0] if len(spec) else None))
            for spec in self.specs()
        ]
        return math.lcm(*cuts)


def axes_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes that one entry of a spec names."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def draw(rng: random.Random) -> DrawnMesh:
    return draw_of_shape(rng, rng.choice(SHAPES))


def draw_of_shape(rng: random.Random, shape: tuple[int, ...]) -> DrawnMesh:
    order = tuple(rng.sample(range(math.prod(shape)), math.prod(shape)))
    return DrawnMesh(
        shape, order, rng.random() < 0.3, draw_spec(rng, dict(zip(NAMES, shape, strict=False)))
    )


def draw_spec(rng: random.Random, sizes: Mapping[str, int]) -> Any:
    """Returns a random spec, or a dict of specs by leaf, for a mesh with axes of these sizes.

    The axis for "tokens" must divide 8, the number of tokens of a record.
    """
    names = list(sizes)
    rows = rng.choice([*names, tuple(rng.sample(names, len(names))), names[0], None])
    if rng.random() < 0.7:
        return P(rows)
    left = [name for name in names if name not in axes_of(rows) and 8 % sizes[name] == 0]
    return {
        "id": P(rows),
        "tokens": P(rows, rng.choice([None, *left])),
        "image": P(rng.choice([None, *names])),
        "noise": P(rows),
        "name": P(rows),
    }


def rows_of_host(mesh: Mesh, specs: Sequence[P], host: int, rows: int):
    """Returns the rows of a batch that a host holds, ascending: int64[n].

    They come from JAX's `devices_indices_map`, and not from the code that is tested.
    """
    held = set()
    for spec in specs:
        indices = NamedSharding(mesh, spec).devices_indices_map((rows,))
        for device, (index,) in indices.items():
            if device.process_index == host:
                held.update(range(*index.indices(rows)))
    return np.array(sorted(held), np.int64)


def here(drawn: DrawnMesh) -> Mesh:
    """Returns the mesh on the devices of this process."""
    return drawn.mesh(jax.devices()[: drawn.size])
