"""Arrays onto devices without a pipeline, under the names of ``datarax.distributed``.

`place_on_device` and `distribute_batch` place a tree of arrays; `prefetch_to_device` does so for
batch after batch, ahead of the loop; `DevicePlacement` has these and a few more as the methods of
one object, with a device and its chip. For training, end the pipeline with `.shard_to`, which
reads only this host's rows: everything here takes whole batches.

The trees hold numpy arrays, `jax.Array`s (typed PRNG keys too) and Python scalars, and come back
with `jax.Array`s; text stays on the host. What no device can hold is refused, with its path: Python
objects, masked arrays, dates. On the CPU backend the result shares no memory with numpy input. On
several processes, each process passes the same whole data and keeps what its own devices hold. Host
data is placed without a collective.
"""

from grain_shard.public_names import public_names

__getattr__, __dir__, __all__ = public_names("grain_shard", __file__)  # pyright: ignore[reportUnsupportedDunderAll]
