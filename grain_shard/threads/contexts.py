"""`Contexts`: background threads run the user's functions in the contexts of the loop's thread.

A context has the values of all `ContextVar`s (`numpy.errstate` is one), JAX's meshes, and the JAX
settings that can be set for a single thread. Settings that guard a thread are left out, because
they change no value, and only raise or log: the transfer guards, `jax.thread_guard`,
`jax.array_garbage_collection_guard`, `jax.no_tracing` and `jax.no_execution`.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax

from grain_shard.spans import count_apart

T = TypeVar("T")

# The names of settings that guard a thread contain one of these.
_GUARDS = "guard", "no_tracing", "no_execution"
# JAX's settings that can be set for a single thread, and the names of their context managers.
_SETTINGS = {
    setting: name
    for setting in jax.config.values
    if hasattr(jax, name := setting.removeprefix("jax_"))
    and not any(guard in name for guard in _GUARDS)
}


class Contexts:
    """The contexts of the thread that makes this object."""

    def __init__(self):
        self._context = contextvars.copy_context()
        self._mesh = cast(Any, jax.sharding.get_mesh())
        self._abstract_mesh = jax.sharding.get_abstract_mesh()
        self._settings = {setting: getattr(jax.config, setting) for setting in _SETTINGS}

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Calls a function with its arguments in these contexts, and returns its result."""
        # A copy, because only one thread at a time can be in a context.
        return self._context.copy().run(self._run, work, *args)

    def _run(self, work: Callable[..., T], *args: Any) -> T:
        count_apart()
        with contextlib.ExitStack() as stack:
            for setting, value in self._settings.items():
                if getattr(jax.config, setting) != value:
                    stack.enter_context(getattr(jax, _SETTINGS[setting])(value))
            if jax.sharding.get_mesh() != self._mesh:
                stack.enter_context(jax.set_mesh(self._mesh))
            if jax.sharding.get_abstract_mesh() != self._abstract_mesh:
                stack.enter_context(jax.sharding.use_abstract_mesh(self._abstract_mesh))
            return work(*args)
