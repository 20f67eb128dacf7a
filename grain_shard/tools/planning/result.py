"""A plan: the hosts and the rows that they read, in numbers, as tables and as JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
from rich.console import Group
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
    to_text,
)
from grain_shard.training.hardware import HardwareType

_MAX_LINES = 16  # of hosts


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowReads:
    """The rows that one host reads, or that the hosts of a slice read together.

    Attributes:
        hosts: The host, by its JAX process index; or the hosts of the slice that have a device in
            the mesh, ascending.
        slice: The slice.
        rows: The rows of a padded batch that are asked for, as (start, stop), ascending.
        rows_per_step: Rows that are read for a full batch, added up over hosts; padding is not
            read.
        rows_per_epoch: Rows that are read in an epoch.
        bytes_per_step: Bytes that are read for a full batch; None if the bytes of a record
            are unknown.
    """

    hosts: tuple[int, ...]
    slice: int
    rows: tuple[tuple[int, int], ...]
    rows_per_step: int
    rows_per_epoch: int
    bytes_per_step: int | None

    @property
    def host(self) -> int:
        """The first of the hosts."""
        return self.hosts[0]

    def cells(self) -> tuple[str, ...]:
        """The figures as the cells of a table, without the hosts and the slice."""
        return (
            describe_ranges(self.rows),
            f"{self.rows_per_step:,}",
            describe_bytes(self.bytes_per_step),
            f"{self.rows_per_epoch:,}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reads:
    """The rows that all hosts read, with one setting of `read`.

    Attributes:
        read: "needed" or "once".
        divisor: Shards along the rows of a batch, or of a microbatch.
        padded_batch_size: Rows of a batch with its padding.
        amplification: How many hosts read a row, on average: the rows that all hosts read for a
            batch, over the rows of the batch.
        hosts: Each host, ascending.
        slices: Each slice, ascending.
    """

    read: Literal["needed", "once"]
    divisor: int
    padded_batch_size: int
    amplification: float
    hosts: tuple[RowReads, ...] = dataclasses.field(repr=False)
    slices: tuple[RowReads, ...] = dataclasses.field(repr=False)

    def hosts_by_rows(self) -> dict[tuple[tuple[int, int], ...], tuple[int, ...]]:
        """The hosts that ask for the same rows, by these rows; first hosts ascending."""
        found: dict[tuple[tuple[int, int], ...], tuple[int, ...]] = {}
        for host in self.hosts:
            found[host.rows] = (*found.get(host.rows, ()), host.host)
        return found


@dataclasses.dataclass(frozen=True, repr=False)
class Plan(InNotebooks):
    """The result of `plan`. Printed, it is a table; in a notebook too.

    Example:
        >>> from grain_shard import hosts_mesh, plan
        >>> mesh = hosts_mesh({"data": 8}, hosts=4, devices_per_host=2)
        >>> planned = plan(mesh, global_batch_size=14, num_records=1400)
        >>> planned.reads.hosts[3].rows
        ((12, 16),)
        >>> print(planned.warnings[0])
        every batch has 2 rows of padding, as 8 shards do not divide 14. Use a global batch of 16
        rows.

    Attributes:
        device_kind: As JAX calls it.
        hardware: The chip, as far as its critical batch is known.
        num_devices: Devices in the mesh.
        num_hosts: Hosts that have one of them.
        num_slices: Slices that have one of them.
        mesh: The size of every mesh axis.
        specs: The distinct specs of the leaves.
        num_records: Records of an epoch.
        record_bytes: Bytes of one record in the batch; None if not said.
        global_batch_size: Rows of a batch before padding.
        remainder: As for `shard_to`.
        microbatches: As for `shard_to`.
        steps_per_epoch: Batches of an epoch.
        padded_rows_per_epoch: Rows of an epoch that hold no record.
        dropped_records_per_epoch: Records that come in no batch.
        rows_per_device: Rows of one shard, padding included; of several specs, under the one that
            cuts the rows most. With microbatches, of one of them.
        device_bytes: Bytes of a batch on one device, at most: where a spec cuts other dims than
            the rows too, there are fewer. None without `record_bytes`.
        read: The choice of `shard_to`.
        needed: The reads with ``read="needed"``.
        once: The reads with ``read="once"``. None if the devices do not divide the batch.
        hosts_with_the_same_rows: Groups of hosts whose devices hold the same rows.
        rows_read_again: Rows of a full batch that slices read although another slice reads them,
            too, added up over the slices. These rows would cross the data-centre network if each
            was read in one slice only; now none crosses it.
        bytes_read_again: Their bytes; None without `record_bytes`.
        warnings: Sentences that end with the change to make.
    """

    device_kind: str
    hardware: HardwareType
    num_devices: int
    num_hosts: int
    num_slices: int
    mesh: Mapping[str, int]
    specs: tuple[str, ...]
    num_records: int
    record_bytes: int | None
    global_batch_size: int
    remainder: Remainder
    microbatches: int | None
    steps_per_epoch: int
    padded_rows_per_epoch: int
    dropped_records_per_epoch: int
    rows_per_device: int
    device_bytes: int | None
    read: Literal["needed", "once"]
    needed: Reads
    once: Reads | None
    hosts_with_the_same_rows: tuple[tuple[int, ...], ...]
    rows_read_again: int
    bytes_read_again: int | None
    warnings: tuple[str, ...] = ()

    @property
    def reads(self) -> Reads:
        """The reads that `shard_to` chooses: `needed` or `once`."""
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
        held = min(self.global_batch_size, self.num_records - first)
        return first + rows[rows < held]

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain JSON."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=lambda chip: chip.value))

    def __repr__(self) -> str:
        return (
            f"Plan({self.num_devices} x {self.device_kind} on {self.num_hosts} hosts,"
            f" mesh=({describe_mesh(self.mesh.items())}), specs=({', '.join(self.specs)}),"
            f" steps_per_epoch={self.steps_per_epoch}, read={self.read!r},"
            f" warnings=<{len(self.warnings)}>)"
        )

    def __str__(self) -> str:
        return to_text(self)

    def __rich__(self) -> Any:
        """All tables of the plan, with the hosts shortened to a screen."""
        ways = [reads for reads in (self.needed, self.once) if reads is not None]
        parts: list[Any] = [
            FittingTable(["the job", ""], self._job_lines(), left=2),
            FittingTable(
                ["reading", "times each row is read", "rows a host reads a step", "bytes", ""],
                map(self._reading_line, ways),
                left=1,
            ),
        ]
        columns = ["rows of a batch", "read a step", "bytes a step", "read an epoch"]
        if self.num_slices > 1:
            parts.append(FittingTable(["slice", "hosts", *columns], self._slice_lines(), left=3))
        parts.append(FittingTable(["host", *columns], self._host_lines(), left=2))
        for warning in self.warnings:
            text = Text.assemble(("warning: ", "bold yellow"), warning)
            parts.append(Padding(text, (0, 2)))
        return Group(*parts)

    def _job_lines(self) -> Iterator[tuple[str, str]]:
        axes = describe_mesh(self.mesh.items()) or "none"
        hosts = f"{self.num_hosts:,} hosts"
        hosts += f" in {self.num_slices} slices" if self.num_slices > 1 else ""
        yield "devices", f"{self.num_devices:,} x {self.device_kind} on {hosts}"
        yield "mesh", f"{axes}; batch {', '.join(self.specs) or 'on one device'}"
        rows, size = self.global_batch_size, self.reads.padded_batch_size
        padding = f", padded to {size:,}" if size > rows else ""
        cut = "" if self.microbatches is None else f" of each of {self.microbatches} microbatches"
        yield "batch", f"{rows:,} rows{padding}; {self.rows_per_device:,}{cut} on each device"
        if self.device_bytes is not None:
            # Two is the default of shard_to's device_buffer_size.
            one, two = map(describe_bytes, (self.device_bytes, 2 * self.device_bytes))
            yield "device memory", f"{one} a batch, {two} for two that wait"
        ends = f"{self.padded_rows_per_epoch:,} rows of padding"
        if self.dropped_records_per_epoch:
            ends += f", {self.dropped_records_per_epoch:,} records dropped"
        yield "epoch", f"{self.steps_per_epoch:,} steps for {self.num_records:,} records; {ends}"
        groups, same = self.hosts_with_the_same_rows, "on no two hosts"
        if groups:
            same = f"{len(groups)} groups of hosts, the first: {describe_few(groups[0])}"
        yield "same rows", same
        if self.num_slices > 1:
            yield "between slices", f"nothing is exchanged: {self._read_again()}"

    def _read_again(self) -> str:
        if not self.rows_read_again:
            return "each slice reads rows of its own"
        of_bytes = self.bytes_read_again
        size = "" if of_bytes is None else f" ({describe_bytes(of_bytes)})"
        return f"{self.rows_read_again:,} rows{size} a step are read again where they are needed"

    def _slice_lines(self) -> Iterator[tuple[str, ...]]:
        for of_slice in self.reads.slices[:_MAX_LINES]:
            first, last = of_slice.hosts[0], of_slice.hosts[-1]
            in_a_row = last - first == len(of_slice.hosts) - 1 > 1
            hosts = f"{first} to {last}" if in_a_row else describe_few(of_slice.hosts)
            yield str(of_slice.slice), hosts, *of_slice.cells()

    def _reading_line(self, reads: Reads) -> tuple[str, ...]:
        most = max(reads.hosts, key=lambda host: host.rows_per_step)
        return (
            f'read="{reads.read}"',
            f"{reads.amplification:.3g}",
            f"{most.rows_per_step:,}",
            describe_bytes(most.bytes_per_step),
            "<- .shard_to" if reads.read == self.read else "",
        )

    def _host_lines(self) -> Iterator[tuple[str, ...]]:
        """Yields a line for each group of hosts that read the same, as many as fit a screen."""
        cells = {reads.host: reads.cells() for reads in self.reads.hosts}
        lines = list(self.reads.hosts_by_rows().values())
        for hosts in lines[:_MAX_LINES]:
            yield describe_few(hosts), *cells[hosts[0]]
        if rest := sum(map(len, lines[_MAX_LINES:])):
            yield f"{rest:,} more", "", "", "", ""
