"""`plan`: the rows that every host of a job will read, computed without the job.

The plan comes from the code that `shard_to` runs. `ShardingTree` gives the rows of each host. The
stages of the chain give the number and size of batches.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import grain

from grain_shard.errors import ShardingError, describe_spec, require_int
from grain_shard.reading.padding import Remainder
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import num_shards
from grain_shard.tools.planning.result import Plan, PlannedReads, RowReads
from grain_shard.tools.planning.topology import UNKNOWN_KIND
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
    hardware: HardwareType | None = None,
) -> Plan:
    """Plans the reads of each host, for a random-access pipeline that ends in `shard_to`.

    Nothing is read and no JAX backend starts, so the devices of the mesh need not exist.

    Args:
        mesh_or_sharding: The mesh of the job, or a mesh from `topology_mesh` or `hosts_mesh`. Or a
            sharding, or a tree prefix of shardings, as for `shard_to`.
        spec: A `PartitionSpec` or a tree prefix of them. None takes the mesh axis "data", or the
            only axis.
        global_batch_size: Rows of ``.batch``, of all hosts together.
        num_records: Number of records of an epoch.
        record_bytes: Bytes of one record in the batch; None if unknown.
        remainder: Treatment of a short last batch: "pad", "drop" or "error".
        hardware: The chip, for a warning if a device holds fewer rows than keep the chip busy. With
            None the devices name the chip, and there is no such warning.

    Returns:
        The plan, to be printed or to be asked for its figures.

    Raises:
        ShardingError: Mesh, spec and batch size do not fit together, so `shard_to` would raise the
            same error. Or an argument is not valid.

    Example:
        >>> from grain_shard import hosts_mesh
        >>> mesh = hosts_mesh({"data": 4, "model": 4}, hosts=8, devices_per_host=2)
        >>> planned = plan(mesh, global_batch_size=64, num_records=1000)
        >>> planned.steps_per_epoch, planned.reads.amplification
        (16, 2.0)
        >>> planned.records(host=7, step=15)  # the last batch has 40 records
        array([], dtype=int64)
    """
    require_int("global_batch_size", global_batch_size, 1)
    require_int("num_records", num_records, 0)
    if record_bytes is not None:
        require_int("record_bytes", record_bytes, 1)
    target = ShardingTree.of(mesh_or_sharding, spec)
    layouts = target.layouts()
    layout = next(iter(layouts.values()))  # any host: only facts that all hosts share are used
    padded_batch_size = layout.padded(global_batch_size)
    steps = _num_batches(num_records, global_batch_size, layout, remainder)
    held_records = min(num_records, steps * global_batch_size)  # without dropped records
    # `rows_of_last` is 0 if the last batch is full.
    full_batches, rows_of_last = divmod(held_records, global_batch_size)
    devices = target.devices()

    def bytes_of(rows: int) -> int | None:
        return None if record_bytes is None else rows * record_bytes

    def reads_of(host: int) -> RowReads:
        rows = tuple(layouts[host].ranges(padded_batch_size))
        rows_per_step = _rows_with_records(rows, global_batch_size)
        in_last = _rows_with_records(rows, rows_of_last)
        return RowReads(
            host=host,
            rows=rows,
            rows_per_step=rows_per_step,
            rows_per_epoch=full_batches * rows_per_step + in_last,
            bytes_per_step=bytes_of(rows_per_step),
        )

    reads = PlannedReads(
        divisor=layout.divisor,
        padded_batch_size=padded_batch_size,
        amplification=layout.amplification,
        hosts=tuple(map(reads_of, layouts)),
    )
    # Leaves may have different specs, and so different numbers of shards of their rows.
    shards = [num_shards(sharding) for sharding in target.named()] or [1]
    kind = devices[0].device_kind
    planned = Plan(
        # Devices that only stand in for real ones do not know their kind.
        device_kind=kind if hardware is None or kind != UNKNOWN_KIND else str(hardware),
        hardware=hardware or detect_hardware(devices[0]),
        num_devices=len(devices),
        num_hosts=len(layouts),
        mesh=dict(target.mesh_axes),
        specs=tuple(dict.fromkeys(describe_spec(s.spec) for s in target.named())),
        num_records=num_records,
        record_bytes=record_bytes,
        global_batch_size=global_batch_size,
        remainder=remainder,
        steps_per_epoch=steps,
        padded_rows_per_epoch=steps * padded_batch_size - held_records,
        dropped_records_per_epoch=num_records - held_records,
        rows_per_device=padded_batch_size // max(shards),
        device_bytes=bytes_of(padded_batch_size // min(shards)),
        reads=reads,
        hosts_with_the_same_rows=tuple(
            hosts for hosts in reads.hosts_by_rows().values() if len(hosts) > 1
        ),
    )
    return dataclasses.replace(planned, warnings=tuple(find_warnings(planned, hardware)))


def _rows_with_records(ranges: Iterable[tuple[int, int]], num_records: int) -> int:
    """Returns how many rows, given as (start, stop) ranges of a padded batch, hold a record.

    The rows from `num_records` on are padding.
    """
    return sum(min(stop, num_records) - min(start, num_records) for start, stop in ranges)


def _num_batches(
    num_records: int, global_batch_size: int, layout: BatchLayout, remainder: Remainder
) -> int:
    """Returns the number of batches of an epoch, computed by the stages of `shard_to`.

    Raises:
        ShardingError: There is no batch. Or `remainder` is not "pad", and the shards do not divide
            the batch size. Or `remainder` is "error", and the last batch is short.
    """
    divide = ValidateBatchSize(layout.divisor, must_divide=remainder != "pad")
    ds = grain.MapDataset.range(num_records).map(lambda i: {"record": i}).batch(global_batch_size)
    try:
        return len(ds.pipe(divide).pipe(PadToDivisible(layout.divisor, remainder=remainder)))
    except ShardingError as error:
        raise error.with_mesh(layout.mesh_axes) from None
