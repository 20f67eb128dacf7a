"""Helpers around the training step; `.shard_to` needs none of them.

Data-parallel steps, model states on a mesh, pipelines by rows per device, reduced gradients,
meshes, logical axes, and batch sizes: what keeps a chip busy, and what fits in its memory. One
program runs on all devices, and the compiler adds the communication.
"""

from grain_shard.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
