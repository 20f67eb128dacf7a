"""`Placing`: puts this host's batches on the devices, ahead of the training loop."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from grain_shard.iteration.host_batches import HostBatches, Position
from grain_shard.spans import PLACE, span
from grain_shard.stats.meter import Meter
from grain_shard.trees import Batch


class Placed(NamedTuple):
    """A batch on the devices, the position after it, and the size of this host's part of it."""

    batch: Batch
    position: Position
    size: Mapping[str, int]


class Placer(Protocol):
    """Puts a host's batch on the devices; `Assembler` is one."""

    mesh_axes: tuple[tuple[str, int], ...]
    digest: str

    def __call__(self, batch: Batch) -> Batch:
        """Returns the batch on the devices."""
        ...

    def describe(self) -> dict[str, str]:
        """The leaves of the first batch, to be compared with other hosts'."""
        ...


class Placing:
    """Puts this host's batches on the devices.

    Args:
        placer: Puts one batch on the devices.
        meter: Counts the batches.
        position: The position before the first batch.
        keeps_last: Whether the last batch is kept on the host, because padding copies its shapes.
    """

    def __init__(self, placer: Placer, meter: Meter, position: Position, *, keeps_last: bool):
        self._placer, self._meter, self._position = placer, meter, position
        self._keeps_last = keeps_last
        self._last: Batch | None = None

    def __call__(self, item: tuple[Batch, Position]) -> Placed:
        batch, self._position = item
        if self._keeps_last:
            self._last = batch
        return self._placed(batch, self._position)

    def padding(self, host: HostBatches, before: int) -> Placed:
        """Makes a batch of padding after the last batch, with the shapes of this host's batches.

        Args:
            host: This host's batches.
            before: Number of batches of padding before it.
        """
        like = host.first() if self._last is None else self._last
        return self._placed(host.padding.like(like), host.past_end(self._position, before + 1))

    def _placed(self, batch: Batch, position: Position) -> Placed:
        with span(PLACE):
            return Placed(self._placer(batch), position, self._meter.placed(batch))
