"""Streams whose random-access parts are read by this package instead of Grain.

``.to_iter_dataset()`` makes a stream from a `MapDataset`, with threads of its own that read ahead.
Here another dataset replaces that node, below the filters, mixes or packing of the stream. The
user's functions in the stream are replaced by functions that cannot end it.
"""

from __future__ import annotations

import copy
import functools
import reprlib
import types
from collections.abc import Callable
from typing import Any

import grain

from grain_shard.grain_inside.nodes import read_ahead

# Makes a stream of a random-access part, given the options of its ``.to_iter_dataset``.
MakeStream = Callable[[grain.MapDataset, grain.ReadOptions], grain.IterDataset]
# Attributes in which Grain's nodes keep a user's function.
_FUNCTIONS = ("_map_fn", "_filter_fn", "_batch_fn")


def replace_read_ahead(ds: grain.IterDataset, make_stream: MakeStream) -> grain.IterDataset:
    """Returns the same stream, in which other datasets read the random-access parts.

    The nodes above these parts are copied; no node of the user changes. A part that a node does not
    list among its parents is unchanged (the parts of an interleave, and so of ``.mp_prefetch``).

    Args:
        ds: A stream.
        make_stream: Makes a stream of the elements of a `MapDataset`, in order and without those
            that are None, with Grain's state (``{"next_index": ...}``).

    Returns:
        The stream; `ds` itself if it has no known part or function to replace.
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
            stream.has_child = True  # or Grain may add a thread of its own above it
            return stream
        changed = {id(old): replaced(old) for old in node.parents if replaced(old) is not old}
        functions = {name: fn for name in _FUNCTIONS if _is_users(fn := vars(node).get(name))}
        flat_map = getattr(vars(node).get("_transform"), "flat_map", None)
        if not (changed or functions or flat_map):
            return node
        changed_node = copy.copy(node)
        getattr(changed_node, "_transform_name", None)  # of the user's function; Grain keeps it
        # A node may also keep its parents in other attributes, and a mix keeps them in a tree.
        for name, value in vars(node).items():
            setattr(changed_node, name, _with_parents(value, changed))
        for name, fn in functions.items():
            setattr(changed_node, name, _without_end(fn))
        if flat_map:
            changed_node._transform = types.SimpleNamespace(flat_map=_without_end(flat_map))
        return changed_node

    try:
        return replaced(ds)
    except AttributeError:  # this version of Grain names its private parts differently
        return ds


def begins_with_records(ds: grain.MapDataset | grain.IterDataset) -> bool:
    """Returns whether a stream begins only with known random-access parts."""
    if isinstance(ds, grain.IterDataset) and read_ahead(ds) is not None:
        return True
    return bool(ds.parents) and all(map(begins_with_records, ds.parents))


def _is_users(fn: Any) -> bool:
    return callable(fn) and not (getattr(fn, "__module__", None) or "").startswith("grain.")


def _without_end(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function whose StopIteration is an error, because Grain would end the stream."""

    @functools.wraps(fn)
    def without_end(*args: Any) -> Any:
        try:
            return fn(*args)
        except StopIteration as error:
            failure = error
        name = getattr(fn, "__qualname__", type(fn).__name__)
        raise RuntimeError(
            f"{name} raised StopIteration for {', '.join(map(reprlib.repr, args))}\n"
            "  remedy: look for a bare next() in it, which would pass for the end of the stream."
        ) from failure

    return without_end


def _with_parents(value: Any, changed: dict[int, Any]) -> Any:
    """Returns an attribute's value with new parents for old; unchanged if it has no parent."""
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
