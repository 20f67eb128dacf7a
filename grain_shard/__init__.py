"""Ends a Grain pipeline with ``.shard_to(mesh)``: sharded, padded, prefetched global batches.

Importing this package installs ``.shard_to`` on `grain.MapDataset` and `grain.IterDataset`.

Parts that only some pipelines need are in separate modules: `grain_shard.checkpoint` (Orbax),
`grain_shard.rehearse` (many hosts on one machine), `grain_shard.placement` (batches on devices
without a pipeline), `grain_shard.training` (meshes, model states, data-parallel steps) and
`grain_shard.measuring` (throughput).
"""

from grain_shard.install import install as install
from grain_shard.install import uninstall as uninstall
from grain_shard.public_names import public_names

__version__ = "0.1.0"
__getattr__, __dir__, __all__ = public_names(__name__, __file__)  # pyright: ignore[reportUnsupportedDunderAll]

install()
