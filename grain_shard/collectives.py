"""Collectives of this package, in their turn among those of the training loop.

Collectives have to come in one order on every host. An accelerator works off what it is given in
the order in which the loop's thread gave it. A CPU that is the only one of its process does not: it
may begin with what came last. Then its library of collectives, Gloo, meets a message of another
size than it expects, and ends the process.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax


def in_turn(collective: Callable[..., Any], *arrays: jax.Array) -> Any:
    """What a jitted function returns, a collective of several hosts.

    On CPUs it begins when all that was given to them before has ended, and has ended when this
    returns. Elsewhere it is only begun.

    Args:
        collective: The function.
        *arrays: Its arguments.
    """
    keeps_order = any(device.platform != "cpu" for device in arrays[0].devices())
    if keeps_order or jax.process_count() == 1:
        return collective(*arrays)
    for array in jax.live_arrays("cpu"):
        # Some are donated, and gone; what failed is told to whoever asks for it.
        with contextlib.suppress(RuntimeError):
            array.block_until_ready()
    return jax.block_until_ready(collective(*arrays))
