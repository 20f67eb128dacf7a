"""End a Grain pipeline with ``.shard_to(mesh)``: sharded, padded, prefetched global batches.

Importing this package installs ``.shard_to`` on `grain.MapDataset` and `grain.IterDataset`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from grain_shard.chain import install, shard_to, uninstall
from grain_shard.elastic.feed_batches import FeedBatches, Feeds, feeds
from grain_shard.errors import (
    AgreementError,
    GrainShardError,
    HostTimeoutError,
    ShardingError,
    StateError,
)
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.reading.sources import ArrayRecordSource
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.sharding_options import ShardByMesh
from grain_shard.sharding.shardings import ShardingTree
from grain_shard.training.hardware import (
    BatchSizeRecommendation,
    HardwareType,
    detect_hardware,
    get_batch_size_recommendation,
    roofline_batch_size,
    validate_batch_size,
)
from grain_shard.transforms.device_put import DevicePut
from grain_shard.transforms.pad import PadToDivisible
from grain_shard.transforms.shard_batch import ShardBatch
from grain_shard.transforms.validate import ValidateBatchSize

if TYPE_CHECKING:
    from grain_shard import rehearse
    from grain_shard.checkpoint import CheckpointRestore, CheckpointSave
    from grain_shard.measuring.throughput import (
        Throughput,
        create_sharded_pipeline,
        measure_throughput,
    )
    from grain_shard.measuring.timeline import Timeline, profile
    from grain_shard.placing.placement import (
        DevicePlacement,
        distribute_batch,
        place_on_device,
        prefetch_to_device,
    )
    from grain_shard.planning.make_plan import Plan, plan
    from grain_shard.planning.topology import hosts_mesh, topology_mesh
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

__version__ = "0.1.0"

# Imported when used: some of it needs flax or Orbax, which take a second to import.
_ON_USE = {
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
    "placing.placement": [
        "DevicePlacement",
        "distribute_batch",
        "place_on_device",
        "prefetch_to_device",
    ],
    "planning.make_plan": ["Plan", "plan"],
    "measuring.throughput": ["Throughput", "create_sharded_pipeline", "measure_throughput"],
    "measuring.timeline": ["Timeline", "profile"],
    "planning.topology": ["hosts_mesh", "topology_mesh"],
}
_MODULE_OF = {name: module for module, names in _ON_USE.items() for name in names}

__all__ = [  # noqa: RUF022 (what is there at once, then what is imported when used)
    "AgreementError",
    "ArrayRecordSource",
    "BatchLayout",
    "BatchSizeRecommendation",
    "DevicePut",
    "FeedBatches",
    "Feeds",
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
    "feeds",
    "get_batch_size_recommendation",
    "install",
    "roofline_batch_size",
    "shard_to",
    "uninstall",
    "validate_batch_size",
    "CheckpointRestore",
    "CheckpointSave",
    "DevicePlacement",
    "Plan",
    "Throughput",
    "Timeline",
    "create_1d_mesh",
    "create_2d_mesh",
    "create_data_parallel_sharding",
    "create_sharded_pipeline",
    "data_parallel_rules",
    "data_parallel_train_step",
    "distribute_batch",
    "estimate_max_batch_size",
    "fsdp_rules",
    "global_batch_size",
    "hosts_mesh",
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
    "show",
    "spmd_train_step",
    "tensor_parallel_rules",
    "topology_mesh",
]


def __getattr__(name: str) -> Any:
    if name == "rehearse":
        return importlib.import_module("grain_shard.rehearse")
    if name in _MODULE_OF:
        return getattr(importlib.import_module(f"grain_shard.{_MODULE_OF[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


install()
