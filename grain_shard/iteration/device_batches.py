"""`PutOnDevices`: the function that a background thread calls to put each batch on the devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from grain_shard.iteration.host_batches import HostBatches, Position
from grain_shard.spans import PLACE, span
from grain_shard.stats.meter import Meter
from grain_shard.trees import Batch


class DeviceBatch(NamedTuple):
    """A global batch on the devices.

    Attributes:
        batch: The global batch.
        position: The position after the batch.
        size: The "records" and the "bytes" of this host's rows.
    """

    batch: Batch
    position: Position
    size: Mapping[str, int]


class PutBatch(Protocol):
    """A function that puts a host batch on the devices; `Assembler` is one.

    Attributes:
        mesh_axes: Names and sizes of the mesh axes; empty without a mesh.
        digest: The digest of this host's rows of the first batch. "" before that batch, if all of
            these rows are padding, or if hosts do not compare their rows.
    """

    mesh_axes: tuple[tuple[str, int], ...]
    digest: str

    def __call__(self, batch: Batch) -> Batch:
        """Puts a host batch, a tree of NumPy arrays, on the devices; returns the global batch."""
        ...

    def describe(self) -> dict[str, str]:
        """Returns texts that hosts compare: shape, dtype and spec of each leaf, by its path."""
        ...


class PutOnDevices:
    """A function that puts each of this host's batches on the devices, one after the other.

    Args:
        put_batch: Puts one batch on the devices.
        meter: Counts the batches.
        position: The position before the first batch.
        keeps_last: True keeps the last host batch in memory, because `padding` copies its shapes.
    """

    def __init__(self, put_batch: PutBatch, meter: Meter, position: Position, *, keeps_last: bool):
        self._put_batch, self._meter, self._position = put_batch, meter, position
        self._keeps_last = keeps_last
        self._last: Batch | None = None

    def __call__(self, item: tuple[Batch, Position]) -> DeviceBatch:
        batch, self._position = item
        if self._keeps_last:
            self._last = batch
        return self._put(batch, self._position)

    def padding(self, host: HostBatches, before: int) -> DeviceBatch:
        """Puts a batch on the devices that is all padding.

        A host hands out such batches if its stream ends before the streams of other hosts.

        Args:
            host: This host's batches, whose shapes and dtypes the padding gets.
            before: Number of batches of padding before this one.
        """
        like = host.first() if self._last is None else self._last
        return self._put(host.padding.like(like), host.past_end(self._position, before + 1))

    def _put(self, batch: Batch, position: Position) -> DeviceBatch:
        with span(PLACE):
            return DeviceBatch(self._put_batch(batch), position, self._meter.placed(batch))
