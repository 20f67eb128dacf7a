"""`BatchLayout`: the rows of a global batch that a host holds, as integers and names only.

The batch axis is cut into `divisor` equal shards, one for each index along the mesh axes that shard
it. A device holds one shard or, if the batch axis is replicated, the whole batch. A host holds the
shards of its devices. So a few integers describe a host's rows for every batch size. The integers
can be pickled for worker processes, which must not know any device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from grain_shard.errors import ShardingError, describe_mesh


@dataclass(frozen=True)
class BatchLayout:
    """The rows of every global batch that one host holds.

    Example:
        >>> layout = BatchLayout(divisor=4, shards=(1, 3))
        >>> layout.rows(8)
        array([2, 3, 6, 7])

    Attributes:
        divisor: Number of equal shards that the rows of a batch are cut into.
        shards: Indices of the shards that this host holds, ascending.
        mesh_axes: (name, size) of every mesh axis; for messages only.
        num_hosts: Number of hosts that have a device in the mesh.
        shards_of_all_hosts: Number of shards that each host holds, summed over all hosts. The sum
            is `divisor` if every row is on exactly one host. 0 means unknown.
    """

    divisor: int
    shards: tuple[int, ...]
    mesh_axes: tuple[tuple[str, int], ...] = ()
    num_hosts: int = 1
    shards_of_all_hosts: int = 0

    def __repr__(self) -> str:
        # A host of a large mesh may hold thousands of shards, so only their number is shown.
        shards = repr(self.shards) if len(self.shards) <= 8 else f"<{len(self.shards)}>"
        return (
            f"BatchLayout(divisor={self.divisor}, shards={shards},"
            f" mesh=({describe_mesh(self.mesh_axes)}),"
            f" num_hosts={self.num_hosts}, amplification={self.amplification:g})"
        )

    @classmethod
    def of_hosts(cls, shardings: Sequence[Sharding]) -> dict[int, BatchLayout]:
        """Returns the layout of each host that has a device in the mesh, by process index.

        Args:
            shardings: The shardings of the leaves. A host holds every row that one of them gives
                to one of its devices.
        """
        cuts = [_shards_of_devices(sharding) for sharding in shardings]
        divisor = math.lcm(*(count for _, _, count in cuts))
        held: dict[int, set[int]] = {}  # the shards of the layout that each host holds
        for devices, of_devices, count in cuts:
            width = divisor // count  # one shard of this leaf is `width` shards of the layout
            hosts = np.fromiter((d.process_index for d in devices), np.int64, len(devices))
            # Several devices of a host may hold the same shard. `np.unique` leaves one such pair.
            for host, shard in np.unique(np.stack([hosts, of_devices]), axis=1).T.tolist():
                held.setdefault(host, set()).update(range(shard * width, (shard + 1) * width))
        mesh_axes, of_all = mesh_axes_of(shardings), sum(map(len, held.values()))
        return {
            host: cls(divisor, tuple(sorted(shards)), mesh_axes, len(held), of_all)
            for host, shards in sorted(held.items())
        }

    @property
    def amplification(self) -> float:
        """Rows that all hosts together read for a batch, divided by the rows of the batch.

        It is 1.0 if each row is read once. If `shards_of_all_hosts` is 0, only the rows of this
        host are counted.
        """
        return (self.shards_of_all_hosts or len(self.shards)) / self.divisor

    def padded(self, global_batch_size: int) -> int:
        """Returns the batch size, rounded up so that `divisor` divides it."""
        return round_up(global_batch_size, self.divisor)

    def rows(self, global_batch_size: int) -> np.ndarray:
        """Returns this host's rows of a batch, ascending: int64[host_batch_size].

        Args:
            global_batch_size: Rows of the whole batch. `divisor` must divide it.

        Raises:
            ShardingError: `divisor` does not divide the batch size.
        """
        if global_batch_size % self.divisor:
            raise ShardingError(
                f"a batch of {global_batch_size} rows does not split into {self.divisor} shards.",
                mesh_axes=self.mesh_axes,
                remedy=f"use a batch size of {self.padded(global_batch_size)}, or put"
                f" PadToDivisible({self.divisor}) before ShardBatch.",
            )
        size = global_batch_size // self.divisor
        starts = np.asarray(self.shards, np.int64)[:, None] * size
        return (starts + np.arange(size)).reshape(-1)

    def ranges(self, global_batch_size: int) -> list[tuple[int, int]]:
        """Returns this host's rows of a batch as (start, stop) ranges, ascending and disjoint.

        Neighbouring shards are joined into one range. `divisor` must divide `global_batch_size`.
        """
        size = global_batch_size // self.divisor
        found: list[tuple[int, int]] = []
        for shard in self.shards:
            start, stop = shard * size, (shard + 1) * size
            if found and found[-1][1] == start:
                start, _ = found.pop()
            found.append((start, stop))
        return found

    def host_row(self, row: int, num_rows: int) -> int:
        """Returns the index of a global row among this host's rows.

        Args:
            row: Index of the row in the global batch. This host must hold the row.
            num_rows: Rows of the global batch.
        """
        size = num_rows // self.divisor
        return self.shards.index(row // size) * size + row % size

    def global_batch_size(self, host_batch_size: int) -> int:
        """Returns the size of the global batch in which this host holds `host_batch_size` rows."""
        return host_batch_size // len(self.shards) * self.divisor


def round_up(count: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def batch_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes over which a spec shards dim 0; () if dim 0 is not sharded."""
    first = spec[0] if len(spec) else None
    if first is None:
        return ()
    return (first,) if isinstance(first, str) else tuple(first)


def mesh_axes_of(shardings: Iterable[Sharding]) -> tuple[tuple[str, int], ...]:
    """Returns (name, size) of each axis of the first mesh in the shardings; () without a mesh."""
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return tuple(sharding.mesh.shape.items())
    return ()


def _shards_of_devices(sharding: Sharding) -> tuple[Sequence[Any], np.ndarray, int]:
    """Returns the devices, the index of each device's shard of dim 0, and the number of shards.

    The indices are int64[number of devices]. `Sharding.devices_indices_map` gives the same ones,
    but slowly: it builds a slice for each of a pod's thousands of devices. A test compares both.
    """
    if not isinstance(sharding, NamedSharding):
        devices = list(sharding.device_set)
        return devices, np.zeros(len(devices), np.int64), 1
    mesh = cast(Mesh, sharding.mesh)
    along = np.indices(mesh.devices.shape)
    # The mesh axes of dim 0 count the shards like the digits of a number, the first axis slowest.
    shard = np.zeros(mesh.devices.shape, np.int64)
    for axis in batch_axes(sharding.spec):
        shard = shard * mesh.shape[axis] + along[mesh.axis_names.index(axis)]
    return list(mesh.devices.flat), shard.ravel(), int(shard.max()) + 1
