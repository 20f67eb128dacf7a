"""Warnings about a plan. Each names a problem, and the change to make."""

from __future__ import annotations

from collections.abc import Iterator

from grain_shard.sharding.layout import round_up
from grain_shard.tools.planning.result import Plan
from grain_shard.training.hardware import HardwareType

# There is a warning if at least this share of an epoch is padding, or is dropped. With less, a
# change would gain next to nothing.
_NOTABLE = 0.01


def find_warnings(plan: Plan, hardware: HardwareType | None) -> Iterator[str]:
    """Yields the warnings of a plan, one text each.

    Args:
        plan: The plan.
        hardware: The chip that the user has named, for a warning about too few rows on a device;
            None for no such warning. Only the user knows whether a row is one example or a
            sequence of tokens, so only the user can ask for it.
    """
    size, divisor = plan.reads.padded_batch_size, plan.reads.divisor
    if plan.reads.amplification > 1:
        yield (
            f"each row is read {plan.reads.amplification:.3g} times, because a mesh axis that does"
            " not shard the batch spans hosts. Order the devices of the mesh so that a host has all"
            " devices of that axis, or shard the batch over it, too: name the axis in the first"
            " entry of the spec."
        )
    if hardware not in (None, HardwareType.UNKNOWN, HardwareType.CPU):
        shortfall = hardware.shortfall(plan.rows_per_device)
        if shortfall is not None:
            yield f"rows per device: {shortfall} (If a row has many tokens, count tokens.)"
    if size > plan.global_batch_size:
        yield (
            f"every batch has {size - plan.global_batch_size} rows of padding, because"
            f" {plan.global_batch_size} rows do not split into {divisor} shards. Use"
            f" a global batch of {round_up(plan.global_batch_size, divisor)} rows."
        )
    # The warning above is about the padding that every batch has. All further padding is in the
    # short last batch of an epoch.
    in_last = plan.padded_rows_per_epoch - plan.steps_per_epoch * (size - plan.global_batch_size)
    share = in_last / (plan.steps_per_epoch * size)
    if plan.num_records < plan.global_batch_size:  # the only batch is the last one
        yield (
            f"a batch of {plan.global_batch_size:,} rows takes more than the {plan.num_records:,}"
            " records of an epoch. Use a smaller batch size, or repeat the records before .batch"
            " (.repeat(epochs).batch(B))."
        )
    elif share >= _NOTABLE:
        yield (
            f"{share:.1%} of an epoch's rows are padding of its last batch. Repeat the records"
            " before .batch (.repeat(epochs).batch(B)), so that only the last epoch is padded."
        )
    dropped = plan.dropped_records_per_epoch / plan.num_records
    if dropped >= _NOTABLE:
        yield (
            f'{dropped:.1%} of the records are in no batch, because of remainder="drop". Use'
            ' remainder="pad", or repeat the records before .batch.'
        )
    if idle := sum(host.rows_per_step == 0 for host in plan.reads.hosts):
        yield (
            f"{idle} of {plan.num_hosts} hosts hold only rows of padding. Use a larger batch size."
        )
