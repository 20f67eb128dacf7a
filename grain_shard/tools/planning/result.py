"""`Plan`: the rows that each host reads, in numbers, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from rich.padding import Padding
from rich.text import Text

from grain_shard.errors import ShardingError, describe_mesh
from grain_shard.reading.padding import Remainder
from grain_shard.tools.showing.tables import (
    FittingTable,
    InNotebooks,
    describe_bytes,
    describe_few,
    describe_ranges,
)
from grain_shard.training.hardware import HardwareType

_MAX_LINES = 16  # most lines of hosts in a table


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReads:
    """The rows that one host reads.

    Attributes:
        host: JAX process index of the host.
        rows: The rows of a padded batch that the host holds, as (start, stop) ranges, ascending.
        rows_per_step: Number of rows read for a full batch. Rows of padding are not read.
        rows_per_epoch: Number of rows read in an epoch.
        bytes_per_step: Bytes that are read for a full batch; None if the bytes of a record
            are unknown.
    """

    host: int
    rows: tuple[tuple[int, int], ...]
    rows_per_step: int
    rows_per_epoch: int
    bytes_per_step: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlannedReads:
    """The rows that all hosts read.

    Attributes:
        divisor: Number of shards that the rows of a batch are cut into.
        padded_batch_size: Rows of a batch, padding included.
        amplification: Average number of hosts that read a row: the rows that all hosts read for a
            batch, divided by the rows of the batch.
        hosts: The reads of each host, by process index, ascending.
    """

    divisor: int
    padded_batch_size: int
    amplification: float
    hosts: tuple[RowReads, ...] = dataclasses.field(repr=False)

    def hosts_by_rows(self) -> dict[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """Returns the hosts that hold the same rows, by their ranges of rows.

        A key is the tuple of (start, stop) ranges. A value is the tuple of process indices.
        """
        found: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
        for host in self.hosts:
            found[host.rows] = (*found.get(host.rows, ()), host.host)
        return found


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(InNotebooks):
    """The figures that `plan` returns. A terminal or a notebook shows them as tables.

    Example:
        >>> from grain_shard import hosts_mesh, plan
        >>> mesh = hosts_mesh({"data": 8}, hosts=4, devices_per_host=2)
        >>> planned = plan(mesh, global_batch_size=14, num_records=1400)
        >>> planned.reads.hosts[3].rows
        ((12, 16),)
        >>> print(planned.warnings[0])
        every batch has 2 rows of padding, because 14 rows do not split into 8 shards. Use a
        global batch of 16 rows.

    Attributes:
        device_kind: JAX's name for the kind of device.
        hardware: The chip; `HardwareType.UNKNOWN` if its critical batch size is not known.
        num_devices: Number of devices in the mesh.
        num_hosts: Number of hosts that have a device in the mesh.
        mesh: Size of each mesh axis, by name.
        specs: The distinct specs of the leaves, as text.
        num_records: Number of records of an epoch.
        record_bytes: Bytes of one record in the batch; None if unknown.
        global_batch_size: Rows of a batch before padding.
        remainder: Treatment of a short last batch: "pad", "drop" or "error".
        steps_per_epoch: Number of batches of an epoch.
        padded_rows_per_epoch: Number of rows of an epoch that hold no record.
        dropped_records_per_epoch: Number of records of an epoch that are in no batch.
        rows_per_device: Rows of one shard of a batch, padding included; of the smallest shard if
            there are several specs.
        device_bytes: The maximum number of bytes of a batch on one device. A device holds fewer if
            a spec also shards other dims than the rows. None without `record_bytes`.
        reads: The rows that the hosts read.
        hosts_with_the_same_rows: Groups of two or more hosts whose devices hold the same rows. A
            group is a tuple of process indices.
        warnings: Sentences that describe a problem and the change to make.
    """

    device_kind: str
    hardware: HardwareType
    num_devices: int
    num_hosts: int
    mesh: Mapping[str, int]
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
    reads: PlannedReads
    hosts_with_the_same_rows: tuple[tuple[int, ...], ...]
    warnings: tuple[str, ...] = ()

    def records(self, host: int, step: int) -> np.ndarray:
        """Returns the indices of the records that a host reads for a batch, ascending: int64[n].

        An index is the position of a record in the dataset before ``.batch``. A host whose rows are
        all padding still reads one record, once, to find the structure of records. That record is
        not counted here.

        Args:
            host: JAX process index of the host.
            step: Number of the batch, from 0. Numbers from `steps_per_epoch` on are batches of
                later epochs. The indices of each epoch begin at 0.

        Raises:
            ShardingError: The host has no device in the mesh.
        """
        rows_of = {reads.host: reads.rows for reads in self.reads.hosts}
        if host not in rows_of:
            raise ShardingError(
                f"host {host} is not in the mesh.",
                mesh_axes=self.mesh.items(),
                remedy=f"pass one of its {self.num_hosts} hosts, from {min(rows_of)} to"
                f" {max(rows_of)}.",
            )
        rows = np.concatenate([np.arange(start, stop) for start, stop in rows_of[host]])
        first = step % self.steps_per_epoch * self.global_batch_size
        in_batch = min(self.global_batch_size, self.num_records - first)
        return first + rows[rows < in_batch]  # the other rows are padding

    def to_dict(self) -> dict[str, Any]:
        """Returns all figures of the plan as plain JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=lambda chip: chip.value))

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yields all tables of the plan for `rich`, with at most 16 groups of hosts."""
        yield FittingTable(["the job", ""], self._job_lines(), left=2)
        columns = ["rows of a batch", "read a step", "bytes a step", "read an epoch"]
        yield FittingTable(["host", *columns], self._host_lines(), left=2)
        for warning in self.warnings:
            yield Padding(Text.assemble(("warning: ", "bold yellow"), warning), (0, 2))

    def _job_lines(self) -> Iterator[tuple[str, str]]:
        """Yields the lines of the table about the job: pairs (name, value)."""
        axes = describe_mesh(self.mesh.items()) or "none"
        yield "devices", f"{self.num_devices:,} x {self.device_kind} on {self.num_hosts:,} hosts"
        yield "mesh", f"{axes}; batch {', '.join(self.specs) or 'on one device'}"
        rows, size = self.global_batch_size, self.reads.padded_batch_size
        padding = f", padded to {size:,}" if size > rows else ""
        yield "batch", f"{rows:,} rows{padding}; {self.rows_per_device:,} on each device"
        if self.device_bytes is not None:
            # By default two batches wait on the devices (shard_to's device_buffer_size).
            one, two = map(describe_bytes, (self.device_bytes, 2 * self.device_bytes))
            yield "device memory", f"{one} a batch, {two} for two that wait"
        unused = f"{self.padded_rows_per_epoch:,} rows of padding"
        if self.dropped_records_per_epoch:
            unused += f", {self.dropped_records_per_epoch:,} records dropped"
        yield "epoch", f"{self.steps_per_epoch:,} steps for {self.num_records:,} records; {unused}"
        hosts_per_row = self.reads.amplification
        on = "one host" if hosts_per_row == 1 else f"{hosts_per_row:.3g} hosts"
        most = max(self.reads.hosts, key=lambda host: host.rows_per_step)
        step = f"at most {most.rows_per_step:,} rows of a host in a step"
        if most.bytes_per_step is not None:
            step += f", {describe_bytes(most.bytes_per_step)}"
        yield "reading", f"each row on {on}; {step}"
        if groups := self.hosts_with_the_same_rows:
            first = describe_few(groups[0])
            yield "same rows", f"{len(groups)} groups of hosts, the first: {first}"
        else:
            yield "same rows", "on no two hosts"

    def _host_lines(self) -> Iterator[tuple[str, ...]]:
        """Yields a line for each group of hosts that read the same rows, for the first 16 groups.

        If there are more groups, a last line has the number of all other hosts.
        """
        reads_of = {reads.host: reads for reads in self.reads.hosts}
        lines = list(self.reads.hosts_by_rows().values())
        for hosts in lines[:_MAX_LINES]:
            reads = reads_of[hosts[0]]
            ranges, size = describe_ranges(reads.rows), describe_bytes(reads.bytes_per_step)
            step, epoch = f"{reads.rows_per_step:,}", f"{reads.rows_per_epoch:,}"
            yield describe_few(hosts), ranges, step, size, epoch
        if rest := sum(map(len, lines[_MAX_LINES:])):
            yield f"{rest:,} more", "", "", "", ""
