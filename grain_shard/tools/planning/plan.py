"""`plan`: the rows that every host of a job will read, without the job.

It asks what `shard_to` asks: `ShardingTree` for who holds which rows and whether to read them once,
the stages of the chain for the number and size of batches.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, get_args

import grain
import numpy as np

from grain_shard.errors import ShardingError, describe_spec, require_choice, require_int
from grain_shard.reading.padding import Remainder
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.sharding_tree import Read, ShardingTree
from grain_shard.sharding.slices import slice_of
from grain_shard.sharding.specs import num_shards
from grain_shard.tools.planning.result import Plan, Reads, RowReads
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
    read: Read = "auto",
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
    require_choice("read", read, get_args(Read))
    target = ShardingTree.of(mesh_or_sharding, spec, microbatches=microbatches)
    read = target.way_to_read(read, global_batch_size)
    layout = next(iter(target.layouts().values()))  # the sizes are the same for any host
    size = layout.padded(global_batch_size)
    steps = _num_batches(num_records, global_batch_size, layout, remainder)
    held_records = min(num_records, steps * global_batch_size)
    full, rest = divmod(held_records, global_batch_size)
    devices = target.devices()
    slice_of_host = {device.process_index: slice_of(device) for device in devices}

    def bytes_of(rows: int) -> int | None:
        return None if record_bytes is None else rows * record_bytes

    def reads(mode: Literal["needed", "once"], layouts: dict[int, BatchLayout]) -> Reads:
        def reads_of(hosts: Sequence[int]) -> RowReads:
            shards = sorted({shard for host in hosts for shard in layouts[host].shards})
            together = dataclasses.replace(layouts[hosts[0]], shards=tuple(shards))
            # The rows of a batch that hold a record are its first ones.
            held = [
                np.searchsorted(layouts[host].rows(size), [global_batch_size, rest])
                for host in hosts
            ]
            of_full, of_last = np.sum(held, axis=0).tolist()
            return RowReads(
                hosts=tuple(hosts),
                slice=slice_of_host[hosts[0]],
                rows=tuple(together.ranges(size)),
                rows_per_step=of_full,
                rows_per_epoch=full * of_full + of_last,
                bytes_per_step=bytes_of(of_full),
            )

        of_slices: dict[int, list[int]] = {}
        for host in layouts:
            of_slices.setdefault(slice_of_host[host], []).append(host)
        first = next(iter(layouts.values()))
        return Reads(
            read=mode,
            divisor=first.divisor,
            padded_batch_size=size,
            amplification=first.amplification,
            hosts=tuple(reads_of([host]) for host in layouts),
            slices=tuple(reads_of(of_slices[number]) for number in sorted(of_slices)),
        )

    needed, once = reads("needed", target.layouts()), None
    with contextlib.suppress(ShardingError):  # the devices need not divide the batch
        target.way_to_read("once", global_batch_size)
        once = reads("once", target.spread().layouts())
    blocks = [num_shards(sharding) for sharding in target.named()] or [1]
    as_it_is = needed if once is None or read == "needed" else once
    read_again = sum(
        min(stop, global_batch_size) - min(start, global_batch_size)
        for of_slice in as_it_is.slices
        for start, stop in of_slice.rows
    )
    read_again -= global_batch_size  # each row is read in one slice at least
    planned = Plan(
        device_kind=devices[0].device_kind,
        hardware=hardware or detect_hardware(devices[0]),
        num_devices=len(devices),
        num_hosts=len(needed.hosts),
        num_slices=len(needed.slices),
        mesh=dict(target.mesh_axes),
        specs=tuple(dict.fromkeys(describe_spec(s.spec) for s in target.named())),
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
            hosts for hosts in needed.hosts_by_rows().values() if len(hosts) > 1
        ),
        rows_read_again=read_again,
        bytes_read_again=bytes_of(read_again),
    )
    return dataclasses.replace(planned, warnings=tuple(find_warnings(planned)))


def _num_batches(
    num_records: int, global_batch_size: int, layout: BatchLayout, remainder: Remainder
) -> int:
    """The number of batches, by the stages of `shard_to`.

    Raises:
        ShardingError: There is none, or the shards do not divide it and have to.
    """
    divide = ValidateBatchSize(
        layout.divisor, must_divide=remainder != "pad", microbatches=layout.microbatches
    )
    ds = grain.MapDataset.range(num_records).map(lambda i: {"record": i}).batch(global_batch_size)
    try:
        return len(ds.pipe(divide).pipe(PadToDivisible(layout.multiple, remainder=remainder)))
    except ShardingError as error:
        raise error.with_mesh(layout.mesh_axes) from None
