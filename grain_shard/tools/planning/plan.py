"""`plan`: what every host of a job will read, without the job.

It asks what `shard_to` asks: `ShardingTree` for who holds which rows and whether to read them once,
the stages of the chain for the number and size of batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import grain
import numpy as np
from jax.sharding import NamedSharding

from grain_shard.chain import check_read
from grain_shard.errors import ShardingError, describe_spec, require_int
from grain_shard.reading.pad_batch import Remainder
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.slices import slice_of
from grain_shard.sharding.specs import num_shards
from grain_shard.tools.planning.result import HostReads, Plan, Reads, SliceReads
from grain_shard.tools.planning.warnings import find_warnings
from grain_shard.training.hardware import HardwareType, detect_hardware
from grain_shard.transforms.pad import PadToDivisible
from grain_shard.transforms.validate import ValidateBatchSize


def plan(
    mesh_or_sharding: Any,
    spec: Any = None,
    *,
    global_batch_size: int,
    num_records: int,
    record_bytes: int | None = None,
    remainder: Remainder = "pad",
    microbatches: int | None = None,
    read: Literal["auto", "needed", "once"] = "auto",
    hardware: HardwareType | None = None,
) -> Plan:
    """Plans the reads of each host, for a random-access pipeline that ends in `shard_to`.

    Nothing is read, and no JAX backend starts: the mesh may be of a slice that is not there.

    Args:
        mesh_or_sharding: As for `shard_to`: the mesh of the job, or one that `topology_mesh` or
            `hosts_mesh` makes.
        spec: As for `shard_to`.
        global_batch_size: Rows of ``.batch``, of all hosts together.
        num_records: Records of an epoch.
        record_bytes: Bytes of one record, as it is in the batch.
        remainder: As for `shard_to`.
        microbatches: As for `shard_to`.
        read: As for `shard_to`.
        hardware: The chip, for the advice on the batch size; None finds it by the devices.

    Raises:
        ShardingError: Mesh, spec and batch size do not fit together; what `shard_to` would raise.

    Example:
        >>> from grain_shard import hosts_mesh
        >>> mesh = hosts_mesh({"data": 4, "model": 4}, hosts=8, devices_per_host=2)
        >>> planned = plan(mesh, global_batch_size=64, num_records=1000)
        >>> planned.steps_per_epoch, planned.needed.amplification, planned.read
        (16, 2.0, 'once')
        >>> planned.records(host=7, step=15)  # the last batch has 40 records
        array([], dtype=int64)
    """
    require_int("global_batch_size", global_batch_size, 1)
    require_int("num_records", num_records, 0)
    if record_bytes is not None:
        require_int("record_bytes", record_bytes, 1)
    check_read(read)
    target = ShardingTree.of(mesh_or_sharding, spec, microbatches=microbatches)
    read = target.way_to_read(read, global_batch_size)
    size = next(iter(target.layouts().values())).padded(global_batch_size)  # the same for any host
    steps = _num_batches(num_records, global_batch_size, target, remainder)
    held_records = min(num_records, steps * global_batch_size)

    devices = set[Any]().union(*(s.device_set for s in target.shardings()))
    slice_of_host = {device.process_index: slice_of(device) for device in devices}

    def bytes_of(rows: int) -> int | None:
        return None if record_bytes is None else rows * record_bytes

    def reads(mode: Literal["needed", "once"], shardings: ShardingTree) -> Reads:
        layouts = shardings.layouts()
        first = next(iter(layouts.values()))
        full, rest = divmod(held_records, global_batch_size)
        hosts = []
        for host, layout in layouts.items():
            # The rows of a batch that hold a record are its first ones.
            held = np.searchsorted(layout.rows(size), [global_batch_size, rest])
            of_full, of_last = held.tolist()
            hosts.append(
                HostReads(
                    host=host,
                    slice=slice_of_host[host],
                    rows=tuple(layout.ranges(size)),
                    rows_per_step=of_full,
                    rows_per_epoch=full * of_full + of_last,
                    bytes_per_step=bytes_of(of_full),
                )
            )
        slices = [
            _together(number, [host for host in hosts if host.slice == number], bytes_of)
            for number in sorted(set(slice_of_host.values()))
        ]
        amplification = first.amplification
        return Reads(mode, first.divisor, size, amplification, tuple(hosts), tuple(slices))

    needed = reads("needed", target)
    try:
        target.way_to_read("once", global_batch_size)
        once = reads("once", target.spread())
    except ShardingError:
        once = None
    named = [s for s in target.shardings() if isinstance(s, NamedSharding)]
    blocks = [num_shards(sharding) for sharding in named] or [1]
    device = next(iter(devices))
    as_it_is = needed if once is None or read == "needed" else once
    read_again = sum(
        min(stop, global_batch_size) - min(start, global_batch_size)
        for of_slice in as_it_is.slices
        for start, stop in of_slice.rows
    )
    read_again -= global_batch_size  # each row is read in one slice at least
    planned = Plan(
        device_kind=device.device_kind,
        hardware=hardware or detect_hardware(device),
        num_devices=len(devices),
        num_hosts=len(needed.hosts),
        num_slices=len(needed.slices),
        mesh=dict(target.mesh_axes),
        specs=tuple(dict.fromkeys(describe_spec(s.spec) for s in named)),
        num_records=num_records,
        record_bytes=record_bytes,
        global_batch_size=global_batch_size,
        remainder=remainder,
        steps_per_epoch=steps,
        padded_rows_per_epoch=steps * size - held_records,
        dropped_records_per_epoch=num_records - held_records,
        microbatches=microbatches,
        rows_per_device=size // (microbatches or 1) // max(blocks),
        device_bytes=bytes_of(size // min(blocks)),
        read=read,
        needed=needed,
        once=once,
        hosts_with_the_same_rows=tuple(
            tuple(host.host for host in hosts) for hosts in needed.groups() if len(hosts) > 1
        ),
        rows_read_again=read_again,
        bytes_read_again=bytes_of(read_again),
    )
    return dataclasses.replace(planned, warnings=tuple(find_warnings(planned)))


def _together(
    number: int, hosts: Sequence[HostReads], bytes_of: Callable[[int], int | None]
) -> SliceReads:
    rows_per_step = sum(host.rows_per_step for host in hosts)
    return SliceReads(
        slice=number,
        hosts=tuple(host.host for host in hosts),
        rows=tuple(_united(rows for host in hosts for rows in host.rows)),
        rows_per_step=rows_per_step,
        rows_per_epoch=sum(host.rows_per_epoch for host in hosts),
        bytes_per_step=bytes_of(rows_per_step),
    )


def _united(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same rows as ranges that are ascending and do not touch each other."""
    found: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return found


def _num_batches(
    num_records: int, global_batch_size: int, target: ShardingTree, remainder: Remainder
) -> int:
    """The number of batches, which the stages of `shard_to` tell.

    Raises:
        ShardingError: There is none, or the shards do not divide it and have to.
    """
    layout = next(iter(target.layouts().values()))
    divide = ValidateBatchSize(
        layout.divisor, must_divide=remainder != "pad", microbatches=layout.microbatches
    )
    ds = grain.MapDataset.range(num_records).map(lambda i: {"record": i}).batch(global_batch_size)
    try:
        return len(ds.pipe(divide).pipe(PadToDivisible(layout.multiple, remainder=remainder)))
    except ShardingError as error:
        raise error.with_mesh(target.mesh_axes) from None
