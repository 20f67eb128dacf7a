"""`shard_to`: the whole chain."""

from __future__ import annotations

from typing import Any, Literal

import grain

from grain_shard.errors import ShardingError
from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.grain_inside import nodes
from grain_shard.reading.fingerprint import fingerprint
from grain_shard.reading.pad_batch import Remainder
from grain_shard.reading.rows import row_reader
from grain_shard.sharding.layout import BatchLayout
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.transforms.device_put import DevicePut, DevicePutIterDataset
from grain_shard.transforms.pad import PadToDivisible
from grain_shard.transforms.shard_batch import ShardBatch
from grain_shard.transforms.validate import ValidateBatchSize


def shard_to(
    ds: grain.MapDataset | grain.IterDataset,
    mesh_or_sharding: Any,
    spec: Any = None,
    *,
    remainder: Remainder = "pad",
    mask_key: str | None = "valid_mask",
    cpu_buffer_size: int = 4,
    device_buffer_size: int = 2,
    num_threads: int | None = None,
    num_workers: int = 0,
    rows: Literal["global", "local"] | None = None,
    read: Literal["auto", "needed", "once"] = "auto",
    timeout_s: float = 60.0,
) -> DevicePutIterDataset:
    """Ends a Grain pipeline: this host's rows, padded, placed and prefetched as global arrays.

    Installed as a method on Grain's datasets by ``import grain_shard``.

    Example:
        >>> import grain, jax
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> ds = grain.MapDataset.range(3).map(lambda i: {"x": i}).batch(2).pipe(shard_to, mesh)
        >>> for batch in ds:
        ...     print(batch["x"], batch["valid_mask"])
        [0 1] [ True  True]
        [2 0] [ True False]

    Args:
        ds: A dataset of global batches: ``.batch(B)`` with the B of all hosts together. With a
            `MapDataset` (``.to_iter_dataset()`` may follow it), every host reads only its rows.
        mesh_or_sharding: A `Mesh`; or, in place of mesh and spec, a `Sharding`, a device, or a
            tree prefix of shardings.
        spec: A `PartitionSpec`, or a tree prefix of them, e.g. ``{"image": P("data"), "tokens":
            P("data", "seq")}``. By default ``P("data")``, or the mesh's only axis. A spec for
            several leaves is trimmed to the rank of each; scalars are replicated.
        remainder: What becomes of a batch that is short, or that the shards do not divide: "pad"
            it with zero rows, "drop" a short one, or "error".
        mask_key: The key at which the batch gets a mask, ``bool[global_batch_size]``, True for
            real rows; None for no mask.
        cpu_buffer_size: Batches that may wait on the host or be in the making there.
        device_buffer_size: Batches that may wait on the devices or be on their way there.
        num_threads: Threads that each make a batch (`MapDataset`; None chooses by the machine), or
            that run feeds side by side (None for one).
        num_workers: Grain worker processes that make the batches instead (`MapDataset` only).
        rows: What the dataset yields on each of several hosts; a stream (`IterDataset`) has to
            say. "global": every host the same whole batches. "local": each host the rows of its
            own devices, from its own slice of the source (see `ShardByMesh`).
        read: With several hosts and a mesh axis other than the batch's across them (`MapDataset`
            only): "needed" reads on each host what its devices hold, so some rows on several
            hosts; "once" reads each row on one host, and has the devices exchange them as the
            batch is handed out. "auto" takes "once" where rows would be read more than once and
            the devices divide the batch.
        timeout_s: How long one host waits for another, in seconds, before it raises.

    Returns:
        A dataset of batches whose leaves are global `jax.Array`s, padded to a multiple of the
        shards; text stays on the host. Its iterators have a state of under 200 bytes that any
        number of hosts, workers and devices can restore.

    Raises:
        ShardingError: Dataset, mesh, spec or batch size do not fit together.
    """
    if not isinstance(ds, grain.MapDataset | grain.IterDataset):
        raise ShardingError(
            f"cannot shard a {type(ds).__name__}.",
            remedy="pass a grain.MapDataset or grain.IterDataset of batches; for a DataLoader or"
            " any other iterator, use grain_shard.prefetch_to_device.",
        )
    if isinstance(ds, DevicePutIterDataset):
        raise ShardingError(
            "the dataset is sharded already.", remedy="call .shard_to once, at the end."
        )
    if mask_key is not None and not isinstance(mask_key, str):
        raise ShardingError(
            f"mask_key={mask_key!r} is not a string.", remedy="pass a name, or None for no mask."
        )
    if rows != "local":
        ds, read_options = _random_access(ds)
        if read_options is not None:
            num_threads = num_threads or max(1, read_options[0])
            cpu_buffer_size = max(1, read_options[1])
    target = ShardingTree.of(mesh_or_sharding, spec).with_mask(mask_key)
    try:
        shardings = _to_read_by(target, ds, rows, read)
        layout = shardings.layout()
        ds = _checked_rows(ds, rows, layout, num_workers)
        local = rows == "local"
        divisor = len(layout.shards) if local else layout.divisor
        put = DevicePut(
            shardings,
            cpu_buffer_size=cpu_buffer_size,
            device_buffer_size=device_buffer_size,
            num_threads=num_threads,
            num_workers=num_workers,
            fingerprint=fingerprint(ds, remainder) if isinstance(ds, grain.MapDataset) else None,
            final_shardings=None if shardings is target else target,
            rows=rows or "global",
            remainder=remainder,
            mask_key=mask_key,
            timeout_s=timeout_s,
        )
        if isinstance(ds, FeedBatches):
            return ds.pipe(put)
        full = padded(ds, divisor, remainder, mask_key)
        return (full if local else full.pipe(ShardBatch(layout))).pipe(put)
    except ShardingError as error:
        raise error.with_mesh(target.mesh_axes) from None


def padded(ds: Any, divisor: int, remainder: Remainder, mask_key: str | None) -> Any:
    """The dataset with batches of one size, which `divisor` divides; the start of the chain."""
    return ds.pipe(ValidateBatchSize(divisor, must_divide=remainder != "pad")).pipe(
        PadToDivisible(divisor, remainder=remainder, mask_key=mask_key)
    )


def check_read(read: str) -> None:
    """Refuses what is no way to read.

    Raises:
        ShardingError: It is none of "auto", "needed", "once".
    """
    if read not in ("auto", "needed", "once"):
        raise ShardingError(
            f"read={read!r} is not one of auto, needed, once.", remedy="choose one of them."
        )


def _random_access(
    ds: grain.MapDataset | grain.IterDataset,
) -> tuple[grain.MapDataset | grain.IterDataset, tuple[int, int] | None]:
    """The `MapDataset` below ``.to_iter_dataset(read_options)``, which keeps random access."""
    if isinstance(ds, grain.MapDataset) and nodes.is_filtered(ds):
        raise ShardingError(
            "a .filter drops elements, so that nobody can tell by its index what is in a batch.",
            remedy="filter a stream, before .batch: .to_iter_dataset().filter(...).batch(B), and on"
            " several hosts say rows=, or cut it into grain_shard.feeds.",
        )
    if isinstance(ds, grain.IterDataset) and (below := nodes.below_read_ahead(ds)) is not None:
        return below
    return ds, None


def _to_read_by(target: ShardingTree, ds: Any, rows: str | None, read: str) -> ShardingTree:
    """The shardings to read by: the target's own, or spread so that each row is read once."""
    check_read(read)
    if rows == "local" or not isinstance(ds, grain.MapDataset | FeedBatches):
        if read != "once":
            return target
        raise ShardingError(
            'read="once" needs random access, and the dataset is a stream.',
            remedy="keep a MapDataset down to .batch, or shard the source by"
            ' grain_shard.ShardByMesh and pass rows="local".',
        )
    if read == "auto":
        feeds = isinstance(ds, FeedBatches)
        read = target.cheaper_read((ds if feeds else row_reader(ds)).global_batch_size)
        if feeds and ds.num_feeds < len(target.hosts()):
            read = "needed"  # some hosts would have no feed to run
    return target.spread() if read == "once" else target


def _checked_rows(ds: Any, rows: str | None, layout: BatchLayout, num_workers: int) -> Any:
    """The dataset, if it says what it has to about its rows; a stream if they are local."""
    if rows not in (None, "global", "local"):
        raise ShardingError(
            f"rows={rows!r} is not one of global, local.", remedy="choose one of them."
        )
    if rows == "local" and isinstance(ds, grain.MapDataset):
        ds = ds.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
    if isinstance(ds, grain.MapDataset):
        return ds
    if num_workers:
        raise ShardingError(
            "num_workers needs random access, and the dataset is a stream.",
            remedy="call .mp_prefetch before .shard_to (of feeds: in make_feed), or keep a"
            " MapDataset down to .batch.",
        )
    if isinstance(ds, FeedBatches):
        if rows is None:
            return ds
        raise ShardingError(
            f"rows={rows!r} is given, and the rows of feeds are known.",
            remedy="leave rows out: a host runs the feeds whose rows it holds.",
        )
    if rows is None and layout.num_hosts > 1:
        raise ShardingError(
            f"the dataset is a stream, and does not say what it yields on each of"
            f" {layout.num_hosts} hosts.",
            remedy='pass rows="local" if each host yields the rows of its own devices (shard the'
            ' source by grain_shard.ShardByMesh), or rows="global" if every host yields the same'
            " whole batches. A MapDataset down to .batch needs neither.",
        )
    return ds
