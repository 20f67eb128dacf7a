"""A tree of arrays onto the devices of a tree of shardings, on one process or on many."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Sharding

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.sharding.place_leaf import place_leaf
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.trees import ROOT, as_arrays


def place_tree(data: Any, target: ShardingTree, *, in_background: bool = False) -> Any:
    """Places every leaf.

    Args:
        data: A tree of numpy arrays, `jax.Array`s, typed PRNG keys and Python scalars. On several
            processes, what is on the host is the same whole data on each.
        target: Where the leaves go.
        in_background: Whether the caller is a background thread, which must run no collective.

    Returns:
        The tree with `jax.Array`s in its places; numpy arrays of strings stay as they are.

    Raises:
        ShardingError: A leaf does not fit its sharding or holds Python objects, this process has
            no device in a sharding, or a leaf that spans processes cannot be moved there.
    """
    require_local(target)
    pairs, structure = jax.tree_util.tree_flatten_with_path(data)
    if not pairs:
        return data  # such as the state of plain SGD
    paths = [ROOT + jax.tree_util.keystr(keys) for keys, _ in pairs]
    try:
        leaves = [
            leaf if isinstance(leaf, jax.Array) else as_arrays([path], [leaf])[0]
            for path, (_, leaf) in zip(paths, pairs, strict=True)
        ]
    except ShardingError as error:
        raise error.with_mesh(target.mesh_axes) from None
    placed = []
    shardings = target.match(structure.unflatten(leaves))
    for path, leaf, sharding in zip(paths, leaves, shardings, strict=True):
        if sharding is None:  # text
            placed.append(leaf)
            continue
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            _require_movable(path, leaf, sharding, in_background)
        placed.append(place_leaf(path, leaf, sharding))
    return structure.unflatten(placed)


def require_local(target: ShardingTree) -> None:
    """Checks that this process has a device in each of the shardings.

    Raises:
        ShardingError: It has none; the message names the processes that have.
    """
    for sharding in target.shardings():
        if not sharding.addressable_devices:
            processes = sorted({device.process_index for device in sharding.device_set})
            raise ShardingError(
                f"all devices belong to process {', '.join(map(str, processes))}, and this is"
                f" process {jax.process_index()}, which could hold nothing of the result.",
                mesh_axes=target.mesh_axes,
                remedy="use one of jax.local_devices(), or a mesh that includes some of them.",
            )


def _require_movable(path: str, leaf: jax.Array, to: Sharding, in_background: bool) -> None:
    if leaf.sharding.is_equivalent_to(to, leaf.ndim):
        return
    if to.is_fully_addressable:
        problem = "the array spans processes, and devices of one process cannot take it over"
        remedy = (
            "gather it first, by jax.experimental.multihost_utils.process_allgather, or take what"
            " this process holds, in .addressable_shards."
        )
    elif in_background:
        problem = "moving what spans processes is a collective, which no background thread may run"
        remedy = "let the source yield numpy, or call distribute_batch in the training loop."
    else:
        return
    raise ShardingError(f"{problem}.", path=path, leaf=describe_leaf(leaf), remedy=remedy)
