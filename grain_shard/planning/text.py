"""A plan as tables of rich."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from grain_shard.planning.facts import HostReads, PlanFacts, Reads
from grain_shard.showing.tables import describe_bytes, describe_ranges, table

_MAX_LINES = 16  # of hosts
_MAX_HOSTS = 8  # named in one line


def plan_tables(plan: PlanFacts, warnings: Sequence[str]) -> Any:
    """All that a plan says, the hosts shortened to a screen, and below it the warnings."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.text import Text

    parts: list[Any] = [
        table(["the job", ""], _job_lines(plan), left=2),
        table(
            ["reading", "times each row is read", "rows a host reads a step", "bytes", ""],
            [_reading_line(plan, reads) for reads in (plan.needed, plan.once) if reads is not None],
            left=1,
        ),
        table(
            ["host", "rows of a batch", "read a step", "bytes a step", "read an epoch"],
            _host_lines(plan),
            left=2,
        ),
    ]
    for warning in warnings:
        text = Text("warning: ", style="bold yellow").append(warning, style="not bold default")
        parts.append(Padding(text, (0, 2)))
    return Group(*parts)


def _job_lines(plan: PlanFacts) -> Iterator[tuple[str, str]]:
    axes = ", ".join(f"{name}={size}" for name, size in plan.mesh_axes) or "none"
    yield "devices", f"{plan.num_devices:,} x {plan.device_kind} on {plan.num_hosts:,} hosts"
    yield "mesh", f"{axes}; batch {', '.join(plan.specs) or 'on one device'}"
    size = plan.reads.padded_batch_size
    padding = f", padded to {size:,}" if size > plan.global_batch_size else ""
    yield (
        "batch",
        f"{plan.global_batch_size:,} rows{padding}; {plan.rows_per_device:,} on each device",
    )
    if plan.device_bytes is not None:
        # Two is the default of shard_to's device_buffer_size.
        one, two = map(describe_bytes, (plan.device_bytes, 2 * plan.device_bytes))
        yield "device memory", f"{one} a batch, {two} for two that wait"
    ends = f"{plan.padded_rows_per_epoch:,} rows of padding"
    if plan.dropped_records_per_epoch:
        ends += f", {plan.dropped_records_per_epoch:,} records dropped"
    yield "epoch", f"{plan.steps_per_epoch:,} steps for {plan.num_records:,} records; {ends}"
    if groups := plan.hosts_with_the_same_rows:
        yield "same rows", f"{len(groups)} groups of hosts, the first: {_hosts(groups[0])}"
    else:
        yield "same rows", "on no two hosts"


def _reading_line(plan: PlanFacts, reads: Reads) -> tuple[str, ...]:
    return (
        f'read="{reads.read}"',
        f"{reads.amplification:.3g}",
        f"{reads.rows_per_step:,}",
        describe_bytes(plan.bytes_of(reads.rows_per_step)),
        "<- .shard_to" if reads.read == plan.read else "",
    )


def _host_lines(plan: PlanFacts) -> Iterator[tuple[str, ...]]:
    """One line for the hosts that read the same, as many as fit a screen."""
    groups: dict[tuple[int, ...], list[HostReads]] = {}
    for host in plan.reads.hosts:
        groups.setdefault(host.layout.shards, []).append(host)
    lines = sorted(groups.values(), key=lambda hosts: hosts[0].host)
    for hosts in lines[:_MAX_LINES]:
        first = hosts[0]
        yield (
            _hosts([host.host for host in hosts]),
            describe_ranges(first.layout.ranges(plan.reads.padded_batch_size)),
            f"{first.rows_per_step:,}",
            describe_bytes(plan.bytes_of(first.rows_per_step)),
            f"{first.rows_per_epoch:,}",
        )
    if len(lines) > _MAX_LINES:
        rest = sum(len(hosts) for hosts in lines[_MAX_LINES:])
        yield f"{rest:,} more", "", "", "", ""


def _hosts(hosts: Sequence[int]) -> str:
    shown = ", ".join(map(str, hosts[:_MAX_HOSTS]))
    more = len(hosts) - _MAX_HOSTS
    return f"{shown}, {more} more" if more > 0 else shown
