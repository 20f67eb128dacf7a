"""The mesh as a picture: which rows of a batch each device holds, and whose device it is."""

from __future__ import annotations

from itertools import groupby
from pathlib import Path
from typing import Any

from jax.sharding import Mesh, NamedSharding, PartitionSpec

from grain_shard.errors import GrainShardError, describe_mesh
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import num_shards
from grain_shard.tools.extras import not_installed
from grain_shard.tools.palette import FILLS
from grain_shard.tools.showing.drawing import holders

_MAX_LINES = 32  # shards of the rows
_MAX_DEVICES = 32  # in a line


def draw_mesh(
    mesh: Mesh, spec: Any, num_rows: int, path: str | Path, *, rows_of: str = "a batch"
) -> None:
    """Draws a line for each shard of the rows, with a box for each host that holds it.

    A box is as wide as the devices of its host that hold the shard. Where there are several boxes
    in a line, those hosts hold the same rows.

    Args:
        mesh: The mesh.
        spec: As for `shard_to`; of several specs, the one that cuts the batch most.
        num_rows: Rows of a batch, or of a microbatch, padding included.
        path: The file; its suffix chooses the format: ".png", ".svg", ".pdf".
        rows_of: The words "a batch" or "a microbatch", for the title.

    Raises:
        GrainShardError: matplotlib is not installed, knows no such suffix, or cannot write there.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError:
        raise not_installed("the picture", "plot", ["matplotlib"]) from None
    most = max(ShardingTree.of(mesh, spec).named(), key=num_shards)
    rows_spec = PartitionSpec(*most.spec[:1])
    held = holders(NamedSharding(mesh, rows_spec), (num_rows,), 1)
    lines = [(rows, [device.process_index for device in held[rows]]) for rows in sorted(held)]
    del lines[_MAX_LINES:]
    width = min(len(lines[0][1]), _MAX_DEVICES)

    inches = max(4.5, 1.5 + 0.6 * width), 1 + 0.32 * len(lines)
    figure = Figure(figsize=inches, layout="constrained")
    axes = figure.add_subplot()
    colors: dict[frozenset[int], str] = {}  # lines of the same hosts are alike
    for y, (_, hosts) in enumerate(lines):
        color = colors.setdefault(frozenset(hosts), FILLS[len(colors) % len(FILLS)])
        x = 0
        for host, devices in groupby(sorted(hosts)[:width]):
            count = len(list(devices))
            axes.add_patch(Rectangle((x, y), count, 1, facecolor=color, edgecolor="black"))
            axes.text(x + count / 2, y + 0.5, f"host {host}", ha="center", va="center", size=7)
            x += count
    axes.set_xlim(0, width)
    axes.set_ylim(len(lines), 0)
    axes.set_xticks([])
    axes.set_yticks(
        [y + 0.5 for y in range(len(lines))], [f"{start}:{stop}" for ((start, stop),), _ in lines]
    )
    axes.tick_params(length=0, labelsize=8)
    axes.spines[:].set_visible(False)
    title = f"{describe_mesh(mesh.shape.items())}: rows of {rows_of}, and who holds them"
    if len(lines) < len(held) or width < len(lines[0][1]):
        title += (
            f"\nthe first {len(lines)} of {len(held)} shards,"
            f" the first {width} of {len(lines[0][1])} devices"
        )
    figure.suptitle(title, size=9)
    try:
        figure.savefig(path, dpi=120)
    except (ValueError, OSError) as error:
        raise GrainShardError(
            f"cannot draw {path}: {error}\n"
            "  remedy: name a file that can be written, ending in .png or .svg."
        ) from None
