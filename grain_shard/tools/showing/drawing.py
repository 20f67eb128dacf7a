"""Draws the devices that hold each part of a batch, in one table for leaves that are cut alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jax.sharding import NamedSharding
from rich.console import Group
from rich.padding import Padding
from rich.text import Text

from grain_shard.sharding.specs import spec_rank
from grain_shard.tools.palette import FILLS
from grain_shard.tools.showing.tables import FittingTable, describe_few, describe_ranges
from grain_shard.trees import flatten

_MAX_LINES = 16
_MAX_COLUMNS = 4

Range = tuple[int, int]


def draw_batch(batch: Any) -> Iterator[Any]:
    """Yields a table for each group of leaves that are cut alike.

    Leaves are cut alike if they are on the same mesh, with the same spec and the same sizes of the
    dims up to the last sharded one. The lines of a table are shards of the rows, and the columns
    are shards of the other sharded dims. A cell names the devices that hold this part. Only leaves
    with a `NamedSharding` and at least one element are drawn. Their values are not read.
    """
    groups: dict[Any, list[tuple[str, Any]]] = {}
    for path, leaf in zip(*flatten(batch)[:2], strict=True):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and leaf.shape and all(leaf.shape):
            dims = max(1, spec_rank(sharding))  # the leading dims that are drawn
            key = sharding.mesh, tuple(sharding.spec)[:dims], leaf.shape[:dims]
            groups.setdefault(key, []).append((path, leaf))
    for (_, _, sizes), leaves in groups.items():
        yield _drawing([path for path, _ in leaves], leaves[0][1], sizes)


def _drawing(paths: Sequence[str], leaf: Any, sizes: tuple[int, ...]) -> Any:
    """Returns a table of the shards and the devices that hold them, with a title.

    Args:
        paths: The paths of all leaves that are cut alike, for the title.
        leaf: One of these leaves.
        sizes: The sizes of the dims that are drawn.
    """
    # The devices that hold each piece. A piece is the (start, stop) of each dim that is drawn.
    held: dict[tuple[Range, ...], list[Any]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        piece = tuple(part.indices(size)[:2] for part, size in zip(index, sizes, strict=False))
        held.setdefault(piece, []).append(device)
    lines = sorted({piece[0] for piece in held})  # the ranges of rows
    columns = sorted({piece[1:] for piece in held})  # the ranges of the other dims
    several_hosts = len({device.process_index for device in leaf.sharding.device_set}) > 1

    title = describe_few(paths)
    if len(lines) > _MAX_LINES:
        title += f"; the first {_MAX_LINES} of {len(lines)} shards of the rows"
    if len(columns) > _MAX_COLUMNS:
        title += f"; the first {_MAX_COLUMNS} of {len(columns)} shards across"
    lines, columns = lines[:_MAX_LINES], columns[:_MAX_COLUMNS]
    drawing = FittingTable(
        ["rows", *map(_column_head, columns)],
        [
            [
                describe_ranges([rows]),
                *(_devices(held[rows, *dims], several_hosts) for dims in columns),
            ]
            for rows in lines
        ],
        left=1 + len(columns),
        row_styles=[f"black on {color}" for color in FILLS],
    )
    return Group(Padding(Text(title), (0, 2)), drawing)


def _column_head(column: tuple[Range, ...]) -> str:
    """Returns the head of a column: its (start, stop) in each dim that is drawn beside the rows."""
    head = "; ".join(f"dim {dim}: {describe_ranges([r])}" for dim, r in enumerate(column, 1))
    return head or "held by"


def _devices(devices: Sequence[Any], several_hosts: bool) -> str:
    """Returns the ids of some devices as text, grouped by host if `several_hosts` is True."""
    if not several_hosts:
        return f"device{'s' if len(devices) > 1 else ''} {describe_few([d.id for d in devices])}"
    hosts: dict[int, list[int]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(device.id)
    return describe_few([f"host {host}: {describe_few(ids)}" for host, ids in hosts.items()])
