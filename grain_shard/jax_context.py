"""`jax_context`: the JAX context of one thread, for the threads that work for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax

from grain_shard.spans import counted_by, counter


def jax_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns the calling thread's JAX context (mesh, x64), for another thread to enter.

    The counter of the calling thread's spans then counts the other thread's spans, too.
    """
    mesh, x64 = jax.sharding.get_mesh(), jax.config.jax_enable_x64  # pyright: ignore
    counting = counter()

    @contextlib.contextmanager
    def enter():
        with counted_by(counting), jax.enable_x64(x64), contextlib.ExitStack() as stack:
            if not mesh.empty:
                stack.enter_context(jax.set_mesh(mesh))
            yield

    return enter
