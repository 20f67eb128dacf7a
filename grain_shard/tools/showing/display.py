"""`show`: the leaves of a batch and the devices that hold them, in a terminal or a notebook."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import grain
import jax
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
    """Yields a line for each of the first leaves, and at the end the bytes of a batch."""
    paths, leaves, _ = flatten(batch)
    total = 0
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        rows = size = ""
        if (sharding := getattr(leaf, "sharding", None)) is not None:
            shard = sharding.shard_shape(leaf.shape)
            rows = f"{shard[0]:,}" if shard else ""
            total += (num_bytes := math.prod(shard) * leaf.dtype.itemsize)
            size = describe_bytes(num_bytes)
        if i < _MAX_LEAVES:
            yield path, _text_of(leaf), rows, size
    if more := len(paths[_MAX_LEAVES:]):
        yield f"{more:,} more leaves", "", "", ""
    yield "a batch", "", "", describe_bytes(total)


def _text_of(leaf: Any) -> str:
    """Returns dtype, global shape, and the mesh axes that shard each dim: ``f32[8@data,3]``."""
    sharding = getattr(leaf, "sharding", None)
    where = " on the host" if sharding is None else ""
    if not hasattr(leaf, "dtype"):
        return f"{type(leaf).__name__}{where}"
    # A short name of the dtype, as in JAX: f32, bf16, i8, u8 or bool; "str" for text.
    name = "str" if leaf.dtype.kind in "US" else leaf.dtype.name
    for long, short in (("float", "f"), ("uint", "u"), ("int", "i"), ("complex", "c")):
        name = name.replace(long, short)
    spec = tuple(sharding.spec) if isinstance(sharding, NamedSharding) else ()
    pairs = itertools.zip_longest(leaf.shape, spec)  # a spec may be shorter than the shape
    return f"{name}[{','.join(f'{size}{_at(entry)}' for size, entry in pairs)}]{where}"


def _at(entry: Any) -> str:
    """Returns the mesh axes of one dim as text, such as ``@data`` or ``@(data,fsdp)``."""
    axes = (entry,) if isinstance(entry, str) else entry or ()
    return f"@({','.join(axes)})" if len(axes) > 1 else "".join(f"@{axis}" for axis in axes)


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
