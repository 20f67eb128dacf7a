"""One array onto the devices of one sharding, on one process or on many."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from grain_shard.errors import ShardingError
from grain_shard.host_arrays import copied
from grain_shard.sharding.specs import check_fits


def place_leaf(path: str, leaf: Any, sharding: Sharding) -> jax.Array:
    """Places one leaf.

    Args:
        path: Where the leaf is in its tree, for messages.
        leaf: A numpy array, `jax.Array`, typed PRNG key or Python scalar. Host data is the whole
            global array, the same on every process.
        sharding: Where it goes. A `NamedSharding` whose spec is longer than the leaf's rank is
            cut to that rank, which replicates scalars.

    Returns:
        A global array with the leaf's shape. It shares no memory with numpy input on the CPU
        backend, so a loader may reuse its buffer. A `jax.Array` that lies where it should may come
        back as it is.

    Raises:
        ShardingError: A mesh axis does not divide its dim, or the leaf holds Python objects.
    """
    shape = np.shape(leaf)
    if isinstance(sharding, NamedSharding):
        if len(sharding.spec) > len(shape):
            spec = PartitionSpec(*sharding.spec[: len(shape)])
            sharding = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        check_fits(path, leaf, sharding, shape)
    if isinstance(leaf, jax.Array):
        # Moving what is global already is JAX's to do, in the same order on every process.
        if sharding.is_fully_addressable or not leaf.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = place_leaf(path, jax.random.key_data(leaf), sharding)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    # The CPU backend may take aligned host memory as it is, and its owner may then write to it.
    on_cpu = next(iter(sharding.device_set)).platform == "cpu"
    host_array = np.asarray(leaf)
    if host_array.dtype.kind in "OUS":
        raise ShardingError(
            f"dtype {host_array.dtype} has no place on a device.",
            path=path,
            leaf=f"{host_array.dtype}{list(shape)}",
            remedy="convert the leaf to numbers, or drop it.",
        )
    # Not device_put: onto several processes it is a collective that compares the value.
    shard = (lambda index: copied(host_array[index])) if on_cpu else host_array.__getitem__
    return jax.make_array_from_callback(shape, sharding, shard)
