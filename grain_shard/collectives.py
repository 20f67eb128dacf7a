"""The order of this package's only collective, that of ``read="once"``, among those of the loop.

All collectives have to come in one order on every host. An accelerator works off what it is given
in the order in which the loop's thread gave it. A CPU that is the only one of its process may begin
with what came last, unless JAX is told to let each computation end before the next. Then its
library of collectives, Gloo, meets a message of another step, and the process hangs or aborts.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from grain_shard.errors import ShardingError

_IN_ANY_ORDER = "jax_cpu_enable_async_dispatch"


def require_order(devices: Iterable[Any]) -> None:
    """Refuses devices of several hosts that would mix up collectives.

    Args:
        devices: Of all hosts that take part.

    Raises:
        ShardingError: This host takes part with a single CPU, which computes in any order.
    """
    devices = list(devices)
    own = [device for device in devices if device.process_index == jax.process_index()]
    if len(own) == len(devices) or len(own) != 1 or own[0].platform != "cpu":
        return
    try:
        is_mixed_up = jax.config.read(_IN_ANY_ORDER)
    except AttributeError:  # a JAX without this option has no such dispatch either
        return
    if is_mixed_up:
        raise ShardingError(
            "the only CPU of this process computes in any order, so that the hosts' collectives"
            " would get mixed up.",
            remedy=f'call jax.config.update("{_IN_ANY_ORDER}", False) before anything else uses'
            " JAX, or run the script by python -m grain_shard rehearse, which does so.",
        )
