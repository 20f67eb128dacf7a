"""`ValidateBatchSize`: checks the global batch size, if possible before the first read."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

from absl import logging

from grain_shard.errors import ShardingError, require_int
from grain_shard.reading.host_rows import H
from grain_shard.sharding.layout import round_up
from grain_shard.transforms.stage import RowsStage


@dataclass(frozen=True)
class ValidateBatchSize(RowsStage):
    """Checks the global batch size against the shards and, if asked, against the hardware.

    If the shards do not divide the size, and batches may be padded, a warning is logged. The check
    is made when the dataset is built, or at the first batch of an `IterDataset` whose batch size is
    unknown before.

    Example:
        >>> import grain
        >>> grain.MapDataset.range(32).batch(12).pipe(ValidateBatchSize(8, must_divide=True))
        Traceback (most recent call last):
        grain_shard.errors.ShardingError: a batch of 12 rows does not split into 8 shards.
          remedy: use a batch size of 16, or pass remainder="pad".

    Attributes:
        divisor: Number of shards that the rows of a batch are cut into.
        must_divide: True if `divisor` must divide the batch size; False if batches are padded.
        shortfall: Function that takes the number of rows of one shard, and returns a warning if
            they are too few, or None. `grain_shard.training.HardwareType.H100.shortfall` compares
            them with the number recommended for an H100. None for no check.
    """

    divisor: int
    must_divide: bool = False
    shortfall: Callable[[int], str | None] | None = None

    def __post_init__(self) -> None:
        require_int("divisor", self.divisor, 1)

    def change(self, host_rows: H) -> H:
        """Checks the batch sizes, and returns the rows as they are.

        An unknown batch size is checked at the first batch. A stream's first batch also shows
        whether ``.batch`` was forgotten.

        Raises:
            ShardingError: The dataset has no batch. Or `must_divide` is True, and the shards do not
                divide a batch size.
        """
        return host_rows.checked(self.check)

    def check(self, global_batch_size: int, num_streams: int = 1) -> None:
        """Checks one batch size.

        If the shards do not divide the size, this logs a warning, or raises. If `shortfall` finds
        too few rows in a shard, this warns.

        Args:
            global_batch_size: Rows of a batch.
            num_streams: Number of streams that give the batch equal numbers of rows: the remedy
                suggests a size that they divide, too.

        Raises:
            ShardingError: The shards do not divide the size, and `must_divide` is True.
        """
        up = round_up(global_batch_size, self.divisor)
        if up > global_batch_size:
            problem = (
                f"a batch of {global_batch_size} rows does not split into {self.divisor} shards"
            )
            if self.must_divide:
                fits = round_up(up, math.lcm(self.divisor, num_streams))
                raise ShardingError(
                    f"{problem}.", remedy=f'use a batch size of {fits}, or pass remainder="pad".'
                )
            padding = up - global_batch_size
            logging.warning(
                "grain_shard: %s, so each batch gets %d more, as padding.", problem, padding
            )
        if self.shortfall is not None:
            warning = self.shortfall(-(-global_batch_size // self.divisor))  # rows, rounded up
            if warning is not None:
                warnings.warn(f"rows per shard: {warning}", stacklevel=2)
