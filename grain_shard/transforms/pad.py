"""`PadToDivisible`: gives all batches the same number of rows, and a mask that marks real rows."""

from __future__ import annotations

from grain_shard.reading.host_rows import H
from grain_shard.reading.padding import Padding
from grain_shard.transforms.stage import RowsStage


class PadToDivisible(Padding, RowsStage):
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

    def change(self, host_rows: H) -> H:
        """Returns the rows with this padding, in place of an earlier one; see `HostRows.padded`.

        A stream is checked only while it is read. Its iterator raises a `ShardingError` for a batch
        with more rows than a full batch; for a short batch if `remainder` is "error"; and for any
        batch if `remainder` is not "pad" and `divisor` does not divide the rows of a full batch. If
        the size of a full batch is unknown, the first batch counts as full. In feeds, padding also
        replaces the rows of feeds that have ended.

        Raises:
            ShardingError: `remainder` is "error" and the last batch is short. Or `remainder` is
                not "pad", and a slice or shuffle after ``.batch`` hides which batches are short.
                Or "drop" would leave no batch.
        """
        return host_rows.padded(self)
