"""`shard_to`: the whole chain."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, get_args

import grain

from grain_shard.errors import ShardingError, require_choice
from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.grain_inside import nodes
from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.reading.faults import FaultRules, OnBadRecord, Retries
from grain_shard.reading.iterable import Rows, agreed_rows
from grain_shard.reading.pad_batch import Remainder
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.reading.stream_dataset import StreamDataset
from grain_shard.sharding.sharding_tree import Read, ShardingTree
from grain_shard.transforms.device_put import DevicePut
from grain_shard.transforms.pad import PadToDivisible
from grain_shard.transforms.shard_batch import ShardBatch
from grain_shard.transforms.stage import Stage
from grain_shard.transforms.validate import ValidateBatchSize
from grain_shard.trees import MASK_KEY


def shard_to(
    ds: grain.MapDataset | grain.IterDataset,
    mesh_or_sharding: Any = None,
    spec: Any = None,
    *,
    remainder: Remainder = "pad",
    mask_key: str | None = MASK_KEY,
    pad_value: Any = 0,
    microbatches: int | None = None,
    cpu_buffer_size: int | None = None,
    device_buffer_size: int = 2,
    num_threads: int | None = None,
    num_workers: int = 0,
    retries: int | Retries = Retries(),  # noqa: B008 (it is frozen)
    on_bad_record: OnBadRecord = "error",
    max_bad_records: float = 0.01,
    rows: Rows | None = None,
    read: Read = "auto",
    timeout_s: float = 60.0,
) -> ShardedDataset:
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
            tree prefix of shardings. By default the mesh in use, that of `jax.set_mesh`; so
            ``.shard_to()`` is enough there, or ``.shard_to(P("data"))``.
        spec: A `PartitionSpec`, or a tree prefix of them, e.g. ``{"image": P("data"), "tokens":
            P("data", "seq")}``. By default ``P("data")``, or the mesh's only axis. A spec for
            several leaves is trimmed to the rank of each; scalars are replicated.
        remainder: What becomes of a last batch that is short: "pad" it with rows of padding, "drop"
            it, or "error". A batch size that the shards do not divide is padded by "pad", and
            refused by the others.
        mask_key: The key at which the batch gets a mask, ``bool[global_batch_size]``, True for
            real rows; None for no mask.
        pad_value: What rows of padding hold, besides False in the mask: a number, or a tree prefix
            of them, e.g. ``{"tokens": tokenizer.pad_id}``. A leaf that it leaves out gets 0.
        microbatches: To accumulate gradients by `jax.lax.scan`: leaves, and the mask, are then
            ``[microbatches, rows, ...]``, with specs that hold from the dim of the rows on. It is
            the batch reshaped: microbatch 0 has its first rows, and so on. With ``rows="local"``
            it is the rows of each host that are reshaped.
        cpu_buffer_size: The most batches on the host at a time, those that are being made
            included; by default 4. With `num_workers` there may be four for each worker, of feeds
            four in all, if that is more, since Grain keeps them, and one in this process: 33 with 8
            workers, of feeds 5.
        device_buffer_size: The most batches that wait on the devices, those on their way there
            included.
        num_threads: Threads that read side by side (`MapDataset`), or that run feeds side by side.
            None finds out while it runs how many reads help, and runs feeds one after the other.
            Of a `MapDataset` with ``.to_iter_dataset(ReadOptions(...))``, these give the number of
            threads and `cpu_buffer_size` where the arguments do not.
        num_workers: Grain worker processes that make the batches in place of threads. With `feeds`
            each of them runs some of this host's feeds; no more are started than there are feeds,
            and each has `num_threads` threads.
        retries: How often a source is asked again, with growing pauses, after an `OSError`, a
            `TimeoutError` or what a bucket raises that is busy. `Retries` names more classes of
            exceptions, also those of a ``.map``.
        on_bad_record: What becomes of a record that cannot be read or decoded then: "error" ends
            the run; "mask" puts a row of padding in its place, False in the mask. All other rows
            are where they were. In feeds it is dropped, like a record that a filter drops.
        max_bad_records: With "mask", how many of them end the run after all: a whole number, or a
            share of the records that a host has read, of 1,000 at least.
        rows: What the dataset yields on each of several hosts; a stream (`IterDataset`) has to
            say, unless it is one of `from_iterable`. "global": every host the same whole batches.
            "local": each host the rows of its own devices, from its own slice of the source (see
            `ShardByMesh`).
        read: With several hosts and a mesh axis other than the batch's across them (`MapDataset`
            only): "needed" reads on each host what its devices hold, so some rows on several
            hosts; "once" reads each row on one host, and has the devices exchange them as the
            batch is handed out, which takes a batch that all devices divide. On several slices it
            is once in each that needs the row, as none leaves its slice. "auto" takes "once" where
            the devices divide the batch and fewer rows are read so.
        timeout_s: How long one host waits for another, in seconds, before it raises; ten times as
            long for one whose training loop is busy with something else.

    Returns:
        A dataset of batches whose leaves are global `jax.Array`s, padded to a multiple of the
        shards, or of `microbatches` times the shards; text stays on the host. Its iterators have a
        state of under 200 bytes that any number of hosts, workers and devices can restore, and
        with any number of microbatches.

    Raises:
        ShardingError: Dataset, mesh, spec or batch size do not fit together.
    """
    if mask_key is not None and not isinstance(mask_key, str):
        raise ShardingError(
            f"mask_key={mask_key!r} is not a string.", remedy="pass a name, or None for no mask."
        )
    if rows is not None:
        require_choice("rows", rows, get_args(Rows))
    require_choice("read", read, get_args(Read))
    if rows != "local" and isinstance(ds, grain.MapDataset | grain.IterDataset):
        ds, read_options = _random_access(ds)
        if read_options is not None:
            threads, buffer_size = (max(1, option) for option in read_options)
            num_threads = threads if num_threads is None else num_threads
            cpu_buffer_size = buffer_size if cpu_buffer_size is None else cpu_buffer_size
    if cpu_buffer_size is None:
        cpu_buffer_size = DevicePut.cpu_buffer_size
    target = ShardingTree.of(mesh_or_sharding, spec, microbatches=microbatches)
    target = target.with_mask(mask_key)
    put = DevicePut(
        target,
        cpu_buffer_size=cpu_buffer_size,
        device_buffer_size=device_buffer_size,
        num_threads=num_threads,
        num_workers=num_workers,
        fault_rules=FaultRules(retries, on_bad_record, max_bad_records),
        rows=rows,
        remainder=remainder,
        timeout_s=timeout_s,
    )
    try:
        return _Chain(put, mask_key, pad_value, read)(ds)
    except ShardingError as error:
        raise error.with_mesh(target.mesh_axes) from None


@dataclass(frozen=True)
class _Chain(Stage):
    """The four stages in a row, and what has to be known before the first of them.

    Attributes:
        put: The last stage. Its shardings are those of the batches that are handed out.
        mask_key: As for `shard_to`.
        pad_value: As for `shard_to`.
        read: As for `shard_to`.
    """

    put: DevicePut
    mask_key: str | None
    pad_value: Any
    read: Read

    def of_random_access(self, ds: RowMapDataset) -> ShardedDataset:
        if self.put.rows == "local":
            return self(
                ds.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
            )
        padded = self._padded(ds, self.put.shardings.layout().divisor)
        return self._reading(padded, self.read, *padded.batching.global_batch_sizes)

    def of_stream(self, ds: StreamDataset) -> ShardedDataset:
        if self.read == "once":
            raise ShardingError(
                'read="once" needs random access, and the dataset is a stream.',
                remedy="keep a MapDataset down to .batch, or shard the source by"
                ' grain_shard.ShardByMesh and pass rows="local".',
            )
        if self.put.num_workers:
            raise ShardingError(
                "num_workers needs random access or feeds, and the dataset is a stream.",
                remedy="call .mp_prefetch before .shard_to, cut the stream into grain_shard.feeds,"
                " or keep a MapDataset down to .batch.",
            )
        layout = self.put.shardings.layout()
        rows = agreed_rows(ds, self.put.rows)
        if rows is None and layout.num_hosts > 1:
            raise ShardingError(
                f"the dataset is a stream, and does not say what it yields on each of"
                f" {layout.num_hosts} hosts.",
                remedy="cut the stream into grain_shard.feeds, whose batches are the same on any"
                ' number of hosts; or pass rows="local" if each host yields the rows of its own'
                ' devices (shard the source by grain_shard.ShardByMesh), or rows="global" if every'
                " host yields the same whole batches. A MapDataset down to .batch needs none of"
                " these.",
            )
        if rows == "local":  # what it yields are this host's rows already
            return self._padded(ds, len(layout.shards)).pipe(self.put)
        return self._reading(self._padded(ds, layout.divisor), "needed")

    def of_feeds(self, ds: FeedBatches) -> ShardedDataset:
        if self.put.rows is not None:
            raise ShardingError(
                f"rows={self.put.rows!r} is given, and the rows of feeds are known.",
                remedy="leave rows out: a host runs the feeds whose rows it holds.",
            )
        target = self.put.shardings
        # With fewer feeds than hosts, some hosts would have no feed to run.
        too_few = ds.num_feeds < len(target.hosts())
        read = "needed" if too_few and self.read == "auto" else self.read
        padded = self._padded(ds, target.layout().divisor)
        return self._reading(padded, read, ds.global_batch_size)

    def _reading(self, padded: Any, read: Read, *global_batch_sizes: int) -> ShardedDataset:
        """The chain, with every row read where it is needed, or once and moved by the devices."""
        target, put = self.put.shardings, self.put
        if target.way_to_read(read, *global_batch_sizes) == "once":
            put = replace(put, shardings=target.spread(), final_shardings=target)
        return padded.pipe(ShardBatch(put.shardings.layout())).pipe(put)

    def _padded(self, ds: Any, num_shards: int) -> Any:
        """The dataset with batches of one size; the start of the chain."""
        microbatches, remainder = self.put.shardings.microbatches or 1, self.put.remainder
        divide = ValidateBatchSize(
            num_shards, must_divide=remainder != "pad", microbatches=microbatches
        )
        return ds.pipe(divide).pipe(
            PadToDivisible(
                num_shards * microbatches,
                remainder=remainder,
                mask_key=self.mask_key,
                pad_value=self.pad_value,
            )
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
