"""Helpers around the training step; `.shard_to` needs none of them.

Data-parallel steps, model states on a mesh, pipelines by rows per device, reduced gradients,
meshes, logical axes, and batch sizes: what keeps a chip busy, and what fits in its memory. One
program runs on all devices, and the compiler adds the communication.
"""

from grain_shard.training.batch_size import estimate_max_batch_size
from grain_shard.training.data_parallel import (
    data_parallel_train_step,
    place_batch_on_shards,
    spmd_train_step,
)
from grain_shard.training.gradients import reduce_gradient_tree, reduce_gradients_across_devices
from grain_shard.training.hardware import (
    BatchSizeRecommendation,
    HardwareType,
    detect_hardware,
    get_batch_size_recommendation,
    roofline_batch_size,
    validate_batch_size,
)
from grain_shard.training.meshes import (
    create_1d_mesh,
    create_2d_mesh,
    create_data_parallel_sharding,
    create_named_sharding,
    global_batch_size,
)
from grain_shard.training.place_state import place_model_state_on_shards, place_nnx_state_on_shards
from grain_shard.training.rules import (
    MeshRules,
    data_parallel_rules,
    fsdp_rules,
    partition_spec_for_names,
)
from grain_shard.training.sharded_pipeline import create_sharded_pipeline

__all__ = [
    "BatchSizeRecommendation",
    "HardwareType",
    "MeshRules",
    "create_1d_mesh",
    "create_2d_mesh",
    "create_data_parallel_sharding",
    "create_named_sharding",
    "create_sharded_pipeline",
    "data_parallel_rules",
    "data_parallel_train_step",
    "detect_hardware",
    "estimate_max_batch_size",
    "fsdp_rules",
    "get_batch_size_recommendation",
    "global_batch_size",
    "partition_spec_for_names",
    "place_batch_on_shards",
    "place_model_state_on_shards",
    "place_nnx_state_on_shards",
    "reduce_gradient_tree",
    "reduce_gradients_across_devices",
    "roofline_batch_size",
    "spmd_train_step",
    "validate_batch_size",
]
