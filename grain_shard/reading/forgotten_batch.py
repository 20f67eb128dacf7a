"""Detects a missing ``.batch``, without which the first dim of a record is taken for rows."""

from __future__ import annotations

import warnings

import grain

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.grain_inside import nodes
from grain_shard.trees import FlatBatch


def refuse_records(ds: grain.MapDataset | grain.IterDataset, element: FlatBatch) -> None:
    """Raises an error if an element is a record, not a batch, and warns if it may be a record.

    A pipeline with a ``.batch`` passes. In any other pipeline, an element with a scalar beside
    arrays is a record. An element without a scalar may be a record or a batch, and a random-access
    pipeline gets a warning.

    The source of a pipeline that begins with a `grain.IterDataset`, such as `from_iterable`, may
    yield batches, in which a scalar is a number for all rows. So a scalar only warns there.

    Args:
        ds: The pipeline.
        element: An element of the pipeline.

    Raises:
        ShardingError: The element is a record.
    """
    if nodes.makes_batches(ds):
        return
    may_be_batch = nodes.begins_with_stream(ds)
    for path, array in zip(element.paths, element.arrays, strict=True):
        if array.ndim:
            continue
        if may_be_batch:
            warnings.warn(
                f"{path} is {describe_leaf(array)}, a number for all {element.rows} rows of the"
                " batch. If the element is a single record, call .batch(global_batch_size) before"
                " .shard_to.",
                stacklevel=2,
            )
        else:
            raise ShardingError(
                "the pipeline has no .batch, so each record would be split along dim 0, like a"
                " batch of rows. But this leaf is a scalar, and has no dim 0.",
                path=path,
                leaf=describe_leaf(array),
                remedy="call .batch(global_batch_size) before .shard_to. If each element is a whole"
                " batch, give this leaf one value per row, or drop the leaf.",
            )
    if isinstance(ds, grain.MapDataset):
        path, array = element.paths[0], element.arrays[0]
        warnings.warn(
            "the pipeline has no .batch, so each element is taken for a whole batch:"
            f" {path} is {describe_leaf(array)}, which is taken for {element.rows} rows. If an"
            " element is a single record, call .batch(global_batch_size) before .shard_to.",
            stacklevel=2,
        )
