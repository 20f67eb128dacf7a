"""Pickles a pipeline for other processes, and the elements that come back.

An object that comes back to the process that made it is itself, and no copy. So a task of an
executor whose threads are in this process uses the pipeline as it is, and an element from a worker
is of the main script's own classes. `cloudpickle` alone sends a class of the main script by value,
and when it comes back, its attributes and methods replace those that the class has by then.
"""

from __future__ import annotations

import io
import math
import os
import pickle
import uuid
import weakref
from collections.abc import Callable
from typing import Any

import cloudpickle
import jax

from grain_shard.errors import ShardingError, describe_error

Key = tuple[int, str]  # the number of a process, and a name that no other object has

# The objects of JAX that refer to devices, and their names in an error.
_ON_DEVICES = {
    jax.Array: "jax.Array",
    jax.Device: "jax.Device",
    jax.sharding.Mesh: "jax.sharding.Mesh",
}

# A class that came from another process has the key that it has there.
_keys = weakref.WeakKeyDictionary[Any, Key]()
_made_here = weakref.WeakValueDictionary[Key, Any]()


def key_of(made_here: Any) -> Key:
    """Returns the key by which `returned` finds an object of this process."""
    key = _keys.setdefault(made_here, (os.getpid(), uuid.uuid4().hex))
    _made_here[key] = made_here
    return key


def returned(key: Key, copy: Callable[..., Any], *args: Any) -> Any:
    """Returns an object that was pickled: itself in the process that made it, elsewhere a copy.

    A ``__reduce__`` names this function.

    Args:
        key: The key of the object.
        copy: Makes the copy.
        *args: The arguments of `copy`.
    """
    here = _made_here.get(key) if key[0] == os.getpid() else None
    return copy(*args) if here is None else here


def pickled(pipeline: Any, most_bytes: float = math.inf) -> bytes:
    """Pickles a pipeline for another process.

    Raises:
        ShardingError: The pipeline cannot be pickled, refers to devices, or is too large.
    """
    try:
        with _BoundedFile(most_bytes) as file:
            _PipelinePickler(file).dump(pipeline)
            return file.getvalue()
    except ShardingError:
        raise
    except Exception as error:
        raise ShardingError(
            f"the pipeline cannot be sent to a worker process: {describe_error(error)}.",
            remedy="do not keep an open file, connection, lock, threading.local or ContextVar in"
            " the pipeline, because it cannot be pickled. In a source, leave it out of the state"
            " that __getstate__ returns, and open it again in __setstate__, which runs in the"
            " worker. In feeds, open it inside make_feed.",
        ) from error


def pickled_back(element: Any, keep: Callable[[pickle.PickleBuffer], Any] | None = None) -> bytes:
    """Pickles an element for the process that the pipeline came from.

    Args:
        element: The element.
        keep: Called with each array, which is then left out of the bytes.
    """
    with io.BytesIO() as file:
        _ElementPickler(file, protocol=5, buffer_callback=keep).dump(element)
        return file.getvalue()


class _BoundedFile(io.BytesIO):
    def __init__(self, most_bytes: float):
        super().__init__()
        self._most_bytes = most_bytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._most_bytes:
            raise ShardingError(
                f"the pipeline has more than {self._most_bytes:,} bytes to send to each worker"
                " process.",
                remedy="let the source open its files in the worker process, and hold no data.",
            )
        return super().write(data)


class _PipelinePickler(cloudpickle.Pickler):
    """Sends the key of each class that it sends by value. Refuses objects that refer to devices.

    A worker that unpickled such an object would start JAX's backend. On a TPU VM the backend of a
    second process finds the chips taken.
    """

    def reducer_override(self, obj: Any) -> Any:
        if (kind := next((k for k in _ON_DEVICES if isinstance(obj, k)), None)) is not None:
            raise ShardingError(
                "the pipeline cannot be sent to a worker process, because it refers to a"
                f" {_ON_DEVICES[kind]}, and the devices belong to this process.",
                remedy="in the functions and the source of the pipeline, use numpy.asarray(array)"
                " in place of a jax.Array, and no mesh, sharding or device.",
            )
        reduced = super().reducer_override(obj)
        if isinstance(obj, type) and isinstance(reduced, tuple):
            make, args, *state = reduced
            return _class_with_key, (key_of(obj), make, args), *state
        return reduced


def _class_with_key(key: Key, make: Callable[..., type], args: tuple[Any, ...]) -> type:
    made = make(*args)
    _keys[made] = key
    return made


class _ElementPickler(cloudpickle.Pickler):
    """Sends a class that came with the pipeline by its key, and no other class of that name."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) and (key := _keys.get(obj)) is not None:
            return returned, (key, _lost, obj.__name__)
        return super().reducer_override(obj)


def _lost(name: str) -> Any:
    raise ShardingError(
        f"the class {name} of the pipeline is gone from the process that sent it.",
        remedy=f"keep the class {name} in a variable of the main script.",
    )
