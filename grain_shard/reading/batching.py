"""`Batching`: describes the host batches of a random-access pipeline, and reads them.

A `Batching` says which records are in each batch. Like every `HostRows`, it also says which rows of
a batch this host keeps, and how batches are padded.
"""

from __future__ import annotations

import functools
import sys
import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.reading.batch_builder import BatchBuilder
from grain_shard.reading.cuts import START, Cuts, Progress
from grain_shard.reading.faults import Faults
from grain_shard.reading.fingerprint import Fingerprint
from grain_shard.reading.host_rows import CheckSize, HostRows
from grain_shard.reading.padding import SHORT_REMEDY, Padding
from grain_shard.sharding.layout import BatchLayout
from grain_shard.trees import Batch

B = TypeVar("B", bound="Batching")


@dataclass(frozen=True, kw_only=True)
class Batching(HostRows):
    """The batches of a random-access pipeline: their records, the rows to keep, and their padding.

    Attributes:
        cuts: The records of each batch. If batches were sliced or shuffled, or the size of a batch
            is unknown, each batch counts as one record.
        num_epochs: Number of epochs of `cuts` in one pass over the pipeline.
        reads_rows_alone: True if one row of a batch can be read without the other rows.
    """

    cuts: Cuts
    num_epochs: int = 1
    reads_rows_alone: ClassVar[bool] = False

    @property
    def counts_records(self) -> bool:
        """True if a batch can begin at any record, so that the batch size may change."""
        return False

    @property
    def reads_many(self) -> bool:
        """True if one call of the source for many records costs less than many calls."""
        return False

    @property
    @abstractmethod
    def unpadded_sizes(self) -> tuple[int, ...]:
        """The batch sizes without padding, each listed once. Only a `BatchSchedule` has several."""

    @abstractmethod
    def epochs(self) -> Cuts | None:
        """Returns the cuts of each epoch's records into batches.

        This may read the first and the last batch, to learn their numbers of rows.

        Returns:
            The cuts; None if the batches were sliced or shuffled, and some of them may be short.
        """

    @abstractmethod
    def begin(self, indices: Sequence[int], faults: Faults) -> list[BatchBuilder]:
        """Returns builders of some batches, whose records are not read yet.

        Beginning several batches takes little longer than beginning one, because NumPy computes the
        indices of all records together.

        Args:
            indices: Numbers of the batches. Numbers from `num_batches` on belong to later epochs,
                as in Grain.
            faults: The rules for failed reads.

        Returns:
            A builder for each batch, in the order of `indices`.
        """

    def num_batches(self) -> int:
        """Returns the number of batches in one pass over the pipeline."""
        return min(sys.maxsize, self.cuts.steps_before(self.num_epochs))

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(map(self._padded_size, self.unpadded_sizes)))

    @functools.cached_property
    def kept(self) -> dict[int, np.ndarray]:
        """Maps each of `unpadded_sizes` to the rows of a full batch that this host keeps.

        The rows are int64[n], ascending, and include rows of padding.

        Raises:
            ShardingError: The shards of `layout` do not divide a batch size.
        """
        rows = np.arange if self.layout is None else self.layout.rows
        return {size: rows(self._padded_size(size)) for size in self.unpadded_sizes}

    def _padded_size(self, size: int) -> int:
        return size if self.padding is None else self.padding.size(size)

    @property
    def host_batch_sizes(self) -> tuple[int, ...]:
        """The number of rows in each entry of `kept`."""
        return tuple(map(len, self.kept.values()))

    @property
    def has_several_sizes(self) -> bool:
        """True if the size of full batches changes during a run."""
        return self.counts_records and len(self.unpadded_sizes) > 1

    @property
    def records_per_batch(self) -> int:
        """The maximum number of records that this host reads for a batch.

        It is 1 if a batch is read as a whole.
        """
        return max(self.host_batch_sizes) if self.reads_rows_alone else 1

    @property
    def reads_other_rows(self) -> bool:
        """True if this host evaluates every row of a batch, but keeps only some rows."""
        if self.layout is None or self.reads_rows_alone:
            return False
        return len(self.layout.shards) < self.layout.divisor

    @property
    def rows_of_padding(self) -> Padding:
        """The rules for rows of padding. If batches are not padded: zeros, and no mask."""
        return self.padding or Padding(1, mask_key=None)

    def fingerprint(self) -> Fingerprint:
        """Returns the fields that must be the same when a saved state is restored."""
        return {} if self.padding is None else self.padding.fingerprint()

    def beginning_at(self: B, progress: Progress) -> B:
        """Returns a copy whose first batch begins at a position.

        If batches have fixed borders (`counts_records` is False), returns the same object.

        Raises:
            ShardingError: `remainder` is "error", and a batch would then be short.
        """
        if not self.counts_records:
            return self
        return self._recut(self.cuts.beginning_at(progress), self.num_epochs)

    def repeated(self: B, times: int) -> B:
        """Returns a copy in which one pass over the pipeline has `times` * `num_epochs` epochs.

        Raises:
            ShardingError: `remainder` is "error", and a batch would then be short.
        """
        return self._recut(self.cuts, self.num_epochs * times)

    def _recut(self: B, cuts: Cuts, num_epochs: int) -> B:
        """Returns a copy with other cuts of the same records, and another number of epochs.

        Raises:
            ShardingError: `remainder` is "error", and the other cuts have a short batch.
        """
        other = replace(self, cuts=cuts, num_epochs=num_epochs)
        if self.padding is not None and self.padding.refuses_short and self.counts_records:
            other._require_full(cuts)
        return other

    def checked(self: B, check: CheckSize) -> B:
        if not self.num_batches():
            raise ShardingError(
                "the dataset has no batch: it is empty, or it drops the remainder and has fewer"
                " records than one batch.",
                remedy="check that the source has records. Or keep a short batch, with"
                ' .batch(B, drop_remainder=False) and remainder="pad".',
            )
        return super().checked(check)

    def of_host(self: B, layout: BatchLayout) -> B:
        """Returns a copy for one host. Warns if the host must read rows that it does not keep.

        Args:
            layout: The rows that the host keeps.

        Raises:
            ShardingError: The shards do not divide the batch size.
        """
        own = super().of_host(layout)
        _ = own.kept  # may raise the error
        if own.reads_other_rows:
            warnings.warn(
                f"this host holds {len(layout.shards)} of {layout.divisor} shards, but reads every"
                " row: a custom batch_fn, or a .map after .batch, needs the whole batch. Move the"
                " .map before .batch, so that each host reads only its own rows.",
                stacklevel=2,
            )
        return own

    def padded(self: B, padding: Padding) -> B:
        """Returns a copy with padding. If `remainder` is "drop", the copy has no short batches.

        Raises:
            ShardingError: `remainder` is "error" and a batch is short; `remainder` is "drop" and no
                batch is full; or, with either of the two, it is unknown which batches are short.
        """
        padded = super().padded(padding)
        if padding.pads_short:
            return padded
        cuts, largest = self.epochs(), max(self.unpadded_sizes)
        if cuts is None:
            raise ShardingError(
                f"remainder={padding.remainder!r} must know which batches are short, and a slice"
                " or a shuffle of the batches hides that.",
                remedy="use .batch(B, drop_remainder=True), or slice and shuffle the records before"
                " .batch.",
            )
        if padding.drops_short:
            if cuts.records < largest:
                raise ShardingError(
                    'remainder="drop" leaves no batch: there are fewer records than one batch of'
                    f" {largest} rows.",
                    remedy='pass remainder="pad", or use a smaller batch size.',
                )
            return replace(padded, cuts=replace(cuts, drops_short=True))
        self._require_full(cuts)
        return padded

    def _require_full(self, cuts: Cuts) -> None:
        """Raises a `ShardingError` if the cuts of the records have a short batch."""
        if cuts.has_short(self.num_epochs):
            begin, sizes = cuts.begin, " or ".join(map(str, self.unpadded_sizes))
            from_there = (
                f" from record {begin.record} of epoch {begin.epoch} on" if begin != START else ""
            )
            raise ShardingError(
                f"the records{from_there} do not fill the last batch of {sizes} rows.",
                remedy=SHORT_REMEDY,
            )

    def read_batch(self, index: int, faults: Faults) -> Batch:
        """Reads and returns one host batch, in the calling thread."""
        (builder,) = self.begin([index], faults)
        builder.write(None, 0, builder.size)
        return builder.finish()
