"""Checks for a missing ``.batch``: without it a record's first dim would be taken for rows."""

from __future__ import annotations

import warnings

import grain

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.grain_inside import nodes
from grain_shard.trees import FlatBatch


def refuse_records(ds: grain.MapDataset | grain.IterDataset, element: FlatBatch) -> None:
    """Refuses an element that must be a record, and warns of one that may be a record.

    An element with a scalar beside arrays must be a record. Any other element of random access may
    be a record or a batch.

    A pipeline with a ``.batch`` is never refused. Neither is one that begins with a
    `grain.IterDataset`, such as one from `from_iterable`: it may yield batches itself.

    Args:
        ds: The pipeline.
        element: An element of the pipeline.

    Raises:
        ShardingError: The element is a record.
    """
    if nodes.may_make_batches(ds):
        return
    for path, array in zip(element.paths, element.arrays, strict=True):
        if not array.ndim:
            raise ShardingError(
                "the leaf is a single value beside arrays, and no .batch stands in the pipeline:"
                " each record would be cut up as if its first dim were rows.",
                path=path,
                leaf=describe_leaf(array),
                remedy="call .batch(global_batch_size) before .shard_to. If each element is a whole"
                " batch, give this leaf a value for each row, or drop it.",
            )
    if isinstance(ds, grain.MapDataset):
        path, array = element.paths[0], element.arrays[0]
        warnings.warn(
            f"no .batch stands in the pipeline, so each element is taken for a whole batch:"
            f" {path}, {describe_leaf(array)}, for {element.rows} rows. If it is a record, call"
            " .batch(global_batch_size) before .shard_to.",
            stacklevel=2,
        )
