"""What the advice has to know of a pipeline besides its times."""

from __future__ import annotations

from typing import Any, NamedTuple

import grain

from grain_shard.transforms.device_put import DevicePutIterDataset
from grain_shard.transforms.shard_batch import ShardBatchMapDataset


class PipelineFacts(NamedTuple):
    """How a pipeline was set up, and what it found out; see `shard_to`.

    Attributes:
        num_workers: Worker processes that make batches.
        cpu_buffer_size: Batches that may wait on the host.
        is_stream: Whether it has no random access.
        reads_once: Whether each row is read on one host, and the devices exchange rows.
        reads_other_rows: Whether this host makes whole batches to keep some of their rows.
        amplification: The rows that all hosts read for a batch, over the rows of the batch.
    """

    num_workers: int = 0
    cpu_buffer_size: int = 4
    is_stream: bool = False
    reads_once: bool = False
    reads_other_rows: bool = False
    amplification: float = 1.0


def pipeline_facts(ds: Any) -> PipelineFacts | None:
    """The facts of a dataset that `shard_to` returned; None for any other iterable."""
    if not isinstance(ds, DevicePutIterDataset):
        return None
    (parent,), put = ds.parents, ds.settings
    return PipelineFacts(
        num_workers=put.num_workers,
        cpu_buffer_size=put.cpu_buffer_size,
        is_stream=not isinstance(parent, grain.MapDataset),
        reads_once=put.final_shardings is not None,
        reads_other_rows=isinstance(parent, ShardBatchMapDataset) and parent.reads_other_rows,
        amplification=put.shardings.layout().amplification,
    )
