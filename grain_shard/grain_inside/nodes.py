"""Facts about the nodes of a Grain pipeline: batch sizes, seeds, index maps.

Grain has no public way to ask a dataset for its batch size or its seed, so this file reads private
attributes. If this version of Grain lacks one, a function here finds nothing, and its caller uses
Grain's public methods, which give the same batches, but slower. The core of the test suite also
runs with all these facts hidden.
"""

from __future__ import annotations

import hashlib
import math
import numbers
from collections.abc import Callable, Iterator, Mapping, Sequence
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
_ITER_FILTER = type(grain.MapDataset.range(1).to_iter_dataset().filter(bool))
_ZIP = grain.experimental.ZipMapDataset
_ITER_SEED = type(grain.MapDataset.range(1).to_iter_dataset().seed(0))
_READ_AHEAD = type(grain.MapDataset.range(1).to_iter_dataset())
SOURCE = type(grain.MapDataset.source([0]))
RANGE = type(grain.MapDataset.range(1))
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
SHUFFLES = {
    type(grain.MapDataset.range(1).shuffle(seed=0)),
    getattr(grain.experimental, "WindowShuffleMapDataset", None),
}
# Nodes that make element i from element i of their parent.
_ELEMENTWISE = (SEED, MAP, RANDOM_MAP, MAP_WITH_INDEX)
_STREAM = grain.MapDataset.range(1).to_iter_dataset()
# Nodes of a stream that make each element from the last element of their parent.
_ROW_BY_ROW = (
    _ITER_SEED,
    type(_STREAM.map(str)),
    type(_STREAM.map_with_index(lambda i, x: x)),
    type(_STREAM.random_map(lambda x, rng: x, seed=0)),
    type(_STREAM.filter(bool)),
)


@dataclass(frozen=True)
class BatchNode:
    """Facts about the ``.batch(B)`` of a pipeline, and about the nodes that follow it.

    Attributes:
        batches: The node of ``.batch``.
        after: The nodes that follow ``.batch``, from the last one back, except for a ``.repeat``
            that only adds epochs, with records shuffled anew.
        records: The dataset that is batched.
        global_batch_size: The size B of a full batch.
        drop_remainder: True if Grain drops the short batch.
        stacks: True if ``.batch`` has Grain's default batch function.
        only_stacks: True if a row of a batch depends on its record alone: `stacks` is True, and no
            ``.map`` follows.
        num_epochs: Number of times that the pipeline passes over the batches of ``.batch``; None if
            the batches are sliced or shuffled.
    """

    batches: grain.MapDataset
    after: tuple[grain.MapDataset, ...]
    records: grain.MapDataset
    global_batch_size: int
    drop_remainder: bool
    stacks: bool
    only_stacks: bool
    num_epochs: int | None

    def epoch_below(self, epoch: int) -> int:
        """Returns the epoch of `records` that an epoch of the pipeline reads.

        It is an earlier epoch if a ``.repeat`` of the batches reads the same records again. The
        result is invalid if `num_epochs` is None.
        """
        for node in self.after:
            if type(node) is REPEAT:
                epochs_repeated = len(node.parents[0]) // max(1, len(self.batches))
                epoch %= epochs_repeated
        return epoch

    def batch_index(self, index: int) -> int:
        """Converts the index of a batch at the end of the pipeline to its index at ``.batch``."""
        for node in self.after:
            if type(node) is REPEAT:
                index %= len(node.parents[0])
            elif chooses_batches(node):
                index = index_below(node)(index)
        return index


def batch_node(ds: grain.MapDataset) -> BatchNode | None:
    """Finds the ``.batch`` of a pipeline. Maps, seeds, slices, shuffles and repeats may follow it.

    Returns:
        Facts about ``.batch``. None if there is none, if other nodes follow it, or if this version
        of Grain has other private attributes.
    """
    node, after = ds, []
    only_stacks = True  # until a map is found after `.batch`
    in_order = True  # until a slice or a shuffle of batches is found
    try:
        while type(node) is not _BATCH:
            after.append(node)
            if chooses_batches(node):
                index_below(node)  # raises an AttributeError if Grain has no such function
                in_order = False
            elif type(node) is REPEAT:
                if node._reseed_each_epoch:  # pyright: ignore[reportAttributeAccessIssue]
                    after.pop()  # it only adds epochs; see `BatchNode.after`
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
    # If Grain counts the batches differently, it batches in an unknown way. A small difference is
    # allowed: Grain divides floats, which is inexact if records are repeated without end.
    if abs(len(node) - batches) > int(batches) >> 50:
        return None
    return BatchNode(
        batches=node,
        after=tuple(after),
        records=records,
        global_batch_size=size,
        drop_remainder=drop,
        stacks=default_batch_fn,
        only_stacks=only_stacks and default_batch_fn,
        num_epochs=len(ds) // max(1, len(node)) if in_order else None,
    )


def shuffles_by_window(node: grain.MapDataset) -> bool:
    """Returns whether a shuffle moves records within windows. Its last window may repeat some."""
    return type(node) is getattr(grain.experimental, "WindowShuffleMapDataset", None)


def chooses_batches(node: grain.MapDataset) -> bool:
    """Returns whether a node after ``.batch`` may drop batches or change their order."""
    return type(node) in (SLICE, REINDEX, *SHUFFLES)


def index_below(node: grain.MapDataset) -> Callable[[int], int]:
    """Returns the function from an index of a node to the index in the node's parent.

    Args:
        node: A shuffle, a ``.slice(slice(1, 3))`` or a ``.slice([3, 1, 4])``.

    Raises:
        AttributeError: This version of Grain keeps the function elsewhere.
    """
    names = {SLICE: "_sliced_index", REINDEX: "_reindexed_index"}
    return getattr(node, names.get(type(node), "_shuffled_index"))


def iter_batch_size(ds: grain.MapDataset | grain.IterDataset) -> int | None:
    """Returns B if a pipeline ends with ``IterDataset.batch(B)``, otherwise None.

    Returns None, too, if the user gave a batch function, which may make any number of rows from B
    elements.
    """
    if type(ds) is not _ITER_BATCH or getattr(ds, "_batch_fn", None) is not _ITER_BATCH_FN:
        return None
    return getattr(ds, "_batch_size", None)


def records_per_row(ds: grain.IterDataset) -> int | None:
    """Returns n if each element of a stream is a batch of n records; None if that is unknown.

    The stream then ends with ``.batch(n)`` or ``.batch(n).to_iter_dataset()``, with Grain's default
    batch function, and no ``.map`` changes the batches.
    """
    if (found := read_ahead(ds)) is None:
        return iter_batch_size(ds)
    node = batch_node(found[0])
    return node.global_batch_size if node is not None and node.only_stacks else None


def records_per_batch(ds: grain.IterDataset) -> int | None:
    """Returns the number of elements of ``.to_iter_dataset`` that a batch of a stream takes.

    It is 1 if ``.batch`` stands before ``.to_iter_dataset``, and None if no ``.batch`` is known.
    Transformations that pack or drop elements are ignored.
    """
    sizes, node = list[int](), ds
    while node.parents and type(node) is not _BATCH:
        if type(node) is _ITER_BATCH:
            sizes.append(getattr(node, "_batch_size", 1))
        node = node.parents[0]
    return math.prod(sizes) if sizes or type(node) is _BATCH else None


def batch_sizes(ds: grain.MapDataset | grain.IterDataset) -> list[int]:
    """Returns the batch sizes of all known ``.batch`` nodes of a pipeline, each size once.

    The size of the last ``.batch`` comes first.
    """
    sizes = [getattr(n, "_batch_size", None) for n in walk(ds) if type(n) in (_BATCH, _ITER_BATCH)]
    return [size for size in dict.fromkeys(sizes) if size is not None]


def makes_batches(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether a pipeline has a ``.batch``.

    A dataset of this package that makes batches has a true attribute ``makes_batches``.
    """
    return any(
        type(node) in (_BATCH, _ITER_BATCH, _REBATCH) or getattr(node, "makes_batches", False)
        for node in walk(ds)
    )


def begins_with_stream(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether a pipeline begins with an `IterDataset`, which may yield batches itself."""
    return any(isinstance(node, grain.IterDataset) and not node.parents for node in walk(ds))


def pads_batches(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether the last ``.batch`` of a pipeline pads by Grain's `batch_and_pad`.

    Also returns False if this version of Grain keeps the batch function in another attribute.
    """
    batch_fn = getattr(ds, "_batch_fn", None)
    if batch_fn is None:
        return any(map(pads_batches, ds.parents))
    # The batch function is `batch_and_pad` itself, or a functools.partial of it, in which the user
    # has set the padded size.
    return getattr(batch_fn, "func", batch_fn) is grain.experimental.batch_and_pad


def repeats_interleaved(ds: grain.IterDataset) -> bool:
    """Returns whether a pipeline repeats a stream in which other streams are interleaved."""
    return any(
        type(node) is grain.experimental.RepeatIterDataset
        and any(type(below) is grain.experimental.InterleaveIterDataset for below in walk(node))
        for node in walk(ds)
    )


def below_read_ahead(
    ds: grain.MapDataset | grain.IterDataset,
) -> tuple[grain.MapDataset, grain.ReadOptions] | None:
    """Finds the `MapDataset` of a pipeline that ends with ``.to_iter_dataset(read_options)``.

    A ``.seed`` and options for the stream may follow, because they change no element.

    Returns:
        The `MapDataset` and the read options. None if the pipeline ends with another node, or has a
        filter. With a filter, the stream skips elements, so its elements cannot be read by index.
    """
    while type(ds) in (_ITER_SEED, grain.experimental.WithOptionsIterDataset):
        (ds,) = ds.parents  # a node of these two types changes no element
    found = read_ahead(ds)
    return None if found is None or is_filtered(found[0]) else found


def read_ahead(
    ds: grain.MapDataset | grain.IterDataset,
) -> tuple[grain.MapDataset, grain.ReadOptions] | None:
    """Finds the `MapDataset` of a node that ``.to_iter_dataset(read_options)`` returned.

    Returns:
        The `MapDataset` and the read options; None for any other node.
    """
    if type(ds) is not _READ_AHEAD or getattr(ds, "_allow_nones", False):
        return None
    (parent,) = ds.parents
    assert isinstance(parent, grain.MapDataset)
    return parent, getattr(ds, "_read_options", None) or grain.ReadOptions()


def options_set_by_user(options: grain.ReadOptions) -> tuple[int | None, int | None]:
    """Returns the number of threads and the buffer size of read options, at least 1 each.

    None stands for a number that the user has not set. Grain's default for it would be too much:
    500 batches in the buffer.
    """

    def set_by_user(number: Any, default: Any) -> int | None:
        # In place of a number, Grain also takes a parameter that it tunes itself.
        is_set = isinstance(number, numbers.Integral) and number != default
        return max(1, int(number)) if is_set else None

    default = grain.ReadOptions()
    return (
        set_by_user(options.num_threads, default.num_threads),
        set_by_user(options.prefetch_buffer_size, default.prefetch_buffer_size),
    )


def has_threads(options: grain.ReadOptions) -> bool:
    """Returns whether threads read ahead with these options: neither number is 0."""
    return 0 not in (options.num_threads, options.prefetch_buffer_size)


def only_moves(node: grain.MapDataset) -> bool:
    """Returns whether a node is known to run no code of the user: it moves or stacks elements."""
    stacks = type(node) is _BATCH and getattr(node, "_batch_fn", None) is _BATCH_FN
    return stacks or type(node) in (RANGE, SEED, SLICE, REINDEX, REPEAT, *SHUFFLES)


def keeps_indices(ds: grain.MapDataset) -> bool:
    """Returns whether a node makes element i from element i of its parent alone."""
    return type(ds) in _ELEMENTWISE


def before_rows(ds: Any) -> Any:
    """Returns a stream without the nodes at its end that make each row from one element."""
    while type(ds) in _ROW_BY_ROW:
        (ds,) = ds.parents
    return ds


def is_filtered(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether a pipeline has a filter, so that some indices have no element."""
    return type(ds) in (_FILTER, _ITER_FILTER) or any(map(is_filtered, ds.parents))


def is_map_filter(ds: grain.MapDataset) -> bool:
    """Returns whether a node is a ``.filter``, whose elements may be None."""
    return type(ds) is _FILTER


def is_zip(ds: grain.MapDataset) -> bool:
    """Returns whether element i of a node is made of the elements i of several datasets."""
    return type(ds) is _ZIP


def is_batched(ds: grain.MapDataset) -> bool:
    """Returns whether a node is a ``.batch``."""
    return type(ds) is _BATCH


def walk(ds: Any) -> Iterator[Any]:
    """Yields a dataset, and then all datasets that it is made of, down to the sources."""
    yield ds
    for below in made_of(ds):
        yield from walk(below)


def made_of(ds: Any) -> list[Any]:
    """Returns the parents of a node, and the datasets that it interleaves.

    Grain does not list interleaved datasets as parents. ``.mp_prefetch`` interleaves the datasets
    of its workers.
    """
    interleaved = getattr(ds, "_datasets", ())
    return [*ds.parents, *(interleaved if isinstance(interleaved, list) else ())]


def is_run_by_workers(ds: grain.IterDataset) -> bool:
    """Returns whether worker processes run a part of a stream, as after ``.mp_prefetch``."""
    return any(map(_is_worker, walk(ds)))


def _is_worker(node: Any) -> bool:
    return hasattr(node, "_worker_init_fn")


def sources(ds: grain.MapDataset | grain.IterDataset) -> list[Any]:
    """Returns the datasets at the beginning of a pipeline, which have no parents."""
    return [node for node in walk(ds) if not node.parents]


def described_columns(ds: grain.MapDataset | grain.IterDataset) -> str:
    """Describes a source that most likely is columns, where Grain expects a sequence of records.

    Returns:
        The description of a dict with string keys, or of a tuple of arrays with the same number of
        rows but different shapes or dtypes, which could not be stacked as records; "" for any other
        source.
    """
    source = getattr(ds, "_source", None)
    keys = list[Any](source) if isinstance(source, Mapping) else []
    if keys and all(isinstance(key, str) for key in keys):
        return f"a dict with the keys {', '.join(map(repr, keys))}"
    if not isinstance(source, tuple) or not all(isinstance(x, np.ndarray) for x in source):
        return ""
    rows = {x.shape[:1] for x in source}
    kinds = {(x.shape, x.dtype) for x in source}
    are_columns = len(rows) == 1 < len(kinds) and () not in rows
    return f"a tuple of {len(source)} arrays with {len(source[0])} rows each" if are_columns else ""


def seeds(ds: grain.MapDataset | grain.IterDataset) -> tuple[int, ...]:
    """Returns the seeds of one node: of a ``.seed``, ``.shuffle`` or ``.random_map``."""
    found = [getattr(ds, name, None) for name in ("_seed_rng_seed", "_seed")]
    found.append(getattr(getattr(ds, "_rng_pool", None), "_seed", None))
    return tuple(int(seed) for seed in found if seed is not None)


def source_fingerprint(ds: grain.MapDataset | grain.IterDataset) -> str | None:
    """Returns a source's own fingerprint of its records and their order; None if it has none.

    A Hugging Face dataset has one, which its own ``.shuffle`` changes with the seed. It is the same
    in each run and on each host if the functions mapped over the dataset can be pickled.
    """
    found = getattr(getattr(ds, "_source", None), "_fingerprint", None)
    return found if isinstance(found, str) else None


def text(ds: grain.MapDataset | grain.IterDataset) -> str:
    """Returns a node's text, without its source if that is a list, a range or an array.

    The type of such a source does not count, because another container may hold the same records.
    """
    source = getattr(ds, "_source", None)
    is_container = isinstance(source, list | tuple | range) or hasattr(source, "dtype")
    return type(ds).__name__ if is_container else str(ds)


def parameters(ds: grain.MapDataset | grain.IterDataset) -> tuple[str, ...]:
    """Returns the arguments of a node that ``str(node)`` lacks and that change its elements."""
    names = ("_reseed_each_epoch", "_num_epochs", "_window_size", "_proportions")
    of_packing = ("_num_packing_bins", "_length_struct", "_shuffle_bins", "_max_sequences_per_bin")
    values = [getattr(ds, name, None) for name in (*names, *of_packing)]
    selection, splitting = (getattr(ds, name, None) for name in ("_selection_map", "_config"))
    values.append(getattr(selection, "_proportions", None))
    values.append(getattr(splitting, "length_struct", None))
    if type(ds) is REINDEX:  # the node's text shows only the first and the last indices
        values.append(_all_of(getattr(ds, "_indices", ())))
    return tuple(str(value) for value in values)


def _all_of(indices: Sequence[int] | grain.MapDataset) -> str:
    """Returns a digest of the indices given to ``.slice``; for a dataset of indices, its nodes."""
    if isinstance(indices, grain.MapDataset):
        below = ", ".join(map(_all_of, indices.parents))
        own = (str(indices), len(indices), seeds(indices), parameters(indices))
        return f"{own} of ({below})"
    return hashlib.sha256(np.asarray(indices, np.int64).tobytes()).hexdigest()
