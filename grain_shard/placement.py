"""Puts arrays on devices without a pipeline, under the names of ``datarax.distributed``.

`place_on_device` and `distribute_batch` place one tree of arrays. `prefetch_to_device` places the
batches of an iterable, ahead of the loop. `DevicePlacement` has these and a few more functions as
methods, with a default device. All of them take whole batches. For training, end the pipeline with
`.shard_to`, which reads only this host's rows.

A tree has numpy arrays, `jax.Array`s (typed PRNG keys too) and Python scalars. The result has
`jax.Array`s in their place. Text stays on the host. A leaf that no device can hold, such as Python
objects, a masked array or dates, raises an error with the path of the leaf. On the CPU backend the
result shares no memory with numpy input. With several processes, each process passes the same whole
data and keeps the parts that its own devices hold. Host data is placed without a collective.
"""

from grain_shard.public_names import public_names

__getattr__, __dir__, __all__ = public_names("grain_shard", __file__)  # pyright: ignore[reportUnsupportedDunderAll]
