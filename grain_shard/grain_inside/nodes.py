"""Facts about the nodes of a Grain pipeline: batch sizes, seeds, index maps.

Grain has no public way to ask a dataset for its batch size or its seed. Every function here may
return "unknown"; its caller then takes a public path that is slower and gives the same batches. The
test suite runs its core with all these hints turned off.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

_BATCH = type(grain.MapDataset.range(1).batch(1))
_ITER_BATCH = type(grain.MapDataset.range(1).to_iter_dataset().batch(1))
_ITER_BATCH_FN = getattr(
    grain.MapDataset.range(1).to_iter_dataset().batch(1), "_batch_fn", object()
)
_BATCH_FN = getattr(grain.MapDataset.range(1).batch(1), "_batch_fn", object())
_REBATCH = getattr(grain.experimental, "RebatchIterDataset", None)
_FILTER = type(grain.MapDataset.range(1).filter(bool))
_ITER_SEED = type(grain.MapDataset.range(1).to_iter_dataset().seed(0))
_READ_AHEAD = type(grain.MapDataset.range(1).to_iter_dataset())
SEED = type(grain.MapDataset.range(1).seed(0))
SLICE = type(grain.MapDataset.range(1)[:1])
try:
    REINDEX = type(grain.MapDataset.range(1).slice([0]))  # pyright: ignore[reportArgumentType]
except ValueError:
    REINDEX = None  # Grain up to 0.2.18 takes no sequence of indices
REPEAT = type(grain.MapDataset.range(1).repeat(1))
MAP = type(grain.MapDataset.range(1).map(str))
RANDOM_MAP = type(grain.MapDataset.range(1).random_map(lambda x, rng: x, seed=0))
MAP_WITH_INDEX = type(grain.MapDataset.range(1).map_with_index(lambda i, x: x))
_SHUFFLES = {
    type(grain.MapDataset.range(1).shuffle(seed=0)),
    getattr(grain.experimental, "WindowShuffleMapDataset", None),
}
# Nodes that make one element from one element, at the same index.
_ELEMENTWISE = (SEED, MAP, RANDOM_MAP, MAP_WITH_INDEX)


@dataclass(frozen=True)
class BatchNode:
    """Facts about the ``.batch(B)`` below a dataset of batches.

    Attributes:
        batches: The node itself.
        above: The nodes above it, from the top down, without a ``.repeat`` that only adds epochs.
        records: The dataset that is batched.
        global_batch_size: B.
        drop_remainder: True if Grain drops the short batch.
        only_stacks: True if a row of the batch depends on its record alone: Grain's default batch
            function, and no ``.map`` after it.
        num_epochs: Epochs of the batch node in the dataset; None if the batches were sliced or
            shuffled.
    """

    batches: grain.MapDataset
    above: tuple[grain.MapDataset, ...]
    records: grain.MapDataset
    global_batch_size: int
    drop_remainder: bool
    only_stacks: bool
    num_epochs: int | None

    def epoch_below(self, epoch: int) -> int:
        """Returns the records' epoch of an epoch of the dataset. Invalid without `num_epochs`."""
        for node in self.above:
            if type(node) is REPEAT:
                epoch %= len(node.parents[0]) // max(1, len(self.batches))
        return epoch

    def batch_index(self, index: int) -> int:
        """Returns the batch node's index of an index of the dataset."""
        for node in self.above:
            if type(node) is REPEAT:
                index %= len(node.parents[0])
            elif chooses_batches(node):
                index = index_below(node)(index)
        return index


def batch_node(ds: grain.MapDataset) -> BatchNode | None:
    """Finds the batch node under maps, seeds, slices, shuffles and repeats, or returns None."""
    node, above, only_stacks, in_order = ds, [], True, True
    try:
        while type(node) is not _BATCH:
            above.append(node)
            if chooses_batches(node):
                index_below(node)  # if this version of Grain has the index map
                in_order = False
            elif type(node) is REPEAT:
                if node._reseed_each_epoch:  # pyright: ignore[reportAttributeAccessIssue]
                    above.pop()
            elif type(node) in _ELEMENTWISE:
                only_stacks = only_stacks and type(node) is SEED
            else:
                return None
            (node,) = node.parents
        size, drop = node._batch_size, node._drop_remainder  # pyright: ignore
        default_batch_fn = node._batch_fn is _BATCH_FN  # pyright: ignore
    except AttributeError:
        return None
    records = node.parents[0]
    batches = len(records) // size if drop else -(-len(records) // size)
    # Grain divides floats, which are inexact if records are repeated without an end. If its length
    # differs by more than that, Grain batches in an unknown way.
    if abs(len(node) - batches) > batches >> 50:
        return None
    return BatchNode(
        batches=node,
        above=tuple(above),
        records=records,
        global_batch_size=size,
        drop_remainder=drop,
        only_stacks=only_stacks and default_batch_fn,
        num_epochs=len(ds) // max(1, len(node)) if in_order else None,
    )


def chooses_batches(node: grain.MapDataset) -> bool:
    """Returns whether a node above ``.batch`` leaves batches out or changes their order."""
    return type(node) in (SLICE, REINDEX, *_SHUFFLES)


def index_below(node: grain.MapDataset) -> Callable[[int], int]:
    """Returns the index map of a shuffle, ``.slice(slice(1, 3))`` or ``.slice([3, 1, 4])``."""
    names = {SLICE: "_sliced_index", REINDEX: "_reindexed_index"}
    return getattr(node, names.get(type(node), "_shuffled_index"))


def iter_batch_size(ds: grain.MapDataset | grain.IterDataset) -> int | None:
    """Returns B of an ``IterDataset.batch(B)`` directly below, or None.

    None for a user's batch function, which may make any number of rows from B elements.
    """
    if type(ds) is not _ITER_BATCH or getattr(ds, "_batch_fn", None) is not _ITER_BATCH_FN:
        return None
    return getattr(ds, "_batch_size", None)


def batch_sizes(ds: grain.MapDataset | grain.IterDataset) -> list[int]:
    """Returns the sizes of all known ``.batch`` nodes of a pipeline, from the last one up, once."""
    sizes = [getattr(n, "_batch_size", None) for n in walk(ds) if type(n) in (_BATCH, _ITER_BATCH)]
    return [size for size in dict.fromkeys(sizes) if size is not None]


def may_make_batches(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether elements may be batches: False for random-access data without a ``.batch``.

    An `IterDataset` without parents, such as a user's own class, may yield batches. A dataset that
    batches without being a ``.batch`` has an attribute ``makes_batches``.
    """
    return any(
        type(node) in (_BATCH, _ITER_BATCH, _REBATCH)
        or getattr(node, "makes_batches", False)
        or (isinstance(node, grain.IterDataset) and not node.parents)
        for node in walk(ds)
    )


def pads_batches(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether the last ``.batch`` of a pipeline pads by Grain's `batch_and_pad`.

    Grain has no public way to ask for that. If its private attribute is missing, the answer is
    False.
    """
    batch_fn = getattr(ds, "_batch_fn", None)
    if batch_fn is None:
        return any(map(pads_batches, ds.parents))
    # The batch function is a functools.partial, whose arguments hold the padded size.
    return getattr(batch_fn, "func", batch_fn) is grain.experimental.batch_and_pad


def repeats_interleaved(ds: grain.IterDataset) -> bool:
    """Returns whether a pipeline repeats a stream that interleaves others."""
    return any(
        type(node) is grain.experimental.RepeatIterDataset
        and any(type(below) is grain.experimental.InterleaveIterDataset for below in walk(node))
        for node in walk(ds)
    )


def below_read_ahead(
    ds: grain.MapDataset | grain.IterDataset,
) -> tuple[grain.MapDataset, tuple[int, int] | None] | None:
    """Finds the dataset below ``.to_iter_dataset(read_options)``; None for any other node.

    Also None above a filter: the elements that it drops are skipped on the way to a stream.

    Returns:
        The `MapDataset` below, and (threads, batches to buffer) if they are not Grain's defaults.
        Grain fills in `ReadOptions()` if none were given, so default options may not be the user's
        wish. They are ignored, because they would take memory for 500 batches.
    """
    while type(ds) in (_ITER_SEED, grain.experimental.WithOptionsIterDataset):
        (ds,) = ds.parents  # these nodes change no element
    return read_ahead(ds)


def read_ahead(
    ds: grain.MapDataset | grain.IterDataset,
) -> tuple[grain.MapDataset, tuple[int, int] | None] | None:
    """Works like `below_read_ahead`, for a node that ``.to_iter_dataset`` itself returned."""
    if type(ds) is not _READ_AHEAD or getattr(ds, "_allow_nones", False):
        return None
    options = getattr(ds, "_read_options", None)
    (parent,) = ds.parents
    assert isinstance(parent, grain.MapDataset)
    if is_filtered(parent):
        return None
    if options is None or options == grain.ReadOptions():
        return parent, None
    return parent, (int(options.num_threads), int(options.prefetch_buffer_size))


def keeps_indices(ds: grain.MapDataset) -> bool:
    """Returns whether element i depends only on element i of the dataset below."""
    return type(ds) in _ELEMENTWISE


def is_filtered(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether a pipeline has a filter, so that some indices are empty."""
    return type(ds) is _FILTER or any(map(is_filtered, ds.parents))


def is_shuffled(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether a pipeline has a shuffle and no repeat: each pass has the same order."""
    found = {type(node) for node in walk(ds)}
    return bool(found & _SHUFFLES) and REPEAT not in found


def walk(ds: Any) -> Iterator[Any]:
    """Yields a dataset and all datasets below it, from the top down."""
    yield ds
    # Interleaved datasets are no parents. ``.mp_prefetch`` interleaves its workers' datasets.
    interleaved = getattr(ds, "_datasets", ())
    for below in (*ds.parents, *(interleaved if isinstance(interleaved, list) else ())):
        yield from walk(below)


def sources(ds: grain.MapDataset | grain.IterDataset) -> list[Any]:
    """Returns the datasets at the beginning of a pipeline, which have no parents."""
    return [node for node in walk(ds) if not node.parents]


def seeds(ds: grain.MapDataset | grain.IterDataset) -> tuple[int, ...]:
    """Returns the seeds that a node was given: ``.seed``, ``.shuffle`` and ``.random_map``."""
    found = [getattr(ds, name, None) for name in ("_seed_rng_seed", "_seed")]
    found.append(getattr(getattr(ds, "_rng_pool", None), "_seed", None))
    return tuple(int(seed) for seed in found if seed is not None)


def source_fingerprint(ds: grain.MapDataset | grain.IterDataset) -> str | None:
    """Returns a source's own fingerprint of its records and their order, if it has one.

    A Hugging Face dataset has a hash, which ``.shuffle(seed=2)`` and ``.shuffle(seed=1)`` change
    differently. It is the same in each run and on each host, if the functions mapped over the
    dataset can be pickled.
    """
    found = getattr(getattr(ds, "_source", None), "_fingerprint", None)
    return found if isinstance(found, str) else None


def parameters(ds: grain.MapDataset | grain.IterDataset) -> tuple[str, ...]:
    """Returns a node's arguments that change the order of records but are not in its text."""
    names = ("_reseed_each_epoch", "_num_epochs", "_window_size", "_proportions")
    of_packing = ("_num_packing_bins", "_length_struct", "_shuffle_bins", "_max_sequences_per_bin")
    values = [getattr(ds, name, None) for name in (*names, *of_packing)]
    selection, splitting = (getattr(ds, name, None) for name in ("_selection_map", "_config"))
    values.append(getattr(selection, "_proportions", None))
    values.append(getattr(splitting, "length_struct", None))
    if type(ds) is REINDEX:  # its text has only the first and the last indices
        values.append(_all_of(getattr(ds, "_indices", ())))
    return tuple(str(value) for value in values)


def _all_of(indices: Sequence[int] | grain.MapDataset) -> str:
    """Returns a text that differs if the indices differ; for a dataset, an identifying text."""
    if isinstance(indices, grain.MapDataset):
        below = ", ".join(map(_all_of, indices.parents))
        own = (str(indices), len(indices), seeds(indices), parameters(indices))
        return f"{own} of ({below})"
    return hashlib.sha256(np.asarray(indices, np.int64).tobytes()).hexdigest()
