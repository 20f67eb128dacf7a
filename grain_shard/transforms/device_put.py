"""`DevicePut`: the last stage of the chain, which places batches on the devices ahead of use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import grain
import jax
from absl import logging

from grain_shard.errors import ShardingError
from grain_shard.hosts.compare import LOCAL
from grain_shard.iteration.host_batches import HostBatches
from grain_shard.iteration.random_access import RandomAccess
from grain_shard.iteration.settings import Settings
from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.reading.faults import read_by_several
from grain_shard.reading.first_record import FirstRecord
from grain_shard.reading.host_rows import H
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.sources.split import warn_of_reshuffled_slice
from grain_shard.streams.host_streams import HostStreams
from grain_shard.streams.stream_dataset import StreamDataset
from grain_shard.transforms.stage import Stage, as_stream


class DevicePut(Settings, Stage):
    """Places this host's rows on its devices, as shards of global arrays, ahead of their use.

    Background threads make the batches on the host, and then place them on the devices. Over a
    `MapDataset`, several threads or worker processes make the batches. See `Settings` for the
    attributes.

    Example:
        >>> import grain, jax
        >>> from grain_shard import ShardingTree
        >>> mesh = jax.make_mesh((1,), ("data",), devices=jax.devices()[:1])
        >>> ds = grain.MapDataset.range(4).map(lambda i: {"x": i}).batch(2)
        >>> for batch in ds.pipe(DevicePut(ShardingTree.of(mesh))):
        ...     print(batch["x"])
        [0 1]
        [2 3]
    """

    def of_random_access(self, ds: RowMapDataset) -> ShardedDataset:
        """Returns the dataset of global batches. Several of them are read at the same time.

        Raises:
            ShardingError: ``on_bad_record="mask"`` is given, but rows cannot be read one by one,
                or there is no mask.
        """
        if self.rows == LOCAL:  # the hosts must agree on the end, as for a stream
            return self(as_stream(ds))
        layout = self.shardings.layout()
        if len(layout.shards) < layout.divisor:  # so this host does not hold all rows
            ds = ds.after(self._of_host(ds.host_rows))
        settings, rules, host_rows = self, self.fault_rules, ds.host_rows
        if rules.masks:
            _check_can_leave_out(ds)
            if layout.amplification > 1:  # several hosts read the same rows
                settings = replace(self, fault_rules=read_by_several(rules))
        return self._sharded(
            ds,
            RandomAccess(host_rows, FirstRecord(ds), settings),
            lambda: host_rows.unpadded_sizes[0],
        )

    def of_streams(self, ds: StreamDataset) -> ShardedDataset:
        """Returns the dataset of global batches, in the order of the streams.

        This host runs only the feeds whose rows it holds.

        Raises:
            ShardingError: An option does not fit the streams, or the hosts of the mesh cannot
                divide the feeds among them.
        """
        if self.executor is not None:
            raise ShardingError(
                "executor needs random access to batches, and a stream or feeds have none.",
                remedy="keep the pipeline a grain.MapDataset down to .batch. Or leave executor out,"
                " and use num_workers for feeds, or .mp_prefetch before .shard_to for a stream.",
            )
        streams = ds.host_rows.streams
        streams.check_options(self)
        yields, layouts = streams.yields(self), self.shardings.layouts()
        rows = ds.host_rows if yields == LOCAL else self._of_host(ds.host_rows)
        rows = rows.with_own_arrays()
        rows.check_hosts(layouts)
        settings = replace(self, fault_rules=rows.fault_rules(layouts, self.fault_rules))
        saved_feeds = rows.to_save(layouts, jax.process_index())
        host = HostStreams(rows, settings, yields, saved_feeds)
        # The size of local batches says nothing about the batches of other hosts.
        global_size = rows.unpadded_size if yields != LOCAL else None
        return self._sharded(ds.after(rows), host, lambda: global_size)

    def _of_host(self, host_rows: H) -> H:
        """Returns this host's rows, which an earlier `ShardBatch` may already have chosen."""
        return host_rows if host_rows.layout else host_rows.of_host(self.shardings.layout())

    def _sharded(
        self,
        ds: grain.MapDataset | grain.IterDataset,
        host: HostBatches,
        records_per_batch: Callable[[], int | None],
    ) -> ShardedDataset:
        """Returns the dataset of global batches. Warns of a mesh or a slice that is rarely right.

        Args:
            ds: This host's batches, as a Grain dataset.
            host: The same batches, as iterators open them.
            records_per_batch: Returns the number of records in a full global batch, or None.
        """
        layout = self.shardings.layout()
        if layout.num_hosts == 1 and jax.process_count() > 1:
            # Then each host trains by itself, which is allowed, but rarely intended.
            logging.warning(
                "grain_shard: the mesh has only devices of this host, but the job has %d hosts. So"
                " this host reads all rows of every batch, independently of the other hosts. That"
                " is right for work of one host, such as an evaluation. To train on all hosts,"
                " build the mesh from the devices of all hosts: by jax.make_mesh, or from"
                " jax.devices().",
                jax.process_count(),
            )
        # A slice that is shuffled anew in each epoch is rarely right as a validation set: training
        # records get into it. But with rows="local" it may be this host's equal share of the
        # records, which is right: the shares of all hosts have all records.
        num_slices = layout.divisor // len(layout.shards) if host.rows == LOCAL else 1
        warn_of_reshuffled_slice(ds, num_slices=num_slices)
        return ShardedDataset(ds, host, self, records_per_batch)


def _check_can_leave_out(ds: RowMapDataset) -> None:
    """Checks for ``on_bad_record="mask"`` that single rows of the batches can be masked.

    Raises:
        ShardingError: Rows cannot be read one by one, or the batches have no mask.
    """
    if not ds.host_rows.reads_rows_alone:
        raise ShardingError(
            'on_bad_record="mask" needs rows that are read one by one. A custom batch_fn, or a .map'
            " after .batch, makes a batch as a whole.",
            remedy="move the .map before .batch, where it gets single records. Pad records to one"
            " shape in that .map instead of in a batch_fn.",
        )
    if ds.host_rows.rows_of_padding.mask_key is None:
        raise ShardingError(
            'on_bad_record="mask" needs a mask, but mask_key=None leaves the batches without one.',
            remedy="leave out mask_key=None.",
        )
