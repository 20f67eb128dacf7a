"""The batches of a random-access pipeline: cut from its records, reduced to some rows, and padded.

Every question about such a pipeline is a method of `Batching`. A `Batching` is a value: a stage of
the chain returns a changed copy.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.grain_inside.routes import NEVER
from grain_shard.reading.batch_builder import BatchBuilder
from grain_shard.reading.cuts import START, Cuts, Progress
from grain_shard.reading.faults import Faults
from grain_shard.reading.fingerprint import Fingerprint
from grain_shard.reading.padding import Padding
from grain_shard.spans import READ, span
from grain_shard.trees import Batch

B = TypeVar("B", bound="Batching")


@dataclass(frozen=True, kw_only=True)
class Batching(ABC):
    """Batches by index, of which any rows can be kept and padded.

    Attributes:
        cuts: The cuts of the records into batches. If a slice chose batches, or their size is
            unknown, each batch counts as one record.
        num_epochs: Epochs of `cuts` in one pass.
        padding: The padding of each batch; None for unpadded batches.
        rows: Maps the size of a padded batch to the rows of it to keep, int64[n], ascending; None
            to keep all.
        reads_rows_alone: True if one row of a batch can be read without the others.
    """

    cuts: Cuts
    num_epochs: int = 1
    padding: Padding | None = None
    rows: Mapping[int, np.ndarray] | None = None
    reads_rows_alone: ClassVar[bool] = False

    @property
    def counts_records(self) -> bool:
        """True if a batch can begin at any record, so that batches can be cut elsewhere."""
        return False

    @property
    def reads_many(self) -> bool:
        """True if one call for many records costs less than many calls."""
        return False

    @property
    @abstractmethod
    def unpadded_sizes(self) -> tuple[int, ...]:
        """Rows of full batches without padding, each size once."""

    @abstractmethod
    def epochs(self) -> Cuts | None:
        """Returns the cuts of the epochs' records; this may read batches.

        Returns:
            None if the batches were sliced or shuffled, and some of them may be short.
        """

    @abstractmethod
    def begin(self, indices: Sequence[int], faults: Faults) -> list[BatchBuilder]:
        """Begins batches, before any of their records is read; they take no memory yet.

        Several at once cost little more than one, because NumPy computes all their indices at once.

        Args:
            indices: The batches' numbers; a number past `num_batches` is in a later epoch, as in
                Grain.
            faults: The rules for failed reads.
        """

    def num_batches(self) -> int:
        """Returns the number of batches in one pass."""
        return min(sys.maxsize, self.cuts.steps_before(self.num_epochs))

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        """Rows of full batches with padding, each size once."""
        return tuple(dict.fromkeys(map(self._padded_size, self.unpadded_sizes)))

    def rows_of(self, unpadded_size: int) -> np.ndarray | None:
        """Returns the rows of a full batch to keep, int64[n], including padding; None for all."""
        return None if self.rows is None else self.rows[self._padded_size(unpadded_size)]

    def host_batch_size_of(self, unpadded_size: int) -> int:
        """Returns the number of rows of a full batch that are kept, including padding."""
        rows = self.rows_of(unpadded_size)
        return self._padded_size(unpadded_size) if rows is None else len(rows)

    def _padded_size(self, size: int) -> int:
        return size if self.padding is None else self.padding.size(size)

    @property
    def host_batch_sizes(self) -> tuple[int, ...]:
        """The rows, with padding, that are kept of a full batch: a number per unpadded size."""
        return tuple(map(self.host_batch_size_of, self.unpadded_sizes))

    @property
    def has_several_sizes(self) -> bool:
        """True if full batches differ in size."""
        return self.counts_records and len(self.unpadded_sizes) > 1

    @property
    def records_per_batch(self) -> int:
        """Records that are read for a full batch."""
        return max(self.host_batch_sizes) if self.reads_rows_alone else 1

    @property
    def reads_other_rows(self) -> bool:
        """True if every row of a batch is evaluated, although only some are kept."""
        if self.rows is None or self.reads_rows_alone:
            return False
        return any(len(rows) < size for size, rows in self.rows.items())

    @property
    def rows_of_padding(self) -> Padding:
        """The content of rows of padding, which only other hosts may need."""
        return self.padding or Padding(1, mask_key=None)

    def fingerprint(self) -> Fingerprint:
        """Returns the fields with which a saved state must agree."""
        return {} if self.padding is None else {"remainder": self.padding.remainder}

    def beginning_at(self: B, progress: Progress) -> B:
        """Returns batches that begin at this position, if a batch can begin at any record."""
        if not self.counts_records:
            return self
        return self._recut(self.cuts.beginning_at(progress), self.num_epochs)

    def repeated(self: B, times: int) -> B:
        """Returns `times` passes as one; the records of each pass are a separate epoch."""
        return self._recut(self.cuts, self.num_epochs * times)

    def _recut(self: B, cuts: Cuts, num_epochs: int) -> B:
        """Returns the same records with other cuts, which may have other short batches."""
        other = replace(self, cuts=cuts, num_epochs=num_epochs)
        if self.padding is not None and self.padding.remainder == "error" and self.counts_records:
            other._require_full(cuts)
        return other

    def padded(self: B, padding: Padding) -> B:
        """Returns the batches with padding.

        Raises:
            ShardingError: `remainder` is "error" and the last batch is short; or it is "drop" and
                the short batches are unknown.
        """
        padded = replace(self, padding=padding)
        if padding.remainder == "pad":
            return padded
        cuts, largest = self.epochs(), max(self.unpadded_sizes)
        if cuts is None:
            raise ShardingError(
                f"remainder={padding.remainder!r} needs to know which batches are short, and a"
                " slice or a shuffle stands between .batch and it.",
                remedy="use .batch(B, drop_remainder=True), or slice and shuffle the records before"
                " .batch.",
            )
        if padding.remainder == "drop":
            if cuts.records < largest:
                raise ShardingError(
                    "no batch is left: there are fewer records than one batch of"
                    f' {largest} rows, and remainder="drop".',
                    remedy='pass remainder="pad", or make the batch smaller.',
                )
            return replace(padded, cuts=replace(cuts, drop_remainder=True))
        self._require_full(cuts)
        return padded

    def _require_full(self, cuts: Cuts) -> None:
        """Refuses cuts of the records if one of the batches is short.

        Raises:
            ShardingError: A batch is short.
        """
        if cuts.has_short(self.num_epochs):
            begin, sizes = cuts.begin, " or ".join(map(str, self.unpadded_sizes))
            from_there = (
                f", from record {begin.record} of epoch {begin.epoch} on" if begin != START else ""
            )
            raise ShardingError(
                f"the records do not fill the last batch of {sizes} rows{from_there}.",
                remedy='pass remainder="pad" (zeros and a mask) or remainder="drop".',
            )

    def read_batch(self, index: int, faults: Faults) -> Batch:
        """Reads one batch in the calling thread."""
        (builder,) = self.begin([index], faults)
        done = 0
        while done < builder.size:
            with span(READ):
                elements = builder.way(done, builder.size).read(NEVER, faults)
            done += builder.write(elements, done, NEVER)
        return builder.finish()
