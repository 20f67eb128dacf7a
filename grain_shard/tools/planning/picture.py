"""Draws a mesh: the rows of a batch that each device holds, and the host of each device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grain_shard.errors import describe_mesh
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import num_shards
from grain_shard.tools.showing.drawing import draw_leaf
from grain_shard.tools.showing.tables import to_svg


def draw_mesh(mesh: Mesh, spec: Any, num_rows: int, path: str | Path) -> None:
    """Writes an SVG with a line for each shard of the rows: its rows, and the devices that hold it.

    `show` prints the same lines. Only the first 16 shards are drawn. If a line names several hosts,
    these hosts hold the same rows.

    Args:
        mesh: The mesh.
        spec: A `PartitionSpec` or a tree prefix of them, as for `shard_to`. If there
            are several, the one with the most shards of the rows is drawn.
        num_rows: Rows of a batch, padding included.
        path: The file to write, an SVG.
    """
    finest = max(ShardingTree.of(mesh, spec).named(), key=num_shards)
    sharding = NamedSharding(mesh, PartitionSpec(*finest.spec[:1]))
    rows = jax.ShapeDtypeStruct((num_rows,), "int8", sharding=sharding)
    title = f"{describe_mesh(mesh.shape.items())}: rows of a batch, and who holds them"
    Path(path).write_text(to_svg(draw_leaf(["rows of a batch"], rows), title))
