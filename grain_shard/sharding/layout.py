"""The rows of a global batch that each host holds: integers and names only.

The batch axis is cut into `divisor` equal shards, one for each index along the mesh axes that shard
it. A device holds one shard or, if the batch axis is replicated, all shards; a host holds the
shards of its devices. For gradient accumulation the batch is cut into microbatches first, and each
microbatch into shards. A host's layout is therefore a few integers. It pickles to worker processes,
which must not know a device, and it does not change with the batch size.
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
        >>> BatchLayout(divisor=2, shards=(1,), microbatches=2).rows(8)
        array([2, 3, 6, 7])

    Attributes:
        divisor: Number of equal shards that the batch axis (of one microbatch) is cut into.
        shards: The shards of this host, ascending.
        mesh_axes: (name, size) of every mesh axis; for messages only.
        num_hosts: Hosts that have a device in the mesh.
        shards_of_all_hosts: Sum, over the hosts, of the shards that each holds. It is `divisor`
            if every row is on exactly one host; 0 if it is not known.
        microbatches: Number of equal parts that a batch is cut into, one after the other, before
            each of them is cut into shards.
    """

    divisor: int
    shards: tuple[int, ...]
    mesh_axes: tuple[tuple[str, int], ...] = ()
    num_hosts: int = 1
    shards_of_all_hosts: int = 0
    microbatches: int = 1

    def __repr__(self) -> str:
        # A host of a large mesh may hold thousands of shards.
        shards = repr(self.shards) if len(self.shards) <= 8 else f"<{len(self.shards)}>"
        microbatches = f", microbatches={self.microbatches}" if self.microbatches > 1 else ""
        return (
            f"BatchLayout(divisor={self.divisor}, shards={shards},"
            f" mesh=({describe_mesh(self.mesh_axes)}),"
            f" num_hosts={self.num_hosts}, amplification={self.amplification:g}{microbatches})"
        )

    @classmethod
    def of_hosts(
        cls, shardings: Sequence[Sharding], microbatches: int = 1
    ) -> dict[int, BatchLayout]:
        """Returns the layout of every host that has a device in the mesh, ascending by host.

        Args:
            shardings: The shardings of the leaves; a host holds the union of their rows.
            microbatches: Number of microbatches in a batch.
        """
        cuts = [_shards_of_devices(sharding) for sharding in shardings]
        divisor = math.lcm(*(count for _, _, count in cuts))
        held: dict[int, set[int]] = {}
        for devices, of_devices, count in cuts:
            width = divisor // count  # shards of the layout in one shard of this leaf
            hosts = np.fromiter((d.process_index for d in devices), np.int64, len(devices))
            for host, shard in np.unique(np.stack([hosts, of_devices]), axis=1).T.tolist():
                held.setdefault(host, set()).update(range(shard * width, (shard + 1) * width))
        mesh_axes, of_all = mesh_axes_of(shardings), sum(map(len, held.values()))
        return {
            host: cls(divisor, tuple(sorted(shards)), mesh_axes, len(held), of_all, microbatches)
            for host, shards in sorted(held.items())
        }

    @property
    def amplification(self) -> float:
        """Rows that all hosts read together, divided by the rows of the batch; at least 1.0."""
        return (self.shards_of_all_hosts or len(self.shards)) / self.divisor

    @property
    def multiple(self) -> int:
        """Number that the rows of a batch must be a multiple of."""
        return self.microbatches * self.divisor

    def padded(self, global_batch_size: int) -> int:
        """Returns the batch size, rounded up to the next `multiple`."""
        return round_up(global_batch_size, self.multiple)

    def rows(self, global_batch_size: int) -> np.ndarray:
        """Returns this host's rows of a batch, ascending: int64[host_batch_size].

        Args:
            global_batch_size: Rows of the whole batch, of all its microbatches together; a
                `multiple`.

        Raises:
            ShardingError: The batch size is not a `multiple`.
        """
        if global_batch_size % self.multiple:
            parts = describe_parts(self.divisor, self.microbatches)
            raise ShardingError(
                f"a batch of {global_batch_size} rows does not split into {parts}.",
                mesh_axes=self.mesh_axes,
                remedy=f"use a batch size of {self.padded(global_batch_size)}, or put"
                f" PadToDivisible({self.multiple}) before ShardBatch.",
            )
        size = global_batch_size // self.multiple
        return (self._parts()[:, None] * size + np.arange(size)).reshape(-1)

    def _parts(self) -> np.ndarray:
        """Returns the indices of this host's parts, ascending: int64[n].

        A batch is cut into `multiple` equal parts.
        """
        microbatches = np.arange(self.microbatches, dtype=np.int64)[:, None]
        return (microbatches * self.divisor + np.asarray(self.shards)).reshape(-1)

    def ranges(self, global_batch_size: int) -> list[tuple[int, int]]:
        """Returns this host's rows of a batch as separate (start, stop) ranges, ascending."""
        size = global_batch_size // self.multiple
        found: list[tuple[int, int]] = []
        for part in self._parts().tolist():
            start = found.pop()[0] if found and found[-1][1] == part * size else part * size
            found.append((start, (part + 1) * size))
        return found

    def host_row(self, row: int, num_rows: int) -> int:
        """Returns the index of a shard's first row among this host's rows of a microbatch.

        Args:
            row: The row's index in the microbatch, or in the batch if there are no microbatches.
            num_rows: Rows of the microbatch, or of the batch.
        """
        size = num_rows // self.divisor
        return self.shards.index(row // size) * size + row % size

    def global_batch_size(self, host_batch_size: int) -> int:
        """Returns the rows of the whole batch, from the number of rows that this host holds."""
        return host_batch_size // len(self.shards) * self.divisor


def round_up(count: int, multiple: int) -> int:
    """Returns the smallest multiple of `multiple` that is at least `count`."""
    return -(-count // multiple) * multiple


def describe_parts(divisor: int, microbatches: int) -> str:
    """Names the parts that a batch is split into, for a message."""
    shards = f"{divisor} shards"
    return shards if microbatches == 1 else f"{microbatches} microbatches of {shards} each"


def batch_axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes that shard dim 0 under `spec`."""
    first = spec[0] if len(spec) else None
    if first is None:
        return ()
    return (first,) if isinstance(first, str) else tuple(first)


def mesh_axes_of(shardings: Iterable[Sharding]) -> tuple[tuple[str, int], ...]:
    """Returns (name, size) of every axis of the first mesh among the shardings."""
    for sharding in shardings:
        if isinstance(sharding, NamedSharding):
            return tuple(sharding.mesh.shape.items())
    return ()


def _shards_of_devices(sharding: Sharding) -> tuple[Sequence[Any], np.ndarray, int]:
    """Returns every device, the shard of dim 0 that it holds, and the number of shards.

    Computed from the mesh, because `Sharding.devices_indices_map` builds a slice for each of the
    thousands of devices of a pod. The tests compare both.
    """
    if not isinstance(sharding, NamedSharding):
        devices = list(sharding.device_set)
        return devices, np.zeros(len(devices), np.int64), 1
    mesh = cast(Mesh, sharding.mesh)
    axes = batch_axes(sharding.spec)
    sizes = [mesh.shape[axis] for axis in axes]
    along = np.indices(mesh.devices.shape).reshape(len(mesh.shape), -1)
    # The first index, of an axis of size 1, is for a batch axis that is not sharded.
    of_axes = along[[mesh.axis_names.index(axis) for axis in axes]]
    shard = np.ravel_multi_index((0 * along[0], *of_axes), (1, *sizes))
    return list(mesh.devices.flat), np.asarray(shard), math.prod(sizes)
