"""`shard_to`: makes the whole chain of stages from one call."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, get_args

import grain

from grain_shard.errors import ShardingError, require_choice
from grain_shard.grain_inside import nodes
from grain_shard.hosts.compare import LOCAL
from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.reading.faults import FaultRules, OnBadRecord, Retries
from grain_shard.reading.from_iterable import Rows
from grain_shard.reading.padding import Remainder
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.streams.stream_dataset import StreamDataset
from grain_shard.transforms.device_put import DevicePut
from grain_shard.transforms.pad import PadToDivisible
from grain_shard.transforms.shard_batch import ShardBatch
from grain_shard.transforms.stage import Stage, as_stream
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
    cpu_buffer_size: int | None = None,
    device_buffer_size: int = 2,
    num_threads: int | None = None,
    num_workers: int = 0,
    executor: Executor | None = None,
    retries: int | Retries = Retries(),  # noqa: B008 (it is frozen)
    on_bad_record: OnBadRecord = "error",
    max_bad_records: float = 0.01,
    rows: Rows | None = None,
    timeout_s: float = 60.0,
) -> ShardedDataset:
    """Ends a Grain pipeline: pads, places and prefetches this host's rows as global arrays.

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
        ds: A dataset that ends with ``.batch(B)``, where B counts the rows of all hosts together.
            If it is a `MapDataset`, which ``.to_iter_dataset()`` may follow, every host reads only
            its own rows.
        mesh_or_sharding: A `Mesh`; or, in place of mesh and spec, a `Sharding`, a device, or a
            tree prefix of shardings. The default is the mesh of `jax.set_mesh`, so
            ``.shard_to()`` or ``.shard_to(P("data"))`` is enough if a mesh is set.
        spec: A `PartitionSpec`, or a tree prefix of them, e.g. ``{"image": P("data"), "tokens":
            P("data", "seq")}``. By default ``P("data")``, or the mesh's only axis. A spec for
            several leaves is trimmed to the rank of each leaf. Scalars are replicated.
        remainder: The treatment of a short last batch: "pad" fills it with rows of padding, "drop"
            drops it, "error" raises. If the shards do not divide the batch size, "pad" pads every
            batch, and "drop" and "error" raise.
        mask_key: The key at which the batch gets a mask, ``bool[global_batch_size]``, True for
            real rows; None for no mask.
        pad_value: The value in rows of padding, where the mask is False: a number, or a tree
            prefix of numbers, e.g. ``{"tokens": tokenizer.pad_id}``. Leaves outside the prefix
            get 0.
        cpu_buffer_size: The maximum number of batches on the host at a time, ready or being made;
            by default 4. With `num_workers` there may be more, because Grain buffers at least four
            batches for each worker: up to 33 with 8 workers. A worker of feeds makes only some rows
            of each batch, so there the limit is ``max(4, cpu_buffer_size) + 2`` batches.
        device_buffer_size: The maximum number of batches that wait on the devices, including
            batches on their way there.
        num_threads: Number of threads that read a `MapDataset`, or run feeds, at the same time.
            With None the number is adapted while the loop runs. For a stream, it limits the threads
            of its ``.to_iter_dataset``. For a `MapDataset` with
            ``.to_iter_dataset(ReadOptions(...))``, the `ReadOptions` give the defaults of
            `num_threads` and `cpu_buffer_size`.
        num_workers: Number of Grain worker processes that make the batches in place of threads.
            Each worker imports the main script. So the script's loop, and its
            ``jax.distributed.initialize()``, must be under ``if __name__ == "__main__":``.
            With `feeds` each worker runs some of this host's feeds with `num_threads` threads, and
            at most one worker per feed is started.
        executor: A `concurrent.futures.Executor` that makes the batches in place of threads
            (`MapDataset` only), for example Dask's ``client.get_executor()``, with workers on other
            machines. At most `cpu_buffer_size` batches are submitted at a time. A task whose worker
            was lost is submitted again, up to `retries` times. The executor is not shut down.
            With a `ThreadPoolExecutor`, even of a single thread, the source must be thread-safe. If
            it is not, pass ``num_threads=1`` in place of the executor.
        retries: Number of times that a source is asked again, with growing pauses, after an
            `OSError`, a `TimeoutError` or an exception of a busy bucket. A `Retries` instead of a
            number adds classes of exceptions. If a ``.map`` raises one of these classes, its record
            is tried again, too.
        on_bad_record: The treatment of a record that still cannot be read or decoded. "error" ends
            the run. "mask" puts a row of padding in the record's place, where the mask is False.
            All other rows stay where they are. In feeds, "mask" drops the record as a filter would.
        max_bad_records: The limit of bad records with "mask"; above it the run ends. A whole number
            is a count. A fraction is a share of the records that a host has read. Fewer than 1,000
            records count as 1,000.
        rows: The rows that a stream (`IterDataset`) yields on each host. It is required on several
            hosts, except for a stream of `from_iterable` that was given `rows`. "global": every
            host yields the same whole batches. "local": each host yields the rows of its own
            devices, from its own slice of the source (see `ShardByMesh`).
        timeout_s: On several hosts, seconds that a host waits for another host, or for its own
            data, before it raises an error. It waits ten times as long for a host whose training
            loop is busy elsewhere.

    Returns:
        A dataset of batches whose leaves are global `jax.Array`s. Their rows are padded to a
        multiple of the number of shards. Text stays on the host. With random access, its iterators
        have a state of less than 200 bytes, which can be restored on any number of hosts, workers
        and devices. The state of feeds has an entry for each feed. The state of a stream needs the
        same number of hosts.

    Raises:
        ShardingError: An argument is not valid; or the dataset, mesh, spec and batch size do not
            fit together.
    """
    if mask_key is not None and not isinstance(mask_key, str):
        raise ShardingError(
            f"mask_key={mask_key!r} is not a string.",
            remedy="pass mask_key as a string, or None for no mask.",
        )
    if rows is not None:
        require_choice("rows", rows, get_args(Rows))
    threads, buffer_size = None, DevicePut.cpu_buffer_size  # the defaults
    # With rows="local" a stream stays a stream. Otherwise a stream that only reads a `MapDataset`
    # is replaced by it, and the `ReadOptions` of ``.to_iter_dataset`` replace the defaults.
    if rows != LOCAL:
        ds, (threads, size) = _random_access(ds)
        buffer_size = buffer_size if size is None else size
    target = ShardingTree.of(mesh_or_sharding, spec).with_mask(mask_key)
    put = DevicePut(
        target,
        cpu_buffer_size=buffer_size if cpu_buffer_size is None else cpu_buffer_size,
        device_buffer_size=device_buffer_size,
        num_threads=threads if num_threads is None else num_threads,
        num_workers=num_workers,
        executor=executor,
        fault_rules=FaultRules(retries, on_bad_record, max_bad_records),
        rows=rows,
        timeout_s=timeout_s,
    )
    try:
        # `_Chain` replaces the divisor 1 once it knows the number of shards.
        pad = PadToDivisible(1, remainder, mask_key, pad_value=pad_value)
        return _Chain(put, pad)(ds)
    except ShardingError as error:
        raise error.with_mesh(target.mesh_axes) from None


@dataclass(frozen=True)
class _Chain(Stage):
    """All four stages of `shard_to` as one: check the size, pad, keep this host's rows, place.

    Attributes:
        put: The last stage, with most settings.
        pad: The second stage. Its divisor is replaced once the kind of the pipeline is known.
    """

    put: DevicePut
    pad: PadToDivisible

    def of_random_access(self, ds: RowMapDataset) -> ShardedDataset:
        if self.put.rows == LOCAL:
            return self(as_stream(ds))
        return self._of_global_batches(ds)

    def of_streams(self, ds: StreamDataset) -> ShardedDataset:
        streams = ds.host_rows.streams
        streams.check_options(self.put)
        if streams.yields(self.put) == LOCAL:  # the dataset yields this host's rows already
            return self._padded(ds, len(self.put.shardings.layout().shards)).pipe(self.put)
        return self._of_global_batches(ds)

    def _of_global_batches(self, ds: RowMapDataset | StreamDataset) -> ShardedDataset:
        layout = self.put.shardings.layout()
        return self._padded(ds, layout.divisor).pipe(ShardBatch(layout)).pipe(self.put)

    def _padded(self, ds: Any, num_shards: int) -> Any:
        """Adds the first two stages: check the batch size, and pad the batches.

        Args:
            ds: The user's dataset of batches.
            num_shards: Number of shards that a batch of `ds` is cut into: all shards, or this
                host's shards if `ds` yields only this host's rows.
        """
        validate = ValidateBatchSize(num_shards, must_divide=not self.pad.pads_short)
        return ds.pipe(validate).pipe(replace(self.pad, divisor=num_shards))


def _random_access(
    ds: grain.MapDataset | grain.IterDataset,
) -> tuple[grain.MapDataset | grain.IterDataset, tuple[int | None, int | None]]:
    """Looks through a ``.to_iter_dataset(read_options)`` at the end of a `MapDataset`.

    Returns:
        (the `MapDataset`, (number of threads, batches to buffer)). A number is None if it is
        Grain's default. Any other dataset is returned unchanged, with two None.

    Raises:
        ShardingError: The dataset is a `MapDataset` with a ``.filter``.
    """
    if isinstance(ds, grain.MapDataset) and nodes.is_filtered(ds):
        raise ShardingError(
            "a .filter drops elements, so the number of a batch does not determine its records.",
            remedy="filter a stream: .to_iter_dataset().filter(...).batch(B). On several hosts, cut"
            " that stream into grain_shard.feeds, or pass rows= to .shard_to.",
        )
    if (found := nodes.below_read_ahead(ds)) is None:
        return ds, (None, None)
    records, options = found
    return records, nodes.options_set_by_user(options)
