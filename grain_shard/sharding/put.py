"""Puts the leaves of a tree on devices by a tree of shardings, on one process or on many."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.host_arrays import copied
from grain_shard.sharding.layout import mesh_axes_of
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import check_fits, check_held, fitted
from grain_shard.trees import as_arrays, flatten, is_text


@jax.transfer_guard("allow")  # putting a tree is an explicit transfer
def put_tree(data: Any, target: ShardingTree, *, in_background: bool = False) -> Any:
    """Puts every leaf of a tree on the devices of its sharding.

    Args:
        data: A tree of numpy arrays, `jax.Array`s, typed PRNG keys and Python scalars. On several
            processes, each process must pass the same complete host data.
        target: Shardings of the leaves.
        in_background: True if the caller is a background thread, which must run no collective.

    Returns:
        The same tree with `jax.Array` leaves. Text leaves stay on the host as numpy arrays.

    Raises:
        ShardingError: A leaf does not fit its sharding; has a dtype or integers that no device can
            hold; or spans processes and cannot be moved to its sharding. Or this process has no
            device in a sharding.
    """
    require_local(target)
    paths, leaves, structure = flatten(data)
    if not leaves:
        return data  # e.g. the optax state of plain SGD, a tree without leaves
    arrays = [_as_array(path, leaf, target) for path, leaf in zip(paths, leaves, strict=True)]
    shardings = target.match(structure.unflatten(arrays))
    put = partial(_put, in_background=in_background)
    return structure.unflatten(map(put, paths, arrays, shardings))


@jax.transfer_guard("allow")
def put_leaf(path: str, leaf: Any, sharding: Sharding) -> jax.Array | np.ndarray:
    """Puts one leaf on the devices of its sharding.

    Args:
        path: The leaf's path in its tree, for messages.
        leaf: A numpy array, a `jax.Array`, a typed PRNG key or a Python scalar. On several
            processes, each process must pass the same complete host data.
        sharding: The leaf's sharding. A spec longer than the leaf's rank is cut to the rank, so
            scalars are replicated.

    Returns:
        A global `jax.Array` with the leaf's shape; for text, a numpy array.

    Raises:
        ShardingError: The leaf does not fit its sharding; has a dtype or integers that no device
            can hold; or spans processes and cannot be moved to its sharding.
    """
    array = _as_array(path, leaf, ShardingTree(sharding))
    where = None if is_text(array) else fitted(sharding, array.ndim)
    return _put(path, array, where, in_background=False)


def require_local(target: ShardingTree) -> None:
    """Checks that this process has a device in each of the shardings.

    Raises:
        ShardingError: A sharding has no device of this process. The message names the processes
            that have one.
    """
    for sharding in target.shardings():
        if not sharding.addressable_devices:
            processes = sorted({device.process_index for device in sharding.device_set})
            raise ShardingError(
                f"all devices of the result belong to process {', '.join(map(str, processes))}, so"
                f" process {jax.process_index()} (this process) could hold no part of the result.",
                mesh_axes=target.mesh_axes,
                remedy="use one of jax.local_devices(), or a mesh that includes some of them.",
            )


def _as_array(path: str, leaf: Any, target: ShardingTree) -> Any:
    """Returns a `jax.Array` unchanged, and any other leaf as a numpy array.

    Raises:
        ShardingError: The leaf is neither numbers nor text, such as an array of objects.
    """
    if isinstance(leaf, jax.Array):
        return leaf
    try:
        return as_arrays([path], [leaf])[0]
    except ShardingError as error:
        raise error.with_mesh(target.mesh_axes) from None


def _put(path: str, array: Any, sharding: Sharding | None, in_background: bool) -> Any:
    """Puts an array on the devices of a sharding. With None the array stays on the host, unchanged.

    The spec of the sharding must not be longer than the array's rank. NumPy input may be written to
    afterwards. A `jax.Array` that already has this sharding may be returned unchanged.
    """
    if sharding is None:
        return array
    check_fits(path, array.dtype, sharding, array.shape)
    if isinstance(array, jax.Array):
        if not array.is_fully_addressable:
            _require_movable(path, array, sharding, in_background)
        # device_put onto devices of this process runs no collective. device_put of a global array
        # runs collectives, which is safe here, because all processes run them in the same order.
        if sharding.is_fully_addressable or not array.is_fully_addressable:
            return jax.device_put(array, sharding)
        # NumPy cannot hold a typed PRNG key. So its numbers are put, and made into a key again.
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = _put(path, jax.random.key_data(array), sharding, in_background)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
    host_array = np.asarray(array)
    check_held(path, host_array)
    # The CPU backend may use aligned host memory without a copy, and a loader may write to its
    # memory later. So each shard is copied there.
    on_cpu = next(iter(sharding.device_set)).platform == "cpu"
    shard = (lambda index: copied(host_array[index])) if on_cpu else host_array.__getitem__
    # Not device_put, which across processes runs a collective to compare the values.
    return jax.make_array_from_callback(host_array.shape, sharding, shard)


def _require_movable(path: str, array: jax.Array, to: Sharding, in_background: bool) -> None:
    """Raises an error if an array that spans processes cannot be moved to the sharding `to`."""
    if array.sharding.is_equivalent_to(to, array.ndim):  # there is nothing to move
        return
    if to.is_fully_addressable:
        problem = "the array spans processes, so devices of one process cannot hold it all"
        remedy = (
            "gather the array first, by jax.experimental.multihost_utils.process_allgather, or use"
            " its .addressable_shards, the part that this process holds."
        )
    elif in_background:
        problem = (
            "the array spans processes, so only a collective can move it. A background thread must"
            " not run collectives"
        )
        remedy = (
            "let the source yield NumPy arrays. Or call grain_shard.placement.distribute_batch in"
            " the training loop."
        )
    else:  # in the training loop, where all processes run the same collective
        return
    raise ShardingError(
        f"{problem}.",
        path=path,
        leaf=describe_leaf(array),
        mesh_axes=mesh_axes_of([to]),
        remedy=remedy,
    )
