"""`ValidateBatchSize`: refuses, before the first read, a batch size that cannot work."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import grain

from grain_shard.errors import ShardingError, require_int
from grain_shard.grain_inside.nodes import iter_batch_size
from grain_shard.hardware import (
    BatchSizeRating,
    HardwareType,
    rate_batch_size,
    validate_batch_size,
)
from grain_shard.reading.fetch import RowMapDataset
from grain_shard.reading.rows import row_reader
from grain_shard.trees import Batch, FlatBatch


@dataclass(frozen=True)
class ValidateBatchSize:
    """Checks the global batch size against the shards and, if asked, against the hardware.

    Over a `MapDataset` the check is made when the dataset is built; over an `IterDataset`, whose
    batch size only its batches tell, with each batch.

    Example:
        >>> import grain
        >>> grain.MapDataset.range(32).batch(12).pipe(ValidateBatchSize(8, must_divide=True))
        Traceback (most recent call last):
        grain_shard.errors.ShardingError: a batch of 12 rows does not split into 8 shards.
          leaf:   every leaf   mesh: none
          remedy: use a batch size of 16, or remainder="pad".

    Attributes:
        divisor: Shards along the batch axis.
        must_divide: Whether `divisor` has to divide the batch size. Otherwise padding will see to
            it.
        hardware: Also compare the rows of one shard with what is recommended for this chip
            (`grain_shard.get_batch_size_recommendation`), and warn where they are too few.
        mesh_axes: (name, size) of every mesh axis; for messages only.
    """

    divisor: int
    must_divide: bool = False
    hardware: HardwareType | None = None
    mesh_axes: tuple[tuple[str, int], ...] = ()

    def __post_init__(self):
        require_int("divisor", self.divisor, 1)

    def __call__(self, ds: Any) -> Any:
        """The checked dataset, of the same kind.

        Raises:
            ShardingError: The dataset has no batch, or a batch size that cannot work.
        """
        if isinstance(ds, grain.MapDataset):
            return _ValidatedMapDataset(ds, self)
        return _ValidatedIterDataset(ds, self)

    def check(self, global_batch_size: int) -> None:
        """Checks one batch size, in rows.

        Raises:
            ShardingError: `divisor` does not divide it, and has to.
        """
        if self.must_divide and global_batch_size % self.divisor:
            up = -(-global_batch_size // self.divisor) * self.divisor
            raise ShardingError(
                f"a batch of {global_batch_size} rows does not split into {self.divisor} shards.",
                mesh_axes=self.mesh_axes,
                remedy=f'use a batch size of {up}, or remainder="pad".',
            )
        if self.hardware is not None:
            shard_batch_size = -(-global_batch_size // self.divisor)
            rating = rate_batch_size(shard_batch_size, self.hardware)
            if rating in (BatchSizeRating.TOO_SMALL, BatchSizeRating.BELOW_CRITICAL):
                _, message = validate_batch_size(shard_batch_size, self.hardware)
                warnings.warn(f"rows per shard: {message}", stacklevel=2)


class _ValidatedMapDataset(RowMapDataset):
    def __init__(self, parent: grain.MapDataset, validate: ValidateBatchSize):
        reader = row_reader(parent)
        if len(parent) == 0:
            raise ShardingError(
                "the dataset has no batch: it is empty, or has fewer records than one batch and"
                " drops the remainder.",
                mesh_axes=validate.mesh_axes,
                remedy="check the source; keep a short batch with .batch(B, drop_remainder=False)"
                ' and remainder="pad".',
            )
        super().__init__(parent, reader)
        validate.check(reader.global_batch_size)
        self._validate = validate

    def __str__(self) -> str:
        return str(self._validate)


class _ValidatedIterDataset(grain.IterDataset):
    def __init__(self, parent: grain.IterDataset, validate: ValidateBatchSize):
        super().__init__(parent)
        self._validate = validate
        self.global_batch_size = iter_batch_size(parent)  # None if only its batches tell
        if self.global_batch_size is not None:
            validate.check(self.global_batch_size)

    def __iter__(self) -> grain.DatasetIterator:
        (parent,) = self.parents
        return _ValidatingIterator(iter(parent), self._validate)

    def __str__(self) -> str:
        return str(self._validate)


class _ValidatingIterator(grain.DatasetIterator):
    """Checks that each batch is one, and that the first has a size that works.

    Not the first after a restore: that may be the short last batch of a stream, and the stream's
    first one was checked when it began.
    """

    def __init__(self, parent: grain.DatasetIterator, validate: ValidateBatchSize):
        super().__init__(parent)
        self._source, self._validate, self._begun = parent, validate, False

    def __next__(self) -> Batch:
        batch = next(self._source)
        rows = FlatBatch.of(batch).rows
        if not self._begun:
            self._validate.check(rows)
            self._begun = True
        return batch

    def get_state(self) -> dict[str, Any]:
        return self._source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state)
        self._begun = True
