"""A check for streams that would lose epochs after a restore."""

from __future__ import annotations

import grain

from grain_shard.errors import ShardingError
from grain_shard.grain_inside import nodes


def refuse_lost_epochs(ds: grain.IterDataset) -> None:
    """Refuses a repeated interleave, whose restore Grain gets wrong.

    Restored after its first epoch, Grain's `RepeatIterDataset` over interleaved streams ends with
    the current epoch and raises nothing. ``.mp_prefetch`` interleaves its workers' streams.

    Args:
        ds: The stream.

    Raises:
        ShardingError: The stream has interleaved streams below a `RepeatIterDataset`.
    """
    if nodes.repeats_interleaved(ds):
        raise ShardingError(
            "a RepeatIterDataset repeats interleaved streams (.mp_prefetch interleaves those of its"
            " workers). Grain loses the later epochs of such a stream when it is restored.",
            remedy="repeat below: RepeatIterDataset(ds, n).mp_prefetch(...), each stream before it"
            " is interleaved, or .repeat(n) on the MapDataset that the stream begins with.",
        )
