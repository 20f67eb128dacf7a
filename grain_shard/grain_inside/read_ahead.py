"""Streams whose random-access parts are read by somebody else than Grain.

``.to_iter_dataset()`` makes a stream of a `MapDataset`, with threads of its own that read ahead.
Here another dataset takes its place, below whatever filters, mixes or packs its elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import grain

from grain_shard.grain_inside.nodes import read_ahead

# From the random-access part of a stream, and whether the user wants it read ahead, to a stream.
MakeStream = Callable[[grain.MapDataset, bool], grain.IterDataset]


def replace_read_ahead(ds: grain.IterDataset, make_stream: MakeStream) -> grain.IterDataset:
    """The same stream, of which other datasets read the random-access parts.

    The nodes above them are copied, as deep as that takes; nothing of the user's is changed. What
    a node does not show as its parents (an interleave, and so ``.mp_prefetch``) stays as it is.

    Args:
        ds: A stream.
        make_stream: Makes a stream of the elements of a `MapDataset`, in order, but for those that
            are None, with Grain's state (``{"next_index": ...}``).

    Returns:
        The stream; `ds` itself if no part is known that can be replaced.
    """

    def stream_in_its_place(node: Any, below: grain.MapDataset, options: Any) -> grain.IterDataset:
        stream: Any = make_stream(below, options is None or min(options) > 0)
        stream.has_child = True  # or Grain may put a thread of its own between it and its consumer
        return stream

    return _all_replaced(ds, stream_in_its_place)


def replace_records(
    ds: grain.IterDataset, records_for: Callable[[grain.MapDataset], grain.MapDataset]
) -> grain.IterDataset:
    """The same stream, read ahead by Grain as it was, of other random-access parts.

    Args:
        ds: A stream.
        records_for: From a random-access part to one with the same elements.
    """

    def of_other_records(node: Any, below: grain.MapDataset, options: Any) -> grain.IterDataset:
        return records_for(below).to_iter_dataset(node._read_options)

    return _all_replaced(ds, of_other_records)


def begins_with_records(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Whether all that a stream is made of begins with a random-access part that is known."""
    if isinstance(ds, grain.IterDataset) and read_ahead(ds) is not None:
        return True
    return bool(ds.parents) and all(map(begins_with_records, ds.parents))


# From a node that reads ahead, with what `read_ahead` says of it, to what takes its place.
_Replace = Callable[[Any, grain.MapDataset, tuple[int, int] | None], grain.IterDataset]


def _all_replaced(ds: grain.IterDataset, replace: _Replace) -> grain.IterDataset:
    try:
        return _replaced(ds, replace, {})
    except AttributeError:  # this Grain names its private parts otherwise
        return ds


def _replaced(ds: Any, replace: _Replace, known: dict[int, Any]) -> Any:
    if id(ds) not in known:
        known[id(ds)] = _replacement(ds, replace, known)
    return known[id(ds)]


def _replacement(ds: Any, replace: _Replace, known: dict[int, Any]) -> Any:
    if isinstance(ds, grain.MapDataset):
        return ds
    if (found := read_ahead(ds)) is not None:
        return replace(ds, *found)
    parents = [(old, _replaced(old, replace, known)) for old in ds.parents]
    changed = {id(old): new for old, new in parents if old is not new}
    if not changed:
        return ds
    node = copy.copy(ds)
    # A node may keep its parents under other names, too, and a mix keeps them in a tree.
    for name, value in vars(ds).items():
        setattr(node, name, _with_parents(value, changed))
    return node


def _with_parents(value: Any, changed: dict[int, Any]) -> Any:
    """An attribute of a node with its new parents instead of the old; itself if it has none."""
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
