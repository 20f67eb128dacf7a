"""End a Grain pipeline with ``.shard_to(mesh)``: sharded, padded, prefetched global batches.

Importing this package installs ``.shard_to`` on `grain.MapDataset` and `grain.IterDataset`.

What does not belong to every pipeline is in modules of its own: `grain_shard.checkpoint` (Orbax),
`grain_shard.rehearse` (many hosts on one machine), `grain_shard.placement` (batches on devices
without a pipeline), `grain_shard.training` (meshes, model states, data-parallel steps) and
`grain_shard.measuring` (throughput).
"""

import lazy_loader

from grain_shard.install import install, uninstall

# The names are listed once, in __init__.pyi, which type checkers read, too. Each is imported when
# it is used: the package alone takes some milliseconds, and flax or Orbax take a second.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
__version__ = "0.1.0"

install()
