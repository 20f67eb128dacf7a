"""What a plan says: who reads which rows, in numbers, as tables and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import grain
import numpy as np
from rich.jupyter import JupyterMixin

from grain_shard.errors import ShardingError, describe_mesh
from grain_shard.hardware import HardwareType
from grain_shard.reading.pad_batch import Remainder
from grain_shard.sharding.layout import BatchLayout
from grain_shard.showing.tables import (
    describe_bytes,
    describe_few,
    describe_ranges,
    table,
    to_text,
)
from grain_shard.transforms.pad import PadToDivisible
from grain_shard.transforms.shard_batch import ShardBatch
from grain_shard.transforms.validate import ValidateBatchSize
from grain_shard.trees import MASK_KEY

_MAX_LINES = 16  # of hosts


@dataclasses.dataclass(frozen=True)
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


@dataclasses.dataclass(frozen=True)
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
    hosts: tuple[HostReads, ...] = dataclasses.field(repr=False)

    @property
    def rows_per_step(self) -> int:
        """The most rows that any host reads for a batch."""
        return max(host.rows_per_step for host in self.hosts)


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(JupyterMixin):
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
        warnings: What to think over, in sentences.
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
    warnings: tuple[str, ...] = ()

    @property
    def reads(self) -> Reads:
        """What hosts read as `shard_to` does it: `needed` or `once`."""
        reads = self.needed if self.read == "needed" else self.once
        assert reads is not None
        return reads

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

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON; rows are lists of [start, stop]."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        del values["mesh_axes"]
        return values | {
            "hardware": self.hardware.value,
            "mesh": dict(self.mesh_axes),
            "specs": list(self.specs),
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
                    "bytes_per_step": self._bytes_of(host.rows_per_step),
                    "rows_per_epoch": host.rows_per_epoch,
                }
                for host in reads.hosts
            ],
        }

    def __repr__(self) -> str:
        return (
            f"Plan({self.num_devices} x {self.device_kind} on {self.num_hosts} hosts,"
            f" mesh=({describe_mesh(self.mesh_axes)}), specs=({', '.join(self.specs)}),"
            f" steps_per_epoch={self.steps_per_epoch}, read={self.read!r},"
            f" warnings=<{len(self.warnings)}>)"
        )

    def __str__(self) -> str:
        return to_text(self)

    def __rich__(self) -> Any:
        """All that it says, the hosts shortened to a screen."""
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        ways = [reads for reads in (self.needed, self.once) if reads is not None]
        parts: list[Any] = [
            table(["the job", ""], self._job_lines(), left=2),
            table(
                ["reading", "times each row is read", "rows a host reads a step", "bytes", ""],
                map(self._reading_line, ways),
                left=1,
            ),
            table(
                ["host", "rows of a batch", "read a step", "bytes a step", "read an epoch"],
                self._host_lines(),
                left=2,
            ),
        ]
        for warning in self.warnings:
            text = Text("warning: ", style="bold yellow").append(warning, style="not bold default")
            parts.append(Padding(text, (0, 2)))
        return Group(*parts)

    def _job_lines(self) -> Iterator[tuple[str, str]]:
        axes = describe_mesh(self.mesh_axes) or "none"
        yield "devices", f"{self.num_devices:,} x {self.device_kind} on {self.num_hosts:,} hosts"
        yield "mesh", f"{axes}; batch {', '.join(self.specs) or 'on one device'}"
        rows, size = self.global_batch_size, self.reads.padded_batch_size
        padding = f", padded to {size:,}" if size > rows else ""
        yield "batch", f"{rows:,} rows{padding}; {self.rows_per_device:,} on each device"
        if self.device_bytes is not None:
            # Two is the default of shard_to's device_buffer_size.
            one, two = map(describe_bytes, (self.device_bytes, 2 * self.device_bytes))
            yield "device memory", f"{one} a batch, {two} for two that wait"
        ends = f"{self.padded_rows_per_epoch:,} rows of padding"
        if self.dropped_records_per_epoch:
            ends += f", {self.dropped_records_per_epoch:,} records dropped"
        yield "epoch", f"{self.steps_per_epoch:,} steps for {self.num_records:,} records; {ends}"
        if groups := self.hosts_with_the_same_rows:
            yield (
                "same rows",
                f"{len(groups)} groups of hosts, the first: {describe_few(groups[0])}",
            )
        else:
            yield "same rows", "on no two hosts"

    def _reading_line(self, reads: Reads) -> tuple[str, ...]:
        return (
            f'read="{reads.read}"',
            f"{reads.amplification:.3g}",
            f"{reads.rows_per_step:,}",
            describe_bytes(self._bytes_of(reads.rows_per_step)),
            "<- .shard_to" if reads.read == self.read else "",
        )

    def _host_lines(self) -> Iterator[tuple[str, ...]]:
        """One line for the hosts that read the same, as many as fit a screen."""
        groups: dict[tuple[int, ...], list[HostReads]] = {}
        for host in self.reads.hosts:  # ascending, and so are the first hosts of the groups
            groups.setdefault(host.layout.shards, []).append(host)
        lines = list(groups.values())
        for hosts in lines[:_MAX_LINES]:
            first = hosts[0]
            yield (
                describe_few([host.host for host in hosts]),
                describe_ranges(first.layout.ranges(self.reads.padded_batch_size)),
                f"{first.rows_per_step:,}",
                describe_bytes(self._bytes_of(first.rows_per_step)),
                f"{first.rows_per_epoch:,}",
            )
        if len(lines) > _MAX_LINES:
            rest = sum(len(hosts) for hosts in lines[_MAX_LINES:])
            yield f"{rest:,} more", "", "", "", ""

    def _bytes_of(self, rows: int) -> int | None:
        return None if self.record_bytes is None else rows * self.record_bytes


def numbered_batches(
    num_records: int, global_batch_size: int, divisor: int, remainder: Remainder
) -> grain.MapDataset:
    """The global batches of a source whose records are their own numbers, padded by the chain.

    The stages are those of `shard_to`, so that a plan can't differ from what will be run.

    Raises:
        ShardingError: There is no batch, or the shards do not divide it and have to.
    """
    records = grain.MapDataset.range(num_records).map(lambda i: {"record": np.int64(i)})
    batches = records.batch(global_batch_size)
    checked = batches.pipe(ValidateBatchSize(divisor, must_divide=remainder != "pad"))
    return checked.pipe(PadToDivisible(divisor, remainder=remainder, mask_key=MASK_KEY))
