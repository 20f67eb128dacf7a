"""`Plan`: what every host of a job will read; the values that `plan` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import grain
import numpy as np

from grain_shard.chain import padded
from grain_shard.errors import ShardingError
from grain_shard.hardware import HardwareType
from grain_shard.planning.plan_text import plan_table
from grain_shard.planning.plan_warnings import find_warnings
from grain_shard.reading.pad_batch import Remainder
from grain_shard.sharding.layout import BatchLayout
from grain_shard.showing.rich_output import to_html, to_text
from grain_shard.transforms.shard_batch import ShardBatch

_MASK_KEY = "valid_mask"


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
        amplification: Rows that all hosts ask for together, over the rows of the batch: k.
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


@dataclass(frozen=True)
class Plan:
    """What `plan` found. Printed, it is a table; in a notebook too.

    Example:
        >>> from grain_shard import hosts_mesh, plan
        >>> mesh = hosts_mesh({"data": 8}, hosts=4, devices_per_host=2)
        >>> planned = plan(mesh, global_batch_size=14, num_records=1400)
        >>> planned.reads.hosts[3].layout.ranges(planned.reads.padded_batch_size)
        [(12, 16)]
        >>> print(planned.warnings[0])
        every batch has 2 rows of padding, as 8 shards do not divide 14. Use a global batch of 16
        rows.

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

    @property
    def warnings(self) -> tuple[str, ...]:
        """What to think over, in sentences."""
        return find_warnings(self)

    def records(self, host: int, step: int) -> np.ndarray:
        """The records above ``.batch`` that a host reads for a batch, ascending: int64[n].

        Not counted is the one record that a host with nothing but padding looks at, once, to learn
        the structure of records.

        Args:
            host: The host.
            step: The batch, from 0; past `steps_per_epoch` it is of a later epoch.
        """
        layouts = {reads.host: reads.layout for reads in self.reads.hosts}
        if host not in layouts:
            raise ShardingError(
                f"host {host} is not in the mesh.",
                mesh_axes=self.mesh_axes,
                remedy=f"it has {self.num_hosts} hosts, from {min(layouts)} to {max(layouts)}.",
            )
        divisor = layouts[host].divisor
        batches = numbered(self.num_records, self.global_batch_size, divisor, self.remainder)
        rows = batches.pipe(ShardBatch(layouts[host]))[step]
        return rows["record"][rows[_MASK_KEY]]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON; rows are lists of [start, stop]."""
        return {
            "device_kind": self.device_kind,
            "hardware": self.hardware.value,
            "num_devices": self.num_devices,
            "num_hosts": self.num_hosts,
            "mesh": dict(self.mesh_axes),
            "specs": list(self.specs),
            "num_records": self.num_records,
            "record_bytes": self.record_bytes,
            "global_batch_size": self.global_batch_size,
            "remainder": self.remainder,
            "steps_per_epoch": self.steps_per_epoch,
            "padded_rows_per_epoch": self.padded_rows_per_epoch,
            "dropped_records_per_epoch": self.dropped_records_per_epoch,
            "rows_per_device": self.rows_per_device,
            "device_bytes": self.device_bytes,
            "read": self.read,
            "needed": self._reads_to_dict(self.needed),
            "once": self._reads_to_dict(self.once),
            "hosts_with_the_same_rows": [list(group) for group in self.hosts_with_the_same_rows],
            "warnings": list(self.warnings),
        }

    def _reads_to_dict(self, reads: Reads | None) -> dict[str, Any] | None:
        if reads is None:
            return None
        size = reads.padded_batch_size
        return {
            "padded_batch_size": size,
            "amplification": reads.amplification,
            "hosts": [
                {
                    "host": host.host,
                    "rows": [list(rows) for rows in host.layout.ranges(size)],
                    "rows_per_step": host.rows_per_step,
                    "bytes_per_step": self.bytes_of(host.rows_per_step),
                    "rows_per_epoch": host.rows_per_epoch,
                }
                for host in reads.hosts
            ],
        }

    def bytes_of(self, rows: int) -> int | None:
        """The bytes of so many records, if those of one are known."""
        return None if self.record_bytes is None else rows * self.record_bytes

    def __repr__(self) -> str:
        axes = ", ".join(f"{name}={size}" for name, size in self.mesh_axes)
        return (
            f"Plan({self.num_devices} x {self.device_kind} on {self.num_hosts} hosts,"
            f" mesh=({axes}), specs=({', '.join(self.specs)}), steps_per_epoch="
            f"{self.steps_per_epoch}, read={self.read!r}, warnings=<{len(self.warnings)}>)"
        )

    def __rich__(self) -> Any:
        return plan_table(self)

    def __str__(self) -> str:
        return to_text(self)

    def _repr_html_(self) -> str:
        return to_html(self)


def numbered(
    num_records: int, global_batch_size: int, divisor: int, remainder: Remainder
) -> grain.MapDataset:
    """The pipeline, up to padding, of a source whose records are their own numbers.

    Raises:
        ShardingError: There is no batch, or the shards do not divide it and have to.
    """
    records = grain.MapDataset.range(num_records).map(_record).batch(global_batch_size)
    return padded(records, divisor, remainder, _MASK_KEY)


def _record(number: int) -> dict[str, np.ndarray]:
    return {"record": np.asarray(number, np.int64)}
