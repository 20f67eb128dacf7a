"""`PadToDivisible`: gives all batches the same number of rows, and a mask that marks real rows."""

from __future__ import annotations

from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.reading.padding import SHORT_REMEDY, Padding, pad_batch
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.reading.stream_dataset import DROPPED, SeenBatches, StreamDataset
from grain_shard.sharding.layout import round_up
from grain_shard.spans import PAD, span
from grain_shard.transforms.stage import Stage
from grain_shard.trees import Batch, FlatBatch


class PadToDivisible(Padding, Stage):
    """Pads the rows of every batch to a multiple of `divisor`, and adds a mask.

    A short batch gets as many rows as a full one, so a training step compiles once. The mask is
    ``bool[rows]``, True for real rows.

    Example:
        >>> import grain
        >>> ds = grain.MapDataset.range(3).map(lambda x: {"x": x}).batch(3).pipe(PadToDivisible(2))
        >>> ds[0]
        {'x': array([0, 1, 2, 0]), 'valid_mask': array([ True,  True,  True, False])}

    Attributes:
        divisor: Number that must divide the rows of a padded batch.
        remainder: The treatment of a short batch at the end of an epoch: "pad" pads it, "drop"
            drops it, "error" raises.
        mask_key: The key of the mask in the batch; None for no mask.
        global_batch_size: Rows of a full batch before padding; None for the dataset's own size.
        pad_value: Value in rows of padding, where the mask is False: a number for all leaves, or a
            tree prefix of numbers. Leaves outside the prefix are padded with 0.
    """

    def of_random_access(self, ds: RowMapDataset) -> RowMapDataset:
        """Returns the padded dataset.

        Raises:
            ShardingError: `remainder` is "error" and the last batch is short. Or `remainder` is
                not "pad", and a slice or shuffle after ``.batch`` hides which batches are short.
                Or "drop" would leave no batch.
        """
        ds = ds.whole()
        return RowMapDataset(ds, ds.batching.padded(self), self)

    def of_stream(self, ds: StreamDataset) -> StreamDataset:
        """Returns the padded stream.

        Its iterator raises a `ShardingError` for a batch with more rows than a full batch. It also
        does so for a short batch if `remainder` is "error", and for any batch if `remainder` is not
        "pad" and `divisor` does not divide the rows of a full batch.
        """
        size = self.global_batch_size or ds.facts.global_batch_size
        return ds.after(
            self._padded,
            self,
            global_batch_size=size and round_up(size, self.divisor),
            unpadded_batch_size=size,
            padding=self,
        )

    def _padded(self, batch: Batch, seen: SeenBatches) -> Batch:
        """Returns one batch of a stream, padded, or `DROPPED` for a short batch to be dropped.

        If the size of a full batch is not known, the first batch counts as full.

        Raises:
            ShardingError: The batch has more rows than a full one. Or `remainder` is "error" and
                the batch is short. Or `remainder` is not "pad" and `divisor` does not divide the
                rows of a full batch.
        """
        flat = FlatBatch.of(batch)
        rows = seen.rows = seen.rows or flat.rows
        if flat.rows > rows or (flat.rows < rows and self.refuses_short):
            flat.refuse(
                f"the batch has {flat.rows} rows, but a full batch has {rows} rows.",
                remedy=f"if the last batch is short, {SHORT_REMEDY} Give all other batches of the"
                " stream the same number of rows.",
            )
        if flat.rows < rows and self.drops_short:
            return DROPPED
        padded_rows = round_up(rows, self.divisor)
        if not self.pads_short and padded_rows != rows:
            flat.refuse(
                f"{rows} rows do not split into {self.divisor} shards.",
                remedy=f'use a batch size of {padded_rows}, or pass remainder="pad".',
            )
        with span(PAD):
            return pad_batch(flat, padded_rows, self)

    def of_feeds(self, ds: FeedBatches) -> FeedBatches:
        """Returns the dataset, with padding in place of the rows of feeds that have ended."""
        return ds.padded(self)
