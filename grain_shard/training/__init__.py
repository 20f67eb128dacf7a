"""Helpers around the training step; `.shard_to` needs none of them.

They make meshes, data-parallel steps, and pipelines whose batch size is given per device. They
place model states on a mesh, map logical axes to mesh axes, and reduce gradients. They recommend
batch sizes that keep a chip busy, and find the largest batch size that fits in its memory. One
program runs on all devices, and the compiler adds the communication.
"""

from grain_shard.public_names import public_names

__getattr__, __dir__, __all__ = public_names(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]
