"""`show`: the leaves of a batch and the devices that hold them, in a terminal or a notebook."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import grain
import jax
import numpy as np
from jax.sharding import NamedSharding

from grain_shard.errors import ShardingError, describe_mesh
from grain_shard.iteration.iterator import ShardedIterator
from grain_shard.iteration.sharded_dataset import ShardedDataset, sharded
from grain_shard.tools.showing.drawing import draw_batch
from grain_shard.tools.showing.tables import (
    FirstLines,
    FittingTable,
    describe_bytes,
    describe_ranges,
    to_screen,
)
from grain_shard.trees import flatten

_MAX_LINES, _MAX_LEAVES = 40, 16


def show(batch_or_dataset: Any) -> None:
    """Prints the leaves of a batch: global shape, mesh axes, rows and bytes on each device.

    Further tables show the rows that each device holds. At most 40 lines are printed, in a notebook
    as HTML. No device computes or sends data, and no other host takes part. So a single host of
    many may call this function.

    Args:
        batch_or_dataset: A batch: a tree of `jax.Array`, `jax.ShapeDtypeStruct` or numpy arrays.
            Or the dataset that `shard_to` returned, or its iterator: then this host's rows of the
            first batch are read to find the shapes. The number of batches, the buffers and the rows
            of this host are shown, too, and for an iterator the number of reading threads.

    Raises:
        ShardingError: The dataset has no batch, or its batches do not fit their shardings. Or the
            argument is a dataset or an iterator that `shard_to` did not return.

    Example:
        >>> import grain
        >>> from grain_shard import shard_to
        >>> mesh = jax.make_mesh((4, 2), ("data", "model"))
        >>> ds = grain.MapDataset.range(20).map(lambda i: {"x": i}).batch(8).pipe(shard_to, mesh)
        >>> show(next(iter(ds)))
        <BLANKLINE>
          leaf                  global array   rows a device   bytes a device
         ─────────────────────────────────────────────────────────────────────
          batch['valid_mask']   bool[8@data]               2          2 bytes
          batch['x']            i32[8@data]                2          8 bytes
          a batch                                                    10 bytes
        <BLANKLINE>
          batch['valid_mask'], batch['x']
        <BLANKLINE>
          rows   held by
         ─────────────────────
          0:2    devices 0, 1
          2:4    devices 2, 3
          4:6    devices 4, 5
          6:8    devices 6, 7
        <BLANKLINE>
    """
    batch = batch_or_dataset
    tables: list[FittingTable] = []
    if (ds := sharded(batch_or_dataset)) is not None:
        batch = ds.abstract_batch()
        facts = list(_facts(ds, batch))
        is_iterator = isinstance(batch_or_dataset, ShardedIterator)
        if is_iterator and (reads := str(batch_or_dataset.stats().reads)):
            facts.append(("reads side by side", reads))
        tables.append(FittingTable(["dataset", ""], facts, left=2))
    elif isinstance(batch_or_dataset, grain.MapDataset | grain.IterDataset | Iterator):
        raise ShardingError(
            f"show got a {type(batch_or_dataset).__name__}, which does not say which arrays its"
            " batches have, and on which devices.",
            remedy="show one of its batches, or the dataset that .shard_to(mesh) returned.",
        )
    columns = ["leaf", "global array", "rows a device", "bytes a device"]
    tables.append(FittingTable(columns, _lines(batch), left=2))
    drawings = itertools.islice(draw_batch(batch), _MAX_LINES)
    to_screen(FirstLines([*tables, *drawings], _MAX_LINES))


def _lines(batch: Any) -> Iterator[tuple[str, ...]]:
    paths, leaves, _ = flatten(batch)
    described = [LeafText.of(leaf) for leaf in leaves]
    for path, leaf in zip(paths[:_MAX_LEAVES], described, strict=False):
        rows = "" if leaf.rows_per_device is None else f"{leaf.rows_per_device:,}"
        on_device = leaf.bytes_per_device is not None
        yield path, leaf.text, rows, describe_bytes(leaf.bytes_per_device) if on_device else ""
    if more := len(paths[_MAX_LEAVES:]):
        yield f"{more:,} more leaves", "", "", ""
    total = sum(leaf.bytes_per_device or 0 for leaf in described)
    yield "a batch", "", "", describe_bytes(total)


def _facts(ds: ShardedDataset, batch: Any) -> Iterator[tuple[str, str]]:
    """Yields the lines of the first table: pairs (name, value).

    Args:
        ds: The dataset.
        batch: Its abstract batch. If all leaves are text or scalars, its rows are unknown.
    """
    structs = [leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.ShapeDtypeStruct)]
    global_batch_size = next((struct.shape[0] for struct in structs if struct.shape), None)
    settings, layout = ds.settings, ds.layout
    axes = describe_mesh(ds.shardings.mesh_axes) or "none"
    yield "mesh", f"{axes}; {layout.num_hosts} hosts" if layout.num_hosts > 1 else axes
    batches = ds.num_batches()
    yield "batches", "unknown until the stream ends" if batches is None else f"{batches:,}"
    if global_batch_size is not None:
        records = ds.records_per_batch() or global_batch_size  # if unknown, as without padding
        if records < global_batch_size:
            padding = f"{records:,} records + {global_batch_size - records:,} of padding"
            yield "rows of a batch", f"{global_batch_size:,}: {padding}"
        ranges = layout.ranges(global_batch_size)
        rows = sum(stop - start for start, stop in ranges)
        yield "rows of this host", f"{rows:,} of {global_batch_size:,}: {describe_ranges(ranges)}"
    if why := ds.host.why_unsaved():  # "" if a state can be saved
        yield "state", why.splitlines()[0]
    on_host, on_devices = settings.cpu_buffer_size, settings.device_buffer_size
    buffers = f"{on_devices} batches on the devices, {on_host} on the host"
    yield "buffers", f"at most {buffers}"


class LeafText(NamedTuple):
    """One leaf of a batch as text, with its rows and bytes on one device.

    Attributes:
        text: Dtype, global shape, and the mesh axes that shard each dim: ``f32[8@data,3]``.
        rows_per_device: Number of rows of the leaf that one device holds; None for a scalar and
            for a leaf on the host.
        bytes_per_device: Number of bytes of the leaf that one device holds; None for a leaf on the
            host.
    """

    text: str
    rows_per_device: int | None = None
    bytes_per_device: int | None = None

    @classmethod
    def of(cls, leaf: Any) -> LeafText:
        """Describes a `jax.Array`, a `jax.ShapeDtypeStruct`, a numpy array, or any other object."""
        if not hasattr(leaf, "dtype"):
            return cls(f"{type(leaf).__name__} on the host")
        sharding = getattr(leaf, "sharding", None)
        spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
        text = f"{_dtype(leaf.dtype)}[{_dims(leaf.shape, spec)}]"
        if sharding is None:
            return cls(f"{text} on the host")
        shard = sharding.shard_shape(leaf.shape)
        return cls(text, shard[0] if shard else None, math.prod(shard) * leaf.dtype.itemsize)


def _dtype(dtype: np.dtype) -> str:
    """Returns JAX's short name of a dtype, such as f32, bf16, i8, u8 or bool; "str" for text."""
    name = "str" if dtype.kind in "US" else dtype.name
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        name = name.replace(long, short)
    return name


def _dims(shape: tuple[int, ...], spec: tuple[Any, ...]) -> str:
    pairs = itertools.zip_longest(shape, spec)  # a spec may be shorter than the shape
    return ",".join(f"{size}{_at(entry)}" for size, entry in pairs)


def _at(entry: Any) -> str:
    """Returns the mesh axes of one dim as text, such as ``@data`` or ``@(data,fsdp)``."""
    axes = (entry,) if isinstance(entry, str) else entry or ()
    if not axes:
        return ""
    return f"@{axes[0]}" if len(axes) == 1 else f"@({','.join(axes)})"
