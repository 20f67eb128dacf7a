"""Pickles a pipeline for another process, together with the values of absl's flags."""

from __future__ import annotations

import io
import math
import pickle
from typing import Any

import cloudpickle
import jax

from grain_shard.errors import ShardingError, describe_error
from grain_shard.grain_inside.flags import flag_values, set_flags

# The objects of JAX that refer to devices, and their names in an error.
_ON_DEVICES = {
    jax.Array: "jax.Array",
    jax.Device: "jax.Device",
    jax.sharding.Mesh: "jax.sharding.Mesh",
}


def pickled(pipeline: Any, most_bytes: float = math.inf) -> bytes:
    """Pickles a pipeline for another process, which gets the values of absl's flags with it.

    Args:
        pipeline: The pipeline.
        most_bytes: The maximum number of bytes of the result.

    Raises:
        ShardingError: The pipeline cannot be pickled, refers to devices, or is too large.
    """
    try:
        with _BoundedFile(most_bytes) as file:
            _PipelinePickler(file).dump((pipeline, flag_values()))
            return file.getvalue()
    except ShardingError:  # of this file: devices, or too many bytes
        raise
    except Exception as error:
        raise ShardingError(
            f"the pipeline cannot be sent to a worker process: {describe_error(error)}.",
            remedy="do not keep an open file, connection, lock, threading.local or ContextVar in"
            " the pipeline, because it cannot be pickled. In a source, leave it out of the state"
            " that __getstate__ returns, and open it again in __setstate__, which runs in the"
            " worker. In feeds, open it inside make_feed.",
        ) from error


def unpickled(packed: bytes) -> Any:
    """Returns a pipeline that `pickled` has pickled, and sets the flags of this process."""
    pipeline, values = pickle.loads(packed)
    set_flags(values)
    return pipeline


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
    """Refuses objects that refer to devices.

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
        return super().reducer_override(obj)
