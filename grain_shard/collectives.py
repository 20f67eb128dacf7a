"""Checks that all hosts run their collectives in the same order.

The only collective of this package moves the rows that ``read="once"`` has read to their devices.
It runs between the collectives of the training step, and every host must run all of them in the
same order. An accelerator runs computations in the order in which the training loop dispatched
them. If a process has a single CPU device, the device may start a later computation first. Then
Gloo, the library of collectives on CPUs, receives a message of another computation, and the process
hangs or aborts. With ``jax_cpu_enable_async_dispatch`` set to False, JAX ends each computation
before it starts the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from grain_shard.errors import ShardingError

# JAX's option that lets a CPU device start computations in any order.
_IN_ANY_ORDER = "jax_cpu_enable_async_dispatch"


def require_order(devices: Sequence[Any]) -> None:
    """Raises an error if this process may run collectives in another order than other processes.

    Args:
        devices: The devices of all processes that take part in the collectives.

    Raises:
        ShardingError: Several processes take part, and this one has a single CPU device, which may
            change the order.
    """
    own = [device for device in devices if device.process_index == jax.process_index()]
    if len(own) == len(devices) or len(own) != 1 or own[0].platform != "cpu":
        return
    try:
        is_mixed_up = jax.config.read(_IN_ANY_ORDER)
    except AttributeError:  # a JAX without this option keeps the order
        return
    if is_mixed_up:
        raise ShardingError(
            "JAX may run the computations of this host's only CPU device in any order. Hosts could"
            " then run their collectives in different orders, and hang.",
            remedy=f'call jax.config.update("{_IN_ANY_ORDER}", False) before any other use of JAX,'
            " or run the script with python -m grain_shard rehearse, which makes that call.",
        )
