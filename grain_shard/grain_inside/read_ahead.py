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
    try:
        return _replaced(ds, make_stream, {})
    except AttributeError:  # this Grain names its private parts otherwise
        return ds


def _replaced(ds: Any, make_stream: MakeStream, known: dict[int, Any]) -> Any:
    if id(ds) not in known:
        known[id(ds)] = _replacement(ds, make_stream, known)
    return known[id(ds)]


def _replacement(ds: Any, make_stream: MakeStream, known: dict[int, Any]) -> Any:
    if isinstance(ds, grain.MapDataset):
        return ds
    if (found := read_ahead(ds)) is not None:
        below, options = found
        stream: Any = make_stream(below, options is None or min(options) > 0)
        stream.has_child = True  # or Grain may put a thread of its own between it and its consumer
        return stream
    parents = [(old, _replaced(old, make_stream, known)) for old in ds.parents]
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
