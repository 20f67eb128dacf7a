"""What stands between ``.batch`` and ``.shard_to``, or in the batch function itself."""

from __future__ import annotations

from collections.abc import Iterator

import grain


def all_below(
    ds: grain.MapDataset | grain.IterDataset,
) -> Iterator[grain.MapDataset | grain.IterDataset]:
    """The datasets that a dataset is made of, from the last one on."""
    for parent in ds.parents:
        yield parent
        yield from all_below(parent)


def pads_batches(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Whether the last ``.batch`` of a pipeline has Grain's `batch_and_pad` for its function.

    Grain has no public way to ask for that. Where it hides it, the answer is no.
    """
    batch_fn = getattr(ds, "_batch_fn", None)
    if batch_fn is None:
        return any(map(pads_batches, ds.parents))
    # It comes as a functools.partial, which says how far to pad.
    return getattr(batch_fn, "func", batch_fn) is grain.experimental.batch_and_pad
