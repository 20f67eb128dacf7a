"""End a Grain pipeline with ``.shard_to(mesh)``: sharded, padded, prefetched global batches.

Importing this package installs ``.shard_to`` on `grain.MapDataset` and `grain.IterDataset`.
"""

from grain_shard.chain import install, shard_to, uninstall
from grain_shard.errors import (
    AgreementError,
    GrainShardError,
    HostTimeoutError,
    ShardingError,
    StateError,
)
from grain_shard.layout import BatchLayout
from grain_shard.sharding_options import ShardByMesh
from grain_shard.shardings import ShardingTree
from grain_shard.sources import ArrayRecordSource
from grain_shard.transforms.device_put import DevicePut
from grain_shard.transforms.pad import PadToDivisible
from grain_shard.transforms.shard_batch import ShardBatch
from grain_shard.transforms.validate import ValidateBatchSize

__version__ = "0.1.0"

__all__ = [
    "AgreementError",
    "ArrayRecordSource",
    "BatchLayout",
    "DevicePut",
    "GrainShardError",
    "HostTimeoutError",
    "PadToDivisible",
    "ShardBatch",
    "ShardByMesh",
    "ShardingError",
    "ShardingTree",
    "StateError",
    "ValidateBatchSize",
    "install",
    "shard_to",
    "uninstall",
]

install()
