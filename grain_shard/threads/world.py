"""`World`: the contexts, settings and flags of the user's functions, the same wherever they run.

A record is read by the loop's thread, by background threads, by worker processes and by the tasks
of an executor. If contexts, settings or flags differed, so would the records, without an error. So
the world of the thread that opens an iterator goes along:

* into threads: the values of all `ContextVar` objects (`numpy.errstate` is one of them), JAX's
  meshes (`jax.set_mesh`, `jax.sharding.use_abstract_mesh`) and JAX's settings,
* into other processes: JAX's settings, `numpy.errstate`, the absl flags and the working directory.

JAX's settings are those of `jax.config`. Settings that guard a thread are left out, because they
change no value, and only raise or log: the transfer guards, `jax.thread_guard`,
`jax.array_garbage_collection_guard`, `jax.no_tracing` and `jax.no_execution`. The number of CPU
devices does not go into other processes, because it cannot change once JAX runs there. These are
left out because JAX has no public way to read or to list them: contexts of `jax.make_user_context`
and `jax.experimental.compute_on`, and ``with mesh:``, which JAX has deprecated. A mesh, a device
and a `ContextVar` cannot be sent to another process. In place of a default device its platform is
sent.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import threading
import zlib
from collections.abc import Callable
from typing import Any, TypeVar, cast

import cloudpickle
import jax
import numpy as np

from grain_shard.grain_inside.flags import FlagValues
from grain_shard.spans import count_apart
from grain_shard.threads.pickling import key_of, returned

T = TypeVar("T")

# The names of settings that guard a thread contain one of these.
_GUARDS = "guard", "jax_no_"
_STAYS = "jax_num_cpu_devices"
# Most worlds of other processes that a process keeps.
_KEPT = 8

_entered = threading.local()  # the contexts of a thread that is in a world until it ends


class World:
    """The world of the thread that makes this object.

    It can be pickled. In another process it is then an `Elsewhere`.
    """

    def __init__(self):
        self._context = contextvars.copy_context()
        self._mesh, self._errors = cast(Any, jax.sharding.get_mesh()), np.geterr()
        self._abstract_mesh = jax.sharding.get_abstract_mesh()
        self._settings = {name: getattr(jax.config, name) for name in _contexts()}

    def enter(self) -> None:
        """Puts the calling thread into this world until it ends. A new thread calls this, once."""
        _entered.stack = contextlib.ExitStack()
        self._enter(_entered.stack)

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Calls a function in this world, and returns its result.

        Args:
            work: The function.
            *args: The arguments of the function.
        """

        def within() -> T:
            with contextlib.ExitStack() as stack:
                self._enter(stack)
                return work(*args)

        return contextvars.copy_context().run(within)

    def _enter(self, stack: contextlib.ExitStack) -> None:
        for variable, value in self._context.items():
            variable.set(value)
        count_apart()
        for name, value in self._settings.items():
            if getattr(jax.config, name) != value:
                stack.enter_context(_contexts()[name](value))
        if jax.sharding.get_mesh() != self._mesh:
            stack.enter_context(jax.set_mesh(self._mesh))
        if jax.sharding.get_abstract_mesh() != self._abstract_mesh:
            stack.enter_context(jax.sharding.use_abstract_mesh(self._abstract_mesh))

    @functools.cached_property
    def _packed(self) -> bytes:
        settings = {
            name: value.platform if isinstance(value, jax.Device) else value
            for name, value in (jax.config.values | self._settings).items()
            if name != _STAYS and not _is_guard(name)
        }
        parts = FlagValues.here(), os.getcwd(), settings, self._errors
        return zlib.compress(cloudpickle.dumps(parts))  # a third, as each task carries it

    def __reduce__(self) -> tuple[Any, ...]:
        return returned, (key_of(self), _elsewhere, self._packed)


class Elsewhere:
    """The world of a thread of another process, in a worker process or in a task of an executor.

    Args:
        flags: The absl flags.
        folder: The working directory. On a machine without this directory, the tasks stay where
            they are: the sources of this package have absolute paths.
        settings: JAX's settings, by their names in `jax.config`.
        errors: The arguments of `numpy.errstate`.
    """

    def __init__(
        self, flags: FlagValues, folder: str, settings: dict[str, Any], errors: dict[str, Any]
    ):
        self._flags, self._folder, self._settings = flags, folder, settings
        self._errors = errors

    def run(self, work: Callable[..., T], *args: Any) -> T:
        """Calls a function in this world, and returns its result.

        This process keeps the flags, the working directory and JAX's settings. Flags that the
        function defines, for example because it imports a module, have their values in the next
        call.

        Args:
            work: The function.
            *args: The arguments of the function.
        """
        self._flags.apply()
        if os.getcwd() != self._folder and os.path.isdir(self._folder):
            os.chdir(self._folder)
        for name, value in jax.config.values.items():
            if self._settings.get(name, value) != value:
                jax.config.update(name, self._settings[name])
        with np.errstate(**self._errors):
            return work(*args)


@functools.lru_cache(_KEPT)
def _elsewhere(packed: bytes) -> Elsewhere:
    return Elsewhere(*cloudpickle.loads(zlib.decompress(packed)))


def _is_guard(name: str) -> bool:
    return any(part in name for part in _GUARDS)


@functools.cache
def _contexts() -> dict[str, Callable[[Any], contextlib.AbstractContextManager[Any]]]:
    """Returns the settings of JAX that each thread may have for itself.

    `jax.config.update` changes a setting in all threads, and a context in one thread. So a setting
    without a context is the same in all threads.

    Returns:
        The contexts, such as `jax.default_prng_impl`, by the names of their settings.
    """
    names = {name: name.removeprefix("jax_") for name in jax.config.values if not _is_guard(name)}
    return {name: getattr(jax, context) for name, context in names.items() if hasattr(jax, context)}
