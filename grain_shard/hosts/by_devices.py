"""The least of the numbers that hosts have, found by their devices.

It takes an all-reduce of a few bytes, which goes over the interconnect of the devices. So it takes
no longer with more hosts, and asks nothing of the first one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from grain_shard.hosts.minimum import Way

# The ways of this process whose devices are at work.
_under_way: set[Way] = set()


def is_waiting() -> bool:
    """Whether a thread of this process waits for an answer of the devices."""
    return bool(_under_way)


class ByDevices(Way):
    """Has the devices find it. What they have begun cannot be left.

    Args:
        devices: Of all hosts that take part, in an order that is the same on each.
    """

    is_collective = True

    def __init__(self, devices: Sequence[Any]):
        self._mesh = Mesh(np.array(devices), ("devices",))

    def least(self, numbers: Sequence[int], begins: Callable[[], None]) -> tuple[int, ...]:
        _under_way.add(self)
        try:
            # The mesh of the training loop is in force in this thread, too, and has other axes.
            with jax.set_mesh(self._mesh):
                least = _all_reduce(self._mesh)(_on_devices(self._mesh, numbers))
                begins()
                return tuple(int(number) for number in np.asarray(least))
        finally:
            _under_way.discard(self)


def _on_devices(mesh: Mesh, numbers: Sequence[int]) -> jax.Array:
    """An array of which each device holds one row, each of this host's the same."""
    sharding = NamedSharding(mesh, P("devices"))
    row = np.array([numbers], np.int32)
    rows = [jax.device_put(row, device) for device in mesh.local_devices]
    return jax.make_array_from_single_device_arrays((mesh.size, len(numbers)), sharding, rows)


@functools.lru_cache(maxsize=8)
def _all_reduce(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    return jax.jit(lambda rows: rows.min(axis=0), out_shardings=NamedSharding(mesh, P()))
