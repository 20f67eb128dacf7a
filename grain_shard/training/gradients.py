"""Gradients that each device computed for itself, reduced to one: their "mean" or their "sum"."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import KeyPath, keystr, tree_map_with_path

from grain_shard.errors import ShardingError, describe_leaf


def reduce_gradients_across_devices(
    gradients: Any, reduce_type: str = "mean", axis_name: str = "batch"
) -> Any:
    """Reduces gradients over a mapped axis: inside `jax.shard_map`, `jax.vmap` or `jax.pmap`.

    Under plain `jax.jit` there is nothing to reduce: the gradient of a loss over the global batch
    is global.

    Returns:
        The same tree and shapes, equal on all devices of the axis.

    Raises:
        ValueError: Another `reduce_type` than "mean" and "sum".

    Example:
        >>> gradients = {"w": jnp.array([1.0, 3.0])}  # of two devices
        >>> jax.vmap(reduce_gradients_across_devices, axis_name="batch")(gradients)
        {'w': Array([2., 2.], dtype=float32)}
    """
    reduce = _of_type(reduce_type, {"mean": jax.lax.pmean, "sum": jax.lax.psum})
    return reduce(gradients, axis_name)


def reduce_gradient_tree(gradients: Any, reduce_type: str = "mean") -> Any:
    """Reduces gradients that are stacked by device, as `jax.vmap` over their batches gives them.

    Leaves of shape ``[num_devices, ...]`` become ``[...]``, the shape of their parameters.

    Raises:
        ValueError: Another `reduce_type` than "mean" and "sum".
        ShardingError: A leaf has no leading axis.

    Example:
        >>> reduce_gradient_tree({"w": jnp.array([[1.0, 0.0], [3.0, 0.0]])})
        {'w': Array([2., 0.], dtype=float32)}
    """
    reduce = _of_type(reduce_type, {"mean": jnp.mean, "sum": jnp.sum})

    def reduce_leaf(path: KeyPath, leaf: Any) -> jax.Array:
        if not np.ndim(leaf):
            raise ShardingError(
                "a scalar has no axis of devices to reduce.",
                path="gradients" + keystr(path),
                leaf=describe_leaf(leaf),
                remedy="stack one gradient per device along dim 0.",
            )
        return reduce(leaf, axis=0)

    return tree_map_with_path(reduce_leaf, gradients)


def _of_type(reduce_type: str, reductions: dict[str, Callable[..., Any]]) -> Callable[..., Any]:
    if reduce_type.lower() not in reductions:
        raise ValueError(f"reduce_type={reduce_type!r} is not one of {list(reductions)}.")
    return reductions[reduce_type.lower()]
