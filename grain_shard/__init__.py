"""End a Grain pipeline with ``.shard_to(mesh)``: sharded, padded, prefetched global batches.

Importing this package installs ``.shard_to`` on `grain.MapDataset` and `grain.IterDataset`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from grain_shard.chain import install, shard_to, uninstall
from grain_shard.errors import (
    AgreementError,
    GrainShardError,
    HostTimeoutError,
    ShardingError,
    StateError,
)
from grain_shard.hardware import (
    BatchSizeRecommendation,
    HardwareType,
    detect_hardware,
    roofline_batch_size,
)
from grain_shard.iterator import ShardedIterator
from grain_shard.layout import BatchLayout
from grain_shard.sharding_options import ShardByMesh
from grain_shard.shardings import ShardingTree
from grain_shard.sources import ArrayRecordSource
from grain_shard.transforms.device_put import DevicePut
from grain_shard.transforms.pad import PadToDivisible
from grain_shard.transforms.shard_batch import ShardBatch
from grain_shard.transforms.validate import ValidateBatchSize

if TYPE_CHECKING:
    from grain_shard.checkpoint import CheckpointRestore, CheckpointSave

__version__ = "0.1.0"

# What needs Orbax, which takes a second to import, or is a command: imported when it is used.
_ON_USE = {
    "CheckpointRestore": "grain_shard.checkpoint",
    "CheckpointSave": "grain_shard.checkpoint",
}

__all__ = [
    "AgreementError",
    "ArrayRecordSource",
    "BatchLayout",
    "BatchSizeRecommendation",
    "CheckpointRestore",
    "CheckpointSave",
    "DevicePut",
    "GrainShardError",
    "HardwareType",
    "HostTimeoutError",
    "PadToDivisible",
    "ShardBatch",
    "ShardByMesh",
    "ShardedIterator",
    "ShardingError",
    "ShardingTree",
    "StateError",
    "ValidateBatchSize",
    "detect_hardware",
    "install",
    "roofline_batch_size",
    "shard_to",
    "uninstall",
]


def __getattr__(name: str) -> Any:
    if name in _ON_USE:
        return getattr(importlib.import_module(_ON_USE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install()
