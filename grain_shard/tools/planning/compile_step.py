"""Compiles a training step for a TPU slice, without the slice.

The result shows whether the step fits in memory, and takes batches in the shardings of `shard_to`.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax import ShapeDtypeStruct
from jax.sharding import Mesh, NamedSharding

from grain_shard.errors import ShardingError
from grain_shard.sharding.assemble import Assembler
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.tools.arguments import UsageError
from grain_shard.tools.showing.tables import FittingTable, describe_bytes
from grain_shard.training.step_memory import StepMemory, lower, step_memory
from grain_shard.trees import MASK_KEY


def memory_table(memory: StepMemory) -> FittingTable:
    """Returns a table of the step's memory on one device, with a line for each use.

    The last line says that the step takes the batch as `shard_to` hands it out.
    """
    lines = [
        ("state and batch", describe_bytes(memory.argument_bytes)),
        ("results, less donated memory", describe_bytes(memory.output_bytes - memory.alias_bytes)),
        ("temporaries", describe_bytes(memory.temp_bytes)),
        ("code", describe_bytes(memory.code_bytes)),
        ("in all", describe_bytes(memory.total_bytes)),
        ("the batch goes in", "as .shard_to hands it out"),
    ]
    return FittingTable(["the compiled step", "on a device"], lines, left=1)


def load_step(path: str, name: str) -> Callable[[Mesh], tuple[Any, Any, Any]]:
    """Runs a script, but not as ``__main__``, and returns the function of the given name.

    The script's folder stays the first of `sys.path`, as for ``python script.py``, because the
    function may later import modules from that folder.

    Raises:
        UsageError: The script does not define the name.
    """
    sys.path.insert(0, str(Path(path).resolve().parent))
    names = runpy.run_path(path)
    if name not in names:
        raise UsageError(
            f"{path} defines no {name!r}.\n"
            "  remedy: write script.py:name with a function that the script defines."
        )
    return names[name]


def compile_step(
    build: Callable[[Mesh], tuple[Any, Any, Any]],
    mesh: Mesh,
    spec: Any,
    global_batch_size: int,
) -> StepMemory:
    """Compiles a training step for a mesh, and returns the memory that it takes on each device.

    The step is traced under `jax.set_mesh`, and not run. `build` is not called under it, so that it
    can make arrays on this machine, such as keys. If `build` needs the mesh, for example to find
    the shapes and shardings of a state with `jax.eval_shape`, it calls `jax.set_mesh` itself.

    The state decides the type of the axes, Explicit or Auto: if its mesh differs from `mesh` only
    in these types, the batch is on the state's mesh, too. So for Auto axes `build` places the state
    on ``jax.sharding.Mesh(mesh.devices, mesh.axis_names)``.

    Args:
        build: A function that takes the mesh and returns ``(step, state, record)``. The step is a
            function ``step(state, batch)``, which may be jitted. The state is a tree of
            `jax.ShapeDtypeStruct` with shardings on the mesh. The record is a tree of
            `jax.ShapeDtypeStruct` without shardings: one record as it is before ``.batch``.
        mesh: A mesh that `topology_mesh` made.
        spec: A `PartitionSpec` or a tree prefix of them, as for `shard_to`; None for the default.
        global_batch_size: Rows of the batch, padding included. If the record is a dict, the batch
            also has a "valid_mask".

    Raises:
        ShardingError: The batch does not fit its spec. Or the step was jitted for batches in other
            shardings than `shard_to` gives them.
    """
    step, state, record = build(mesh)
    mesh = _mesh_of(state, mesh)
    batch = _batch(record, ShardingTree.of(mesh, spec), global_batch_size)
    with jax.set_mesh(mesh):
        try:
            lowered = lower(step, state, batch)
        except ValueError as error:
            unsharded = jax.tree.map(lambda leaf: ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
            try:
                lower(step, state, unsharded)
            except ValueError:
                raise error from None  # the step also fails without shardings: another cause
            raise ShardingError(
                f"the step takes batches in other shardings than .shard_to gives them: {error}",
                remedy="jit the step without in_shardings, or pass .shard_to the same shardings.",
            ) from None
        return step_memory(lowered)


def _mesh_of(state: Any, mesh: Mesh) -> Mesh:
    """Returns the state's mesh if it differs from `mesh` only in the types of axes, else `mesh`."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    for of_state in (one.mesh for one in shardings if isinstance(one, NamedSharding)):
        if of_state.axis_names == mesh.axis_names:
            chosen = Mesh(mesh.devices, mesh.axis_names, of_state.axis_types)
            if of_state in (chosen, chosen.abstract_mesh):
                return chosen
    return mesh


def _batch(record: Any, shardings: ShardingTree, global_batch_size: int) -> Any:
    """Returns a global batch of such records as `shard_to` makes it, as `jax.ShapeDtypeStruct`s."""
    # All hosts get the same global batch, so the layout of any host will do.
    layout = next(iter(shardings.layouts().values()))
    host_batch_size = len(layout.rows(global_batch_size))

    if isinstance(record, dict):
        record = {**record, MASK_KEY: ShapeDtypeStruct((), np.bool_)}
        shardings = shardings.with_mask(MASK_KEY)

    def rows(leaf: Any) -> np.ndarray:
        zero = np.zeros((), leaf.dtype)
        return np.broadcast_to(zero, (host_batch_size, *leaf.shape))  # without allocating the rows

    return Assembler(shardings, layout).abstract(jax.tree.map(rows, record))
