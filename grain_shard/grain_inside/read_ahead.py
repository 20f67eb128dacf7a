"""Streams whose random-access parts other datasets read.

``.to_iter_dataset()`` makes a stream of a `MapDataset`, with threads of its own that read ahead.
Here another dataset takes its place, below whatever filters, mixes or packs its elements.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import grain

from grain_shard.grain_inside.nodes import read_ahead

# Makes a stream of a random-access part, and of the options with which it was to be read ahead.
MakeStream = Callable[[grain.MapDataset, grain.ReadOptions], grain.IterDataset]


def replace_read_ahead(ds: grain.IterDataset, make_stream: MakeStream) -> grain.IterDataset:
    """Returns the same stream, of which other datasets read the random-access parts.

    The nodes above them are copied, as deep as that takes; no node of the user's is changed. Parts
    that a node does not show as its parents (an interleave's, and so those of ``.mp_prefetch``)
    stay as they are.

    Args:
        ds: A stream.
        make_stream: Makes a stream of the elements of a `MapDataset`, in order, but for those that
            are None, with Grain's state (``{"next_index": ...}``).

    Returns:
        The stream; `ds` itself if no part is known that can be replaced.
    """
    known: dict[int, Any] = {}

    def replaced(node: Any) -> Any:
        if id(node) not in known:
            known[id(node)] = replacement(node)
        return known[id(node)]

    def replacement(node: Any) -> Any:
        if isinstance(node, grain.MapDataset):
            return node
        if (found := read_ahead(node)) is not None:
            options = getattr(node, "_read_options", None) or grain.ReadOptions()
            stream: Any = make_stream(found[0], options)
            stream.has_child = True  # or Grain may put a thread of its own above it
            return stream
        changed = {id(old): replaced(old) for old in node.parents if replaced(old) is not old}
        if not changed:
            return node
        changed_node = copy.copy(node)
        # A node may keep its parents under other names, too, and a mix keeps them in a tree.
        for name, value in vars(node).items():
            setattr(changed_node, name, _with_parents(value, changed))
        return changed_node

    try:
        return replaced(ds)
    except AttributeError:  # this Grain has other names for its private parts
        return ds


def begins_with_records(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether a stream begins with random-access parts alone that are known."""
    if isinstance(ds, grain.IterDataset) and read_ahead(ds) is not None:
        return True
    return bool(ds.parents) and all(map(begins_with_records, ds.parents))


def _with_parents(value: Any, changed: dict[int, Any]) -> Any:
    """Returns an attribute of a node with new parents for the old; itself if it has no parent."""
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
