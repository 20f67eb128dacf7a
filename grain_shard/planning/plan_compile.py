"""A training step compiled for a slice that is not there: does it fit, and does the batch go in."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from grain_shard.errors import GrainShardError, ShardingError
from grain_shard.planning.plan_result import Plan
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import check_fits
from grain_shard.showing.rich_output import describe_bytes
from grain_shard.trees import flatten


@dataclass(frozen=True)
class CompiledStep:
    """What the compiler says of a step, in bytes on one device.

    Attributes:
        argument_bytes: State and batch.
        output_bytes: What the step returns.
        alias_bytes: Of its results, those that take the place of a donated argument.
        temp_bytes: What it needs while it runs.
        code_bytes: The program.
    """

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        """What one device holds at most while the step runs."""
        held = self.argument_bytes + self.output_bytes - self.alias_bytes
        return held + self.temp_bytes + self.code_bytes

    def lines(self) -> list[tuple[str, str]]:
        """What is held, and how much of it."""
        return [
            ("state and batch", describe_bytes(self.argument_bytes)),
            ("results, less donated memory", describe_bytes(self.output_bytes - self.alias_bytes)),
            ("temporaries", describe_bytes(self.temp_bytes)),
            ("code", describe_bytes(self.code_bytes)),
            ("in all", describe_bytes(self.total_bytes)),
            ("the batch goes in", "as .shard_to hands it out"),
        ]


def load_step(place: str) -> Callable[[Mesh], tuple[Any, Any, Any]]:
    """The function that ``script.py:name`` names; the script is run, but not as ``__main__``.

    Raises:
        GrainShardError: There is no such script or name.
    """
    path, _, name = place.rpartition(":")
    names = runpy.run_path(path) if Path(path).is_file() else {}
    if name not in names:
        raise GrainShardError(
            f"{place!r} names no function of a script.\n  remedy: write script.py:name."
        )
    return names[name]


def compile_step(
    build: Callable[[Mesh], tuple[Any, Any, Any]], mesh: Mesh, spec: Any, plan: Plan
) -> CompiledStep:
    """Compiles a step for the devices of a mesh; nothing runs.

    Args:
        build: Called with the mesh. Returns ``(step, state, record)``: ``step(state, batch)``,
            which may be jitted; the state as a tree of `jax.ShapeDtypeStruct` with shardings on
            the mesh; and one record, as it is before ``.batch``, as a tree of
            `jax.ShapeDtypeStruct` without.
        mesh: A mesh that `topology_mesh` made.
        spec: As for `shard_to`.
        plan: Its plan. The batch has its rows, and a "valid_mask" if it is a dict.

    Raises:
        ShardingError: The batch does not fit its spec; or the step was jitted for batches in other
            shardings, so that each would have to be moved.
    """
    step, state, record = build(mesh)
    batch = _batch(record, ShardingTree.of(mesh, spec), plan.reads.padded_batch_size)
    jitted: Any = step if hasattr(step, "lower") else jax.jit(step)
    memory = _lowered(jitted, state, batch).compile().memory_analysis()
    return CompiledStep(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temp_bytes=memory.temp_size_in_bytes,
        code_bytes=memory.generated_code_size_in_bytes,
    )


def _lowered(jitted: Any, state: Any, batch: Any) -> Any:
    try:
        return jitted.lower(state, batch)
    except ValueError as error:
        bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), batch)
        try:
            jitted.lower(state, bare)
        except ValueError:
            raise error from None  # an error of the step, whatever the shardings
        raise ShardingError(
            f"the step takes the batch in other shardings than .shard_to hands it out in: {error}",
            remedy="jit the step without in_shardings, or pass those to shard_to.",
        ) from None


def _batch(record: Any, shardings: ShardingTree, rows: int) -> Any:
    """The batch that `shard_to` hands out, as `jax.ShapeDtypeStruct`s."""

    def batched(leaf: Any) -> jax.ShapeDtypeStruct:
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        return jax.ShapeDtypeStruct((rows, *leaf.shape), dtype)

    batch = jax.tree.map(batched, record)
    if isinstance(batch, dict):
        batch = {**batch, "valid_mask": jax.ShapeDtypeStruct((rows,), np.bool_)}
        shardings = shardings.with_mask("valid_mask")
    paths, leaves, structure = flatten(batch)
    placed = []
    for path, leaf, sharding in zip(paths, leaves, shardings.match(batch), strict=True):
        if sharding is None:
            raise ShardingError("text does not go into a step.", path=path, remedy="drop it.")
        check_fits(path, leaf, sharding, leaf.shape)
        placed.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))
    return structure.unflatten(placed)
