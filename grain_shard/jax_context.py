"""`jax_context`: passes the JAX context of one thread to the background threads that it starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import jax

from grain_shard.spans import counted_by, counter


def jax_context() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Returns a function that gives another thread the JAX context of the calling thread.

    The context is the mesh and the x64 setting. The counter of the calling thread's spans then also
    counts the spans of the other thread.

    Returns:
        A function without arguments, which returns a context manager for the other thread.
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
