"""End a Grain pipeline with ``.shard_to(mesh)``: sharded, padded, prefetched global batches.

Importing this package installs ``.shard_to`` on `grain.MapDataset` and `grain.IterDataset`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from grain_shard.install import install, uninstall

if TYPE_CHECKING:
    from grain_shard import rehearse
    from grain_shard.chain import shard_to
    from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
    from grain_shard.errors import (
        AgreementError,
        GrainShardError,
        HostTimeoutError,
        ShardingError,
        StateError,
    )
    from grain_shard.feeding.feed_batches import FeedBatches, Feeds, feeds
    from grain_shard.hardware import (
        BatchSizeRecommendation,
        HardwareType,
        detect_hardware,
        get_batch_size_recommendation,
        roofline_batch_size,
        validate_batch_size,
    )
    from grain_shard.iteration.iterator import ShardedIterator
    from grain_shard.measuring.throughput import Throughput, measure_throughput
    from grain_shard.measuring.timeline import Timeline, profile
    from grain_shard.placement import (
        DevicePlacement,
        distribute_batch,
        place_on_device,
        prefetch_to_device,
    )
    from grain_shard.planning.plan import Plan, plan
    from grain_shard.planning.topology import hosts_mesh, topology_mesh
    from grain_shard.reading.sources import ArrayRecordSource
    from grain_shard.sharding.layout import BatchLayout
    from grain_shard.sharding.shard_by_mesh import ShardByMesh
    from grain_shard.sharding.sharding_tree import ShardingTree
    from grain_shard.showing.display import show
    from grain_shard.training.batch_size import estimate_max_batch_size
    from grain_shard.training.data_parallel import (
        create_data_parallel_sharding,
        data_parallel_train_step,
        place_batch_on_shards,
        place_model_state_on_shards,
        place_nnx_state_on_shards,
        reduce_gradient_tree,
        reduce_gradients_across_devices,
        spmd_train_step,
    )
    from grain_shard.training.meshes import (
        create_1d_mesh,
        create_2d_mesh,
        data_parallel_rules,
        fsdp_rules,
        global_batch_size,
        tensor_parallel_rules,
    )
    from grain_shard.training.sharded_pipeline import create_sharded_pipeline
    from grain_shard.transforms.device_put import DevicePut
    from grain_shard.transforms.pad import PadToDivisible
    from grain_shard.transforms.shard_batch import ShardBatch
    from grain_shard.transforms.validate import ValidateBatchSize

__version__ = "0.1.0"

# Imported when used: the package alone in a few milliseconds, and some of it needs flax or Orbax,
# which take a second.
_ON_USE = {
    "chain": ["shard_to"],
    "feeding.feed_batches": ["FeedBatches", "Feeds", "feeds"],
    "errors": [
        "AgreementError",
        "GrainShardError",
        "HostTimeoutError",
        "ShardingError",
        "StateError",
    ],
    "iteration.iterator": ["ShardedIterator"],
    "reading.sources": ["ArrayRecordSource"],
    "sharding.layout": ["BatchLayout"],
    "sharding.shard_by_mesh": ["ShardByMesh"],
    "sharding.sharding_tree": ["ShardingTree"],
    "hardware": [
        "BatchSizeRecommendation",
        "HardwareType",
        "detect_hardware",
        "get_batch_size_recommendation",
        "roofline_batch_size",
        "validate_batch_size",
    ],
    "transforms.device_put": ["DevicePut"],
    "transforms.pad": ["PadToDivisible"],
    "transforms.shard_batch": ["ShardBatch"],
    "transforms.validate": ["ValidateBatchSize"],
    "training.batch_size": ["estimate_max_batch_size"],
    "checkpoint": ["CheckpointRestore", "CheckpointSave"],
    "training.data_parallel": [
        "create_data_parallel_sharding",
        "data_parallel_train_step",
        "place_batch_on_shards",
        "place_model_state_on_shards",
        "place_nnx_state_on_shards",
        "reduce_gradient_tree",
        "reduce_gradients_across_devices",
        "spmd_train_step",
    ],
    "showing.display": ["show"],
    "training.meshes": [
        "create_1d_mesh",
        "create_2d_mesh",
        "data_parallel_rules",
        "fsdp_rules",
        "global_batch_size",
        "tensor_parallel_rules",
    ],
    "training.sharded_pipeline": ["create_sharded_pipeline"],
    "placement": [
        "DevicePlacement",
        "distribute_batch",
        "place_on_device",
        "prefetch_to_device",
    ],
    "planning.plan": ["Plan", "plan"],
    "measuring.throughput": ["Throughput", "measure_throughput"],
    "measuring.timeline": ["Timeline", "profile"],
    "planning.topology": ["hosts_mesh", "topology_mesh"],
}
_MODULE_OF = {name: module for module, names in _ON_USE.items() for name in names}

__all__ = [
    "AgreementError",
    "ArrayRecordSource",
    "BatchLayout",
    "BatchSizeRecommendation",
    "CheckpointRestore",
    "CheckpointSave",
    "DevicePlacement",
    "DevicePut",
    "FeedBatches",
    "Feeds",
    "GrainShardError",
    "HardwareType",
    "HostTimeoutError",
    "PadToDivisible",
    "Plan",
    "ShardBatch",
    "ShardByMesh",
    "ShardedIterator",
    "ShardingError",
    "ShardingTree",
    "StateError",
    "Throughput",
    "Timeline",
    "ValidateBatchSize",
    "create_1d_mesh",
    "create_2d_mesh",
    "create_data_parallel_sharding",
    "create_sharded_pipeline",
    "data_parallel_rules",
    "data_parallel_train_step",
    "detect_hardware",
    "distribute_batch",
    "estimate_max_batch_size",
    "feeds",
    "fsdp_rules",
    "get_batch_size_recommendation",
    "global_batch_size",
    "hosts_mesh",
    "install",
    "measure_throughput",
    "place_batch_on_shards",
    "place_model_state_on_shards",
    "place_nnx_state_on_shards",
    "place_on_device",
    "plan",
    "prefetch_to_device",
    "profile",
    "reduce_gradient_tree",
    "reduce_gradients_across_devices",
    "rehearse",
    "roofline_batch_size",
    "shard_to",
    "show",
    "spmd_train_step",
    "tensor_parallel_rules",
    "topology_mesh",
    "uninstall",
    "validate_batch_size",
]


def __getattr__(name: str) -> Any:
    if name == "rehearse":
        return importlib.import_module("grain_shard.rehearse")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"grain_shard.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install()
