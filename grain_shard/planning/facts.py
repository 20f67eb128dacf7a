"""What a plan knows, in numbers: who reads which rows. Its warnings and text are made of this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import grain
import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.hardware import HardwareType
from grain_shard.reading.pad_batch import Remainder
from grain_shard.sharding.layout import BatchLayout
from grain_shard.transforms.pad import PadToDivisible
from grain_shard.transforms.shard_batch import ShardBatch
from grain_shard.transforms.validate import ValidateBatchSize
from grain_shard.trees import MASK_KEY


@dataclass(frozen=True)
class HostReads:
    """What one host reads.

    Attributes:
        host: Its JAX process index.
        layout: The rows that it asks for, of every batch.
        rows_per_step: Rows that it reads for a full batch; padding is not read.
        rows_per_epoch: Rows that it reads in an epoch.
    """

    host: int
    layout: BatchLayout
    rows_per_step: int
    rows_per_epoch: int


@dataclass(frozen=True)
class Reads:
    """What all hosts read, with one setting of `read`.

    Attributes:
        read: "needed" or "once".
        padded_batch_size: Rows of a batch with its padding.
        amplification: How many hosts read a row, on average: the rows that all hosts read for a
            batch, over the rows of the batch.
        hosts: Each host, ascending.
    """

    read: Literal["needed", "once"]
    padded_batch_size: int
    amplification: float
    hosts: tuple[HostReads, ...]

    def __repr__(self) -> str:
        return (
            f"Reads(read={self.read!r}, padded_batch_size={self.padded_batch_size},"
            f" amplification={self.amplification:g}, hosts=<{len(self.hosts)}>)"
        )

    @property
    def rows_per_step(self) -> int:
        """The most rows that any host reads for a batch."""
        return max(host.rows_per_step for host in self.hosts)


@dataclass(frozen=True, repr=False)
class PlanFacts:
    """All that was computed for a plan.

    Attributes:
        device_kind: As JAX calls it.
        hardware: The chip, as far as its critical batch is known.
        num_devices: Devices in the mesh.
        num_hosts: Hosts that have one of them.
        mesh_axes: (name, size) of every mesh axis.
        specs: The distinct specs of the leaves.
        num_records: Records of an epoch.
        record_bytes: Bytes of one record in the batch; None if not said.
        global_batch_size: Rows of a batch before padding.
        remainder: As for `shard_to`.
        steps_per_epoch: Batches of an epoch.
        padded_rows_per_epoch: Rows of an epoch that hold no record.
        dropped_records_per_epoch: Records that come in no batch.
        rows_per_device: Rows of one shard, padding included; of several specs, under the one that
            cuts the rows most.
        device_bytes: Bytes of a batch on one device, at most: where a spec cuts other dims than
            the rows too, there are fewer. None without `record_bytes`.
        read: What `shard_to` does.
        needed: What hosts read with ``read="needed"``.
        once: What they read with ``read="once"``. Of the two, the one that `read` does not choose
            is None if `remainder` forbids it: its shards do not divide the batch.
        hosts_with_the_same_rows: Groups of hosts whose devices hold the same rows.
    """

    device_kind: str
    hardware: HardwareType
    num_devices: int
    num_hosts: int
    mesh_axes: tuple[tuple[str, int], ...]
    specs: tuple[str, ...]
    num_records: int
    record_bytes: int | None
    global_batch_size: int
    remainder: Remainder
    steps_per_epoch: int
    padded_rows_per_epoch: int
    dropped_records_per_epoch: int
    rows_per_device: int
    device_bytes: int | None
    read: Literal["needed", "once"]
    needed: Reads | None
    once: Reads | None
    hosts_with_the_same_rows: tuple[tuple[int, ...], ...]

    @property
    def reads(self) -> Reads:
        """What hosts read as `shard_to` does it: `needed` or `once`."""
        reads = self.needed if self.read == "needed" else self.once
        assert reads is not None
        return reads

    def bytes_of(self, rows: int) -> int | None:
        """The bytes of so many rows, if those of one record are known."""
        return None if self.record_bytes is None else rows * self.record_bytes

    def records(self, host: int, step: int) -> np.ndarray:
        """The records above ``.batch`` that a host reads for a batch, ascending: int64[n].

        A host that has nothing but padding reads one record all the same, once, to learn what
        records look like. It is not counted here.

        Args:
            host: The host.
            step: The batch, from 0; past `steps_per_epoch` it is of a later epoch.

        Raises:
            ShardingError: The host has no device in the mesh.
        """
        layouts = {reads.host: reads.layout for reads in self.reads.hosts}
        if host not in layouts:
            raise ShardingError(
                f"host {host} is not in the mesh.",
                mesh_axes=self.mesh_axes,
                remedy=f"it has {self.num_hosts} hosts, from {min(layouts)} to {max(layouts)}.",
            )
        layout = layouts[host]
        batches = numbered_batches(
            self.num_records, self.global_batch_size, layout.divisor, self.remainder
        )
        batch = batches.pipe(ShardBatch(layout))[step]
        return batch["record"][batch[MASK_KEY]]


def numbered_batches(
    num_records: int, global_batch_size: int, divisor: int, remainder: Remainder
) -> grain.MapDataset:
    """The global batches of a source whose records are their own numbers, padded by the chain.

    The stages are those of `shard_to`, so that a plan can't differ from what will be run.

    Raises:
        ShardingError: There is no batch, or the shards do not divide it and have to.
    """
    records = grain.MapDataset.range(num_records).map(_record).batch(global_batch_size)
    checked = records.pipe(ValidateBatchSize(divisor, must_divide=remainder != "pad"))
    return checked.pipe(PadToDivisible(divisor, remainder=remainder, mask_key=MASK_KEY))


def _record(number: int) -> dict[str, np.ndarray]:
    return {"record": np.asarray(number, np.int64)}
