"""The order of the loop's collectives and this package's only collective, of ``read="once"``.

Every host must run all collectives in the same order. An accelerator runs computations in the order
in which the loop's thread dispatched them. A process's only CPU device may start the latest one
first, unless JAX is told to let each computation end before the next. Then Gloo, the CPU's library
of collectives, receives a message of another step, and the process hangs or aborts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from grain_shard.errors import ShardingError

_IN_ANY_ORDER = "jax_cpu_enable_async_dispatch"


def require_order(devices: Iterable[Any]) -> None:
    """Refuses devices of several hosts that would mix up the order of collectives.

    Args:
        devices: The devices of all hosts that take part.

    Raises:
        ShardingError: This host takes part with a single CPU device, which keeps no order.
    """
    devices = list(devices)
    own = [device for device in devices if device.process_index == jax.process_index()]
    if len(own) == len(devices) or len(own) != 1 or own[0].platform != "cpu":
        return
    try:
        is_mixed_up = jax.config.read(_IN_ANY_ORDER)
    except AttributeError:  # a JAX without this option does not reorder either
        return
    if is_mixed_up:
        raise ShardingError(
            "JAX may run the computations of this host's only CPU device in any order. Hosts could"
            " then run their collectives in different orders, and hang.",
            remedy=f'call jax.config.update("{_IN_ANY_ORDER}", False) before any other use of JAX,'
            " or run the script with python -m grain_shard rehearse, which makes that call.",
        )
