"""Replaces the ``.to_iter_dataset()`` of a stream, to bound the records that it reads ahead.

``.to_iter_dataset()`` turns a `MapDataset` into a stream, and reads up to 500 records ahead.
Filters, mixes or packing may follow it. Here another dataset replaces its node in the pipeline.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import grain

from grain_shard.grain_inside.nodes import is_run_by_workers, iter_batch_size, read_ahead

# A function that turns a `MapDataset` into a stream, given the options of ``.to_iter_dataset``.
MakeStream = Callable[[grain.MapDataset, grain.ReadOptions], grain.IterDataset]
# A function that checks a record. It is told whether other nodes change the batch later.
CheckRecord = Callable[..., None]
# A function that checks the records of a batch that could not be stacked.
CheckRecords = Callable[[Sequence[Any]], None]


def replace_read_ahead(
    ds: grain.IterDataset,
    make_stream: MakeStream,
    check_record: CheckRecord = lambda record, is_changed_later: None,
    check_records: CheckRecords = lambda records: None,
) -> grain.IterDataset:
    """Returns the same stream, in which `make_stream` replaces each ``.to_iter_dataset()``.

    The nodes after it are copied, so that no node of the user changes. The streams of
    ``.mp_prefetch`` are left as they are, because other processes run them.

    Args:
        ds: A stream.
        make_stream: Turns a `MapDataset` into a stream of its elements in order, without None. The
            state of the stream must be like Grain's, ``{"next_index": ...}``.
        check_record: Checks the first record that Grain's own ``.batch`` stacks. Without a check,
            Grain stacks some mappings as an array of their keys.
        check_records: Checks the records of a batch that Grain's own ``.batch`` fails to stack, to
            raise an error that names the record and the leaf, as Grain's error does not.

    Returns:
        The stream. It is `ds` itself if there is nothing to replace, or if Grain's private
        attributes are unknown.
    """
    try:
        return _Replacement(ds, make_stream, check_record, check_records).of(ds)
    except AttributeError:  # raised if this Grain names its private parts differently
        return ds


class _Replacement:
    """The nodes that replace the nodes of a stream; see `replace_read_ahead`.

    A class, because two local functions that call each other would keep the stream and the user's
    functions in memory until a garbage collection.
    """

    def __init__(
        self,
        ds: grain.IterDataset,
        make_stream: MakeStream,
        check_record: CheckRecord,
        check_records: CheckRecords,
    ):
        self._ds, self._make_stream = ds, make_stream
        self._check_record, self._check_records = check_record, check_records
        self._known: dict[int, Any] = {}

    def of(self, node: Any) -> Any:
        """Returns the node that replaces a node; the node itself if nothing in it changes."""
        if id(node) not in self._known:
            self._known[id(node)] = self._new(node)
        return self._known[id(node)]

    def _new(self, node: Any) -> Any:
        """Makes the node that `of` returns. It is called only once for each node."""
        if isinstance(node, grain.MapDataset):
            return node
        # If Grain lacks this name, `read_ahead` cannot know whether the stream yields None for
        # records that a filter drops.
        if (found := read_ahead(node)) is not None and hasattr(node, "_allow_nones"):
            stream: Any = self._make_stream(*found)
            stream.has_child = True  # otherwise Grain may add a thread that reads this stream
            return stream
        if type(node) is grain.experimental.InterleaveIterDataset:
            return _interleaved(node, self._make_stream)
        # The new parents, by the `id` of the old ones.
        changed = {id(old): self.of(old) for old in node.parents if self.of(old) is not old}
        stacks = iter_batch_size(node) is not None  # a `.batch` with Grain's own batch function
        if not (changed or stacks):
            return node
        changed_node = copy.copy(node)
        # A node may also keep its parents in other attributes, and a mix keeps them in a tree.
        for name, value in vars(node).items():
            setattr(changed_node, name, _with_parents(value, changed))
        if stacks:
            # Nodes after the `.batch` may change the batch.
            check = functools.partial(self._check_record, is_changed_later=node is not self._ds)
            changed_node._batch_fn = _with_checks(
                changed_node._batch_fn, check, self._check_records
            )
        return changed_node


def _interleaved(node: Any, make_stream: MakeStream) -> Any:
    """Returns an interleave in whose streams each ``.to_iter_dataset()`` is replaced.

    Grain does not list these streams as the node's parents.

    Args:
        node: The interleave. Its streams are in a list, or in a `MapDataset` that makes them one by
            one.
        make_stream: As in `replace_read_ahead`.
    """
    # A stream that workers certainly run, to see whether they are recognized.
    example = grain.MapDataset.range(1).to_iter_dataset()
    if not is_run_by_workers(example.mp_prefetch(grain.MultiprocessingOptions(1))):
        return node  # in this version of Grain, it is unknown which streams workers run

    def replaced(stream: Any) -> Any:
        if not isinstance(stream, grain.IterDataset) or is_run_by_workers(stream):
            return stream
        return replace_read_ahead(stream, make_stream)

    streams: Any = node._datasets
    if isinstance(streams, grain.MapDataset):  # it makes a stream when its turn comes
        new_streams: Any = streams.map(replaced)
    else:
        new_streams = list(map(replaced, streams))
        if all(new is old for new, old in zip(new_streams, streams, strict=True)):
            return node
    changed_node = copy.copy(node)
    changed_node._datasets = new_streams
    return changed_node


def begins_with_records(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether all data of a stream comes through a known ``.to_iter_dataset``."""
    if isinstance(ds, grain.IterDataset) and read_ahead(ds) is not None:
        return True
    return bool(ds.parents) and all(map(begins_with_records, ds.parents))


def _with_checks(
    batch_fn: Callable[..., Any], check: Callable[[Any], None], check_records: CheckRecords
) -> Callable[..., Any]:
    """Returns a batch function that checks the first record, and all records if stacking fails."""
    is_checked = False

    @functools.wraps(batch_fn)
    def check_and_batch(records: Any) -> Any:
        nonlocal is_checked
        if not is_checked:
            check(records[0])
            is_checked = True
        try:
            return batch_fn(records)
        except (TypeError, ValueError):
            check_records(records)  # raises a better error, if it finds one
            raise

    return check_and_batch


def _with_parents(value: Any, changed: dict[int, Any]) -> Any:
    """Returns the value of a node's attribute with other parents; `value` itself if it has none.

    Args:
        value: A parent; a list, tuple or dict with parents in it; or anything else.
        changed: The new parents, by the `id` of the old ones.
    """
    if isinstance(value, grain.IterDataset):
        return changed.get(id(value), value)
    if type(value) in (list, tuple):
        items = [_with_parents(item, changed) for item in value]
        is_same = all(new is old for new, old in zip(items, value, strict=True))
        return value if is_same else type(value)(items)
    if type(value) is dict:
        entries = {key: _with_parents(item, changed) for key, item in value.items()}
        is_same = all(entries[key] is item for key, item in value.items())
        return value if is_same else entries
    return value
