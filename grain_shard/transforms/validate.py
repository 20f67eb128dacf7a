"""`ValidateBatchSize`: refuses, before the first read, a batch size that cannot work."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from absl import logging

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

    The log names a size that the shards do not divide, if batches are padded.

    Over a `MapDataset` the check is made when the dataset is built. Over an `IterDataset`, whose
    batch size may only be known from its batches, it is made with each batch.

    Example:
        >>> import grain
        >>> grain.MapDataset.range(32).batch(12).pipe(ValidateBatchSize(8, must_divide=True))
        Traceback (most recent call last):
        grain_shard.errors.ShardingError: a batch of 12 rows does not split into 8 shards.
          remedy: use a batch size of 16, or remainder="pad".

    Attributes:
        divisor: Shards along the batch axis.
        must_divide: True if `divisor` must divide the batch size; False if batches are padded.
        shortfall: Takes the rows of one shard, and returns a warning if they are too few, or None.
            `grain_shard.training.HardwareType.H100.shortfall` compares the rows with the number
            recommended for an H100. With microbatches, the rows are those of one microbatch.
        microbatches: Number of microbatches, each of which is cut into `divisor` shards.
    """

    divisor: int
    must_divide: bool = False
    shortfall: Callable[[int], str | None] | None = None
    microbatches: int = 1

    def __post_init__(self) -> None:
        require_int("divisor", self.divisor, 1)
        require_int("microbatches", self.microbatches, 1)

    def of_random_access(self, ds: RowMapDataset) -> RowMapDataset:
        """Returns the checked dataset.

        Raises:
            ShardingError: The dataset has no batch, or its batch size does not fit.
        """
        ds = ds.whole()
        if len(ds) == 0:
            raise ShardingError(
                "the dataset has no batch: it is empty, or it drops the remainder and has fewer"
                " records than one batch.",
                remedy="check that the source has records. Or keep a short batch, with"
                ' .batch(B, drop_remainder=False) and remainder="pad".',
            )
        for global_batch_size in ds.batching.global_batch_sizes:
            self.check(global_batch_size)
        return RowMapDataset(ds, ds.batching, self)

    def of_stream(self, ds: StreamDataset) -> StreamDataset:
        """Returns the dataset, checked now or, if its batch size is unknown, with each batch.

        Raises:
            ShardingError: The batch size is known and does not fit.
        """
        if ds.facts.global_batch_size is not None:
            self.check(ds.facts.global_batch_size)

        def checked(batch: Batch, seen: SeenBatches) -> Batch:
            flat = FlatBatch.of(batch)
            if not seen.is_begun:
                refuse_records(ds, flat)
                if flat.rows != ds.facts.global_batch_size:
                    self.check(flat.rows)
            return batch

        return ds.after(checked, self)

    def of_feeds(self, ds: FeedBatches) -> FeedBatches:
        """Returns the checked dataset.

        Raises:
            ShardingError: Its batch size does not fit.
        """
        self.check(ds.rows.global_batch_size)
        return ds

    def check(self, global_batch_size: int) -> None:
        """Checks one batch size, in rows.

        Raises:
            ShardingError: The shards do not divide the size, and `must_divide` is True.
        """
        multiple = self.divisor * self.microbatches
        up = round_up(global_batch_size, multiple)
        if up > global_batch_size:
            parts = describe_parts(self.divisor, self.microbatches)
            problem = f"a batch of {global_batch_size} rows does not split into {parts}"
            if self.must_divide:
                raise ShardingError(
                    f"{problem}.", remedy=f'use a batch size of {up}, or pass remainder="pad".'
                )
            padding = up - global_batch_size
            logging.warning(
                "grain_shard: %s, so each batch gets %d rows of padding.", problem, padding
            )
        if self.shortfall is not None:
            problem = self.shortfall(-(-global_batch_size // multiple))
            if problem is not None:
                warnings.warn(f"rows per shard: {problem}", stacklevel=2)
