"""`DevicePut`: the end of the chain. Global arrays on the devices, some of them ahead of use."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

import grain
import jax
from absl import logging

from grain_shard.errors import ShardingError, require_int
from grain_shard.feeding.feed_batches import FeedBatches, FeedRun
from grain_shard.feeding.host_feeds import (
    HostFeeds,
    check_feeds,
    fault_rules_of,
    feeds_to_save,
    warn_of_shared_feeds,
)
from grain_shard.grain_inside import nodes
from grain_shard.hosts.compare import GLOBAL
from grain_shard.iteration.host_batches import HostBatches
from grain_shard.iteration.random_access import RandomAccess
from grain_shard.iteration.sharded_dataset import Settings, ShardedDataset
from grain_shard.iteration.stream import Stream
from grain_shard.reading.contents import Contents
from grain_shard.reading.faults import FaultRules, read_by_several
from grain_shard.reading.iterable import Rows, agreed_rows
from grain_shard.reading.pad_batch import Remainder
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.reading.stream_dataset import StreamDataset
from grain_shard.sharding.sharding_tree import ShardingTree
from grain_shard.transforms.stage import Stage


@dataclass(frozen=True)
class DevicePut(Stage):
    """Places this host's rows on its devices, as shards of global arrays, ahead of their use.

    Two stages run in the background: one makes batches on the host, one places them. Over a
    `MapDataset` the first stage reads with several threads or worker processes.

    Example:
        >>> import grain, jax
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> ds = grain.MapDataset.range(4).map(lambda i: {"x": i}).batch(2)
        >>> for batch in ds.pipe(DevicePut(ShardingTree.of(mesh))):
        ...     print(batch["x"])
        [0 1]
        [2 3]

    Attributes:
        shardings: Shardings of every leaf of the batch.
        cpu_buffer_size: Most batches on the host, including unfinished ones.
        device_buffer_size: Most batches that wait on the devices or are on their way there.
        num_threads: Threads that read side by side (`MapDataset`, `FeedBatches`); None adapts the
            number.
        num_workers: Grain worker processes that make the batches (`MapDataset`) or run this host's
            feeds (`FeedBatches`), if not 0.
        executor: Makes the batches instead of this process (`MapDataset` only); None for none.
        final_shardings: If not None, the shardings to which the devices move each batch as it is
            handed out; batches are then read in `shardings`.
        rows: The rows that a stream yields on several hosts: "global" batches, the same on each, or
            the "local" rows of each. None: as `from_iterable` was told, or else "global".
        remainder: "pad" continues with padding if a stream ends before the streams of other hosts,
            or a feed before other feeds; any other value ends them all.
        timeout_s: The longest time that one host waits for another, in seconds.
        fault_rules: The rules for failed reads.
    """

    shardings: ShardingTree
    cpu_buffer_size: int = 4
    device_buffer_size: int = 2
    num_threads: int | None = None
    num_workers: int = 0
    executor: Executor | None = None
    final_shardings: ShardingTree | None = None
    rows: Rows | None = None
    remainder: Remainder = "pad"
    timeout_s: float = 60.0
    fault_rules: FaultRules = FaultRules()  # noqa: RUF009 (it is frozen)

    def __post_init__(self) -> None:
        require_int("cpu_buffer_size", self.cpu_buffer_size, 1)
        require_int("device_buffer_size", self.device_buffer_size, 1)
        require_int("num_workers", self.num_workers, 0)
        if self.num_threads is not None:
            require_int("num_threads", self.num_threads, 1)
        if not isinstance(self.timeout_s, int | float) or not self.timeout_s > 0:
            raise ShardingError(
                f"timeout_s={self.timeout_s!r} is not a positive number of seconds.",
                remedy="pass how long one host may wait for another.",
            )
        if self.executor is not None and not hasattr(self.executor, "submit"):
            raise ShardingError(
                f"executor={self.executor!r} is no concurrent.futures.Executor.",
                remedy="pass one, for example client.get_executor() of Dask.",
            )
        if self.executor is not None and self.num_workers:
            raise ShardingError(
                "executor and num_workers are given, and only one of them can make the batches.",
                remedy="leave out num_workers: the executor has workers of its own.",
            )
        if not isinstance(self.shardings, ShardingTree):
            raise ShardingError(
                f"cannot place batches by a {type(self.shardings).__name__}.",
                remedy="pass ShardingTree.of(mesh, spec).",
            )

    def of_random_access(self, ds: RowMapDataset) -> ShardedDataset:
        """Returns global batches, read side by side.

        Raises:
            ShardingError: Records may be left out, and the batches cannot show that.
        """
        rules = self.fault_rules
        if rules.masks:
            _check_can_leave_out(ds)
            if self.shardings.layout().amplification > 1:
                rules = read_by_several(rules)
        batching = ds.batching
        host = RandomAccess(
            batching,
            Contents(ds),
            buffer_size=self.cpu_buffer_size,
            num_threads=self.num_threads,
            num_workers=self.num_workers,
            executor=self.executor,
            fault_rules=rules,
        )
        return self._sharded(
            ds,
            host,
            lambda: batching.unpadded_sizes[0],
            same_order=batching.num_epochs == 1 and nodes.is_shuffled(ds),
            reads_other_rows=batching.reads_other_rows,
        )

    def of_stream(self, ds: StreamDataset) -> ShardedDataset:
        """Returns global batches, in the order of the stream.

        Raises:
            ShardingError: Records may be left out, or an executor is given, which a stream does not
                support.
        """
        self._refuse_executor()
        if self.fault_rules.masks:
            raise ShardingError(
                'on_bad_record="mask" needs random access or feeds: a stream hands out what its'
                " iterator makes, in which no record has a row of its own.",
                remedy="keep a MapDataset down to .batch; or cut the stream into"
                " grain_shard.feeds, where a bad record is dropped like a filtered one; or catch"
                " the error in the .map that raises it, and .filter what that returns.",
            )
        ds, rows = ds.with_own_arrays(), agreed_rows(ds, self.rows) or GLOBAL
        host = Stream(ds, buffer_size=self.cpu_buffer_size, rows=rows, fault_rules=self.fault_rules)
        records = ds.facts.unpadded_batch_size if rows == GLOBAL else None
        return self._sharded(ds, host, lambda: records, is_stream=True)

    def of_feeds(self, ds: FeedBatches) -> ShardedDataset:
        """Returns global batches of feeds; this host runs the feeds whose rows it holds.

        Raises:
            ShardingError: The hosts of the mesh cannot share the feeds among them.
        """
        self._refuse_executor()
        if ds.rows.layout is None:
            ds = ds.of_host(self.shardings.layout())
        layouts = self.shardings.layouts()
        check_feeds(ds, layouts, self.remainder)
        warn_of_shared_feeds(ds, layouts)
        rules = fault_rules_of(ds, layouts, self.fault_rules)
        run = FeedRun(self.num_threads, self.num_workers, self.cpu_buffer_size, rules)
        host = HostFeeds(ds, run, feeds_to_save(ds, layouts, jax.process_index()))
        return self._sharded(ds, host, lambda: ds.rows.global_batch_size, is_stream=True)

    def _refuse_executor(self) -> None:
        if self.executor is not None:
            raise ShardingError(
                "an executor makes batches by their number, and these come in order only.",
                remedy="keep a MapDataset down to .batch; or leave executor out: feeds have"
                " num_workers, and a stream has .mp_prefetch before .shard_to.",
            )

    def _sharded(
        self,
        ds: grain.MapDataset | grain.IterDataset,
        host: HostBatches,
        records_per_batch: Callable[[], int | None],
        *,
        same_order: bool = False,
        **found: bool,
    ) -> ShardedDataset:
        _warn_of_one_host(self.shardings.layout().num_hosts)
        settings = Settings(
            cpu_buffer_size=self.cpu_buffer_size,
            device_buffer_size=self.device_buffer_size,
            num_workers=self.num_workers,
            reads_once=self.final_shardings is not None,
            amplification=self.shardings.layout().amplification,
            **found,
        )
        return ShardedDataset(
            ds,
            host,
            self.shardings,
            self.final_shardings,
            settings,
            remainder=self.remainder,
            timeout_s=self.timeout_s,
            same_order=same_order,
            records_per_batch=records_per_batch,
        )


def _warn_of_one_host(hosts: int) -> None:
    """Warns that the hosts train separately, which is legal and seldom intended."""
    if hosts == 1 and jax.process_count() > 1:
        logging.warning(
            "grain_shard: the mesh has devices of this host alone, and there are %d hosts. So this"
            " host reads all rows of every batch, and shares nothing with the others. That is right"
            " for what it does by itself, such as an evaluation. To train together, build the mesh"
            " of the devices of all hosts: by jax.make_mesh, or from jax.devices().",
            jax.process_count(),
        )


def _check_can_leave_out(ds: RowMapDataset) -> None:
    """Refuses ``on_bad_record="mask"`` for batches no row of which can be masked.

    Raises:
        ShardingError: Rows cannot be read alone, or there is no mask.
    """
    if not ds.batching.reads_rows_alone:
        raise ShardingError(
            'on_bad_record="mask" needs rows that can be had one by one: a custom batch_fn, or a'
            " .map after .batch, makes a batch as a whole.",
            remedy="move the .map before .batch, where it is given each record; pad records to one"
            " shape there instead of in a batch_fn.",
        )
    if ds.batching.pad_rows.mask_key is None:
        raise ShardingError(
            'on_bad_record="mask" needs the mask, which alone tells that a row is none.',
            remedy="leave out mask_key=None.",
        )
