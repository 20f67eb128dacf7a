"""Which device holds what of a batch: a small HTML table for all leaves that are cut alike."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

from jax.sharding import NamedSharding

from grain_shard.sharding.specs import spec_rank
from grain_shard.trees import flatten

# Okabe and Ito's palette, which people with any kind of color vision can tell apart, mixed half and
# half with white, so that black text can be read on it.
_COLORS = "#F3CF80", "#ABDAF4", "#80CFB9", "#F8F2A1", "#80B9D9", "#EBAF80", "#E6BCD3"
_TABLE_STYLE = (
    "border-collapse:separate; border-spacing:2px; margin:8px; white-space:nowrap;"
    " font:13px monospace"
)
_MAX_LINES = 16
_MAX_COLUMNS = 8
_MAX_NAMES = 8  # of leaves, or of devices in one cell

_Range = tuple[int, int]


def draw_batch(batch: Any) -> str:
    """The leaves as HTML tables: rows downwards, other sharded dims across, devices in the cells.

    Leaves that are cut alike share a table. Drawn are leaves with a `NamedSharding` and at least
    one row; nothing of their values is looked at.
    """
    groups: dict[Any, list[tuple[str, Any]]] = {}
    for path, leaf in zip(*flatten(batch)[:2], strict=True):
        sharding = getattr(leaf, "sharding", None)
        if isinstance(sharding, NamedSharding) and leaf.shape and all(leaf.shape):
            dims = _dims_drawn(sharding)
            key = sharding.mesh, tuple(sharding.spec)[:dims], leaf.shape[:dims]
            groups.setdefault(key, []).append((path, leaf))
    return "".join(_table([path for path, _ in leaves], leaves[0][1]) for leaves in groups.values())


def _dims_drawn(sharding: NamedSharding) -> int:
    """The rows, and all dims down to the last one that is sharded."""
    return max(1, spec_rank(sharding))


def _table(paths: Sequence[str], leaf: Any) -> str:
    dims = _dims_drawn(leaf.sharding)
    holders: dict[tuple[_Range, ...], list[Any]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        piece = tuple(index[dim].indices(leaf.shape[dim])[:2] for dim in range(dims))
        holders.setdefault(piece, []).append(device)
    lines = sorted({piece[0] for piece in holders})
    columns = sorted({piece[1:] for piece in holders})
    several_hosts = len({device.process_index for device in leaf.sharding.device_set}) > 1

    parts = [_line("th", ["rows", *map(_column_head, columns[:_MAX_COLUMNS])])]
    for i, rows in enumerate(lines[:_MAX_LINES]):
        held = [holders[rows, *column] for column in columns[:_MAX_COLUMNS]]
        cells = [_range(rows), *(_devices(devices, several_hosts) for devices in held)]
        parts.append(_line("td", cells, color=_COLORS[i % len(_COLORS)]))
    caption = _few(paths)
    if len(lines) > _MAX_LINES:
        caption += f"; the first {_MAX_LINES} of {len(lines)} shards of the rows"
    if len(columns) > _MAX_COLUMNS:
        caption += f"; the first {_MAX_COLUMNS} of {len(columns)} shards across"
    return (
        f'<table style="{_TABLE_STYLE}">'
        f'<caption style="text-align:left; padding:2px 0">{html.escape(caption)}</caption>'
        f"{''.join(parts)}</table>"
    )


def _line(tag: str, cells: Iterable[str], color: str | None = None) -> str:
    style = "text-align:left; padding:2px 10px"
    if color is not None:
        style += f"; background:{color}; color:black"
    made = (f'<{tag} style="{style}">{html.escape(cell)}</{tag}>' for cell in cells)
    return f"<tr>{''.join(made)}</tr>"


def _column_head(column: tuple[_Range, ...]) -> str:
    """Where a column lies in the dims after the rows, if these are sharded."""
    head = "; ".join(f"dim {dim}: {_range(part)}" for dim, part in enumerate(column, 1))
    return head or "held by"


def _devices(devices: Sequence[Any], several_hosts: bool) -> str:
    """The devices that hold a piece, by host where there are several."""
    if not several_hosts:
        return f"device{'s' if len(devices) > 1 else ''} {_few([str(d.id) for d in devices])}"
    hosts: dict[int, list[str]] = {}
    for device in devices:
        hosts.setdefault(device.process_index, []).append(str(device.id))
    return _few([f"host {host}: {_few(ids)}" for host, ids in hosts.items()])


def _range(part: _Range) -> str:
    return f"{part[0]}:{part[1]}"


def _few(words: Sequence[str]) -> str:
    shown = ", ".join(words[:_MAX_NAMES])
    more = len(words) - _MAX_NAMES
    return f"{shown}, {more} more" if more > 0 else shown
