"""The mesh as a picture: a square for each device, in the color of its host."""

from __future__ import annotations

import colorsys
import math
from pathlib import Path
from typing import Any

import numpy as np
from jax.sharding import Mesh, NamedSharding

from grain_shard.errors import GrainShardError, describe_mesh
from grain_shard.sharding.layout import batch_axes
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.sharding.specs import num_shards

_MAX_NUMBERED = 1024  # devices; of more, the numbers would not be legible
_CELL_INCHES = 0.32
_MAX_INCHES = 16.0
_MAX_RATIO = 3  # of height to width
_MAX_TICKS = 16
_NO_DEVICE = -1


def draw_mesh(mesh: Mesh, spec: Any, path: str | Path) -> None:
    """Draws the mesh, batch axes downwards and the others to the right.

    The devices of a line hold the same rows of a batch. So where a line has several colors, those
    hosts hold the same rows.

    Args:
        mesh: The mesh.
        spec: As for `shard_to`; of several specs, the one that cuts the batch most.
        path: The file; its suffix says what it becomes: ".png", ".svg", ".pdf".

    Raises:
        GrainShardError: matplotlib is not installed, knows no such suffix, or cannot write there.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise GrainShardError(
            'the picture needs matplotlib, which is not installed.\n  remedy: pip install "grain-'
            'shard[plot]"'
        ) from None
    named = [s for s in ShardingTree.of(mesh, spec).shardings() if isinstance(s, NamedSharding)]
    down = batch_axes(max(named, key=num_shards).spec)
    across = tuple(name for name in mesh.axis_names if name not in down)
    hosts = _grid(mesh, down, across)
    blocks, columns = hosts.shape
    across_label, down_label = " x ".join(across), " x ".join(down)
    if columns == 1:
        hosts, across_label, down_label = _lines(hosts), "", f"{down_label}, line by line"
    elif blocks > _MAX_RATIO * columns:
        hosts, down_label = _strips(hosts), f"{down_label}, strip by strip"
    inches = np.array(hosts.shape[::-1]) * _CELL_INCHES
    inches *= min(1.0, _MAX_INCHES / inches.max())
    figure = Figure(figsize=(max(inches[0], 3.5) + 1.2, inches[1] + 1.2), dpi=150)
    axes = figure.add_subplot()
    axes.imshow(_colors(hosts), interpolation="nearest", aspect="equal")
    if hosts.size <= _MAX_NUMBERED:
        for (line, column), host in np.ndenumerate(hosts):
            if host != _NO_DEVICE:
                axes.text(column, line, str(host), ha="center", va="center", fontsize=6)
        axes.set_xticks(np.arange(-0.5, hosts.shape[1]), minor=True)
        axes.set_yticks(np.arange(-0.5, hosts.shape[0]), minor=True)
        axes.grid(which="minor", color="white", linewidth=1)
    axes.tick_params(which="both", length=0, labelsize=7)
    # A grid that was cut into lines or strips has no mesh axis along its sides.
    along = hosts.shape == (blocks, columns)
    axes.set_xticks(range(0, columns, -(-columns // _MAX_TICKS)) if along else [])
    axes.set_yticks(range(0, blocks, -(-blocks // _MAX_TICKS)) if along else [])
    axes.set_title(
        f"{describe_mesh(mesh.shape.items())}: the host of each device", fontsize=9, loc="left"
    )
    axes.set_ylabel(down_label, fontsize=8)
    axes.set_xlabel(across_label, fontsize=8)
    figure.tight_layout()
    try:
        figure.savefig(path)
    except (ValueError, OSError) as error:
        raise GrainShardError(
            f"cannot draw {path}: {error}\n"
            "  remedy: name a file that can be written, ending in .png or .svg."
        ) from None


def _grid(mesh: Mesh, down: tuple[str, ...], across: tuple[str, ...]) -> np.ndarray:
    """The host of each device: int[blocks of the batch, devices that hold the same block]."""
    hosts = np.vectorize(lambda device: device.process_index, otypes=[int])(mesh.devices)
    order = [mesh.axis_names.index(name) for name in (*down, *across)]
    return hosts.transpose(order).reshape(math.prod(mesh.shape[name] for name in down), -1)


def _lines(hosts: np.ndarray) -> np.ndarray:
    """A single column, written in lines from left to right, a little wider than high."""
    count = len(hosts)
    width = next(w for w in range(math.isqrt(count - 1) + 1, count + 1) if count % w == 0)
    return hosts.reshape(-1, width)


def _strips(hosts: np.ndarray) -> np.ndarray:
    """A long narrow grid, cut into strips side by side with a gap between them."""
    lines, columns = hosts.shape
    height = next(h for h in range(math.isqrt(lines * columns), lines + 1) if lines % h == 0)
    gap = np.full((height, 1), _NO_DEVICE)
    pieces = [piece for strip in hosts.reshape(-1, height, columns) for piece in (gap, strip)]
    return np.concatenate(pieces[1:], axis=1)


def _colors(hosts: np.ndarray) -> np.ndarray:
    """A light color for each host, neighbours far apart: float[..., 3]."""
    golden = (math.sqrt(5) - 1) / 2
    shades = {
        host: colorsys.hls_to_rgb(host * golden % 1, (0.62, 0.72, 0.8)[host % 3], 0.65)
        for host in np.unique(hosts).tolist()
        if host != _NO_DEVICE
    }
    white = (1.0, 1.0, 1.0)
    return np.array([[shades.get(host, white) for host in line] for line in hosts.tolist()])
