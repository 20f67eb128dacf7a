"""What stands around the training step; `.shard_to` needs none of it.

==================  ===============================================================================
data parallel       `data_parallel_train_step` for linen or plain parameters, `spmd_train_step` for
                    NNX. One program for all devices: the compiler adds the communication.
model states        `place_model_state_on_shards` and, by nnx filters, `place_nnx_state_on_shards`:
                    a model's and its optimizer's state, replicated, fully sharded, or by path.
pipelines           `create_sharded_pipeline`: from a batch size for each device.
gradients           `reduce_gradients_across_devices` inside `jax.shard_map`, and
                    `reduce_gradient_tree` of gradients that are stacked by device.
meshes              `create_1d_mesh`, `create_2d_mesh`; `create_named_sharding` and
                    `create_data_parallel_sharding` on them; `global_batch_size` for so many rows
                    a shard.
logical axes        `MeshRules`, `data_parallel_rules`, `fsdp_rules`, `partition_spec_for_names`.
batch sizes         `detect_hardware`, `get_batch_size_recommendation`, `validate_batch_size` and
                    `roofline_batch_size`: what keeps a chip busy. `estimate_max_batch_size`: what
                    fits in its memory.
==================  ===============================================================================

Example:
    >>> import jax.numpy as jnp, numpy as np, optax
    >>> mesh = create_1d_mesh()
    >>> loss_fn = lambda params, batch: jnp.mean((batch["x"] @ params["w"]) ** 2)
    >>> params, optimizer = {"w": jnp.ones(3)}, optax.sgd(0.1)
    >>> state = place_model_state_on_shards((params, optimizer.init(params)), mesh)
    >>> batch = {"x": np.ones((8, 3), np.float32)}
    >>> state, metrics = data_parallel_train_step(loss_fn, optimizer, batch, state)
    >>> metrics["loss"]
    Array(9., dtype=float32)
"""

from grain_shard.hardware import (
    BatchSizeRecommendation,
    HardwareType,
    detect_hardware,
    get_batch_size_recommendation,
    roofline_batch_size,
    validate_batch_size,
)
from grain_shard.training.batch_size import estimate_max_batch_size
from grain_shard.training.data_parallel import (
    data_parallel_train_step,
    place_batch_on_shards,
    spmd_train_step,
)
from grain_shard.training.gradients import reduce_gradient_tree, reduce_gradients_across_devices
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
