"""`ValidateBatchSize`: refuses, before the first read, a batch size that cannot work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from grain_shard.errors import ShardingError, require_int
from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.reading.forgotten_batch import refuse_records
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.reading.stream_dataset import SeenBatches, StreamDataset
from grain_shard.sharding.layout import describe_parts, round_up
from grain_shard.transforms.stage import Stage
from grain_shard.trees import Batch, FlatBatch


@dataclass(frozen=True)
class ValidateBatchSize(Stage):
    """Checks the global batch size against the shards and, if asked, against the hardware.

    Over a `MapDataset` the check is made when the dataset is built; over an `IterDataset`, whose
    batch size only its batches tell, with each batch.

    Example:
        >>> import grain
        >>> grain.MapDataset.range(32).batch(12).pipe(ValidateBatchSize(8, must_divide=True))
        Traceback (most recent call last):
        grain_shard.errors.ShardingError: a batch of 12 rows does not split into 8 shards.
          remedy: use a batch size of 16, or remainder="pad".

    Attributes:
        divisor: Shards along the batch axis.
        must_divide: Whether `divisor` has to divide the batch size. Otherwise padding will see to
            it.
        shortfall: Given the rows of one shard, says why they are too few, or returns None; its
            text becomes a warning. `grain_shard.training.HardwareType.H100.shortfall` compares the
            rows with those recommended for an H100. With microbatches these are the rows of one
            microbatch.
        mesh_axes: (name, size) of every mesh axis; for messages only.
        microbatches: Into how many parts the batch is cut before each is cut into `divisor` shards.
    """

    divisor: int
    must_divide: bool = False
    shortfall: Callable[[int], str | None] | None = None
    mesh_axes: tuple[tuple[str, int], ...] = ()
    microbatches: int = 1

    def __post_init__(self) -> None:
        require_int("divisor", self.divisor, 1)
        require_int("microbatches", self.microbatches, 1)

    def of_random_access(self, ds: RowMapDataset) -> RowMapDataset:
        """The checked dataset.

        Raises:
            ShardingError: The dataset has no batch, or a batch size that cannot work.
        """
        ds = ds.whole()
        if len(ds) == 0:
            raise ShardingError(
                "the dataset has no batch: it is empty, or has fewer records than one batch and"
                " drops the remainder.",
                mesh_axes=self.mesh_axes,
                remedy="check the source; keep a short batch with .batch(B, drop_remainder=False)"
                ' and remainder="pad".',
            )
        for global_batch_size in ds.batching.global_batch_sizes:
            self.check(global_batch_size)
        return RowMapDataset(ds, ds.batching, self)

    def of_stream(self, ds: StreamDataset) -> StreamDataset:
        """The dataset, whose batches are checked as they come, if not now.

        Raises:
            ShardingError: The batch size is known, and cannot work.
        """
        if ds.facts.global_batch_size is not None:
            self.check(ds.facts.global_batch_size)

        def checked(batch: Batch, seen: SeenBatches) -> Batch:
            flat = FlatBatch.of(batch)
            if not seen.is_begun:
                refuse_records(ds, flat)
                self.check(flat.rows)
            return batch

        return ds.after(checked, self)

    def of_feeds(self, ds: FeedBatches) -> FeedBatches:
        """The dataset.

        Raises:
            ShardingError: Its batch size cannot work.
        """
        self.check(ds.global_batch_size)
        return ds

    def check(self, global_batch_size: int) -> None:
        """Checks one batch size, in rows.

        Raises:
            ShardingError: Its shards do not divide it, and have to.
        """
        multiple = self.divisor * self.microbatches
        if self.must_divide and global_batch_size % multiple:
            up = round_up(global_batch_size, multiple)
            parts = describe_parts(self.divisor, self.microbatches)
            raise ShardingError(
                f"a batch of {global_batch_size} rows does not split into {parts}.",
                mesh_axes=self.mesh_axes,
                remedy=f'use a batch size of {up}, or remainder="pad".',
            )
        if self.shortfall is not None:
            problem = self.shortfall(-(-global_batch_size // multiple))
            if problem is not None:
                warnings.warn(f"rows per shard: {problem}", stacklevel=2)
