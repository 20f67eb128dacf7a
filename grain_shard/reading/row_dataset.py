"""Batches of which some rows can be read without the others, in parts and side by side.

A batch is begun, its records are read in pieces of any size by any thread, each piece is written
where it belongs, and the batch is finished when none is missing. One call of the source may read
pieces of several batches.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from grain_shard.errors import ShardingError, require_int
from grain_shard.grain_inside.routes import NEVER
from grain_shard.reading.cuts import Cuts, Progress
from grain_shard.reading.faults import FAIL_AT_ONCE, Faults
from grain_shard.reading.fingerprint import Fingerprint
from grain_shard.reading.pad_rows import PadRows
from grain_shard.trees import Batch


class MadeBatch(ABC):
    """A batch in the making.

    Attributes:
        size: How many records it is made of; 0 if it is all padding.
        faults: What becomes of those that cannot be had.
    """

    size: int
    faults: Faults

    @property
    def bad_rows(self) -> Sequence[int]:
        """Which of its rows hold nothing, once all are written, since they could not be had."""
        return ()

    @property
    def most_at_a_time(self) -> int:
        """How many records to read before they are written, if they are read one by one."""
        return 1

    @abstractmethod
    def write(self, elements: list[Any], start: int, until: float) -> int:
        """Makes records of what was read, and writes them; by several threads at once.

        Args:
            elements: What was read of some records. What is written is let go at once, since the
                batch needs the memory.
            start: Which of the `size` records the first of them is.
            until: When to leave the rest to others, by `time.perf_counter`.

        Returns:
            How many were written, at least one.
        """

    @abstractmethod
    def finish(self) -> Batch:
        """The batch, once all of it has been written: a tree of arrays nobody else refers to."""


class Piece(NamedTuple):
    """Some records of one batch."""

    batch: Any
    start: int
    stop: int


class RowReader(ABC):
    """A sequence of batches that can be read row by row.

    Attributes:
        reads_whole_batches: Whether reading one row evaluates all rows of the batch.
        padding: What the rows of padding in its batches hold.
    """

    reads_whole_batches: bool = False
    padding: PadRows = PadRows(mask_key=None)

    @property
    def reads_many(self) -> bool:
        """Whether one call reads many records for less than as many calls would."""
        return False

    @property
    def only_asks_sources(self) -> bool:
        """Whether `read` runs nothing of the user's but sources."""
        return False

    @property
    def can_leave_out(self) -> bool:
        """Whether a row that cannot be had may be left out, since the mask then says so."""
        return False

    @property
    @abstractmethod
    def cuts(self) -> Cuts:
        """How its records are cut into batches.

        Where a slice chose batches, or nothing tells their size: as if each batch were one record.
        Whether a batch may begin at any record, `counts_records` says.
        """

    @property
    @abstractmethod
    def num_epochs(self) -> int:
        """How many epochs are one pass, as `cuts` counts them."""

    @property
    @abstractmethod
    def counts_records(self) -> bool:
        """Whether a batch can begin at any record, so that batches may be cut otherwise."""

    @property
    @abstractmethod
    def global_batch_sizes(self) -> tuple[int, ...]:
        """Rows of full batches: all the sizes that there are, each once."""

    @abstractmethod
    def global_batch_size_of(self, index: int) -> int:
        """Rows of a full batch where this one stands."""

    @property
    def unpadded_batch_size(self) -> int:
        """Rows of the first full batch, without those of padding."""
        return self.global_batch_size_of(0)

    def num_batches(self) -> int:
        """Batches of one pass."""
        return min(sys.maxsize, self.cuts.steps_before(self.num_epochs))

    @abstractmethod
    def epochs(self) -> Cuts | None:
        """How the records of its epochs are cut, if need be found out by reading batches.

        Returns:
            None if a slice was taken of the batches.
        """

    @abstractmethod
    def dropping_remainder(self) -> RowReader:
        """The full batches only."""

    @abstractmethod
    def beginning_at(self, progress: Progress) -> RowReader:
        """The same records, with a batch that begins there, if it can."""

    @abstractmethod
    def repeated(self, times: int) -> RowReader:
        """As many passes in one; each is an epoch of its own to what stands below."""

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """What a saved state must agree with."""

    @abstractmethod
    def begin(
        self, indices: Sequence[int], rows: Sequence[np.ndarray | None], faults: Faults
    ) -> list[MadeBatch]:
        """New batches of the chosen rows, less those past the end of a short one.

        Several at once cost little more than one, as the way to their records is found by NumPy.

        Args:
            indices: Which batches; one past `num_batches` is in a later epoch, as in Grain.
            rows: For each of them int64[n], ascending; None for all rows.
            faults: What becomes of records that cannot be had.
        """

    @abstractmethod
    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        """Reads, in one call if the source can, what `MadeBatch.write` takes of each piece.

        Args:
            pieces: What to read.
            until: Of a single piece that is read one by one, as much is read as can be before
                this time, by `time.perf_counter`, and one record at least.
        """


class BatchMapDataset(grain.MapDataset):
    """Batches by index, whose records can be read apart."""

    @property
    def cuts(self) -> Cuts:
        """As `RowReader.cuts`."""
        return Cuts(len(self), {0: 1})

    @property
    def num_epochs(self) -> int:
        """As `RowReader.num_epochs`."""
        return 1

    @property
    def counts_records(self) -> bool:
        """As `RowReader.counts_records`."""
        return False

    @property
    def host_batch_sizes(self) -> tuple[int, ...]:
        """If full batches are of several sizes, all of them, in rows of this host."""
        return ()

    def beginning_at(self, progress: Progress) -> BatchMapDataset:
        """As `RowReader.beginning_at`."""
        return self

    def repeated(self, times: int) -> BatchMapDataset:
        """As `RowReader.repeated`."""
        raise NotImplementedError

    @property
    def reads_many(self) -> bool:
        """Whether one call reads many records for less than as many calls would."""
        return False

    @property
    def only_asks_sources(self) -> bool:
        """Whether `read` runs nothing of the user's but sources."""
        return False

    @property
    def records_per_batch(self) -> int:
        """`MadeBatch.size` of a full batch."""
        return 1

    @abstractmethod
    def begin(self, indices: Sequence[int], faults: Faults) -> list[MadeBatch]:
        """New batches, of which nothing has been read yet: they take no memory."""

    @abstractmethod
    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        """As `RowReader.read`."""

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self.slice(index)
        if index < 0:
            index += len(self)  # as in a list
        return self.read_batch(index, Faults(FAIL_AT_ONCE))

    def read_batch(self, index: int, faults: Faults) -> Batch:
        """One batch, read here and now."""
        (batch,) = self.begin([index], faults)
        if batch.size:
            (elements,) = self.read([Piece(batch, 0, batch.size)], NEVER)
            batch.write(elements, 0, NEVER)
        return batch.finish()


class RowMapDataset(BatchMapDataset):
    """Batches by index, whole or some rows of each; what the chain's stages make of a `MapDataset`.

    Args:
        parent: The dataset below.
        reader: Reads its batches.
        made_by: The stage that made this dataset, for its text.
        rows: From the size of a batch to int64[n], those of its rows to keep, ascending; None for
            all of them.
    """

    def __init__(
        self,
        parent: grain.MapDataset,
        reader: RowReader,
        made_by: Any = "RowMapDataset",
        rows: Mapping[int, np.ndarray] | None = None,
    ):
        super().__init__(parent)
        self.reader: RowReader = reader
        self._made_by, self._rows = made_by, rows

    def __len__(self) -> int:
        return self.reader.num_batches()

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return str(self._made_by)

    def with_reader(self, reader: RowReader) -> RowMapDataset:
        """The same rows of other batches."""
        (parent,) = self.parents
        return RowMapDataset(parent, reader, self._made_by, self._rows)

    @property
    def cuts(self) -> Cuts:
        return self.reader.cuts

    @property
    def num_epochs(self) -> int:
        return self.reader.num_epochs

    @property
    def counts_records(self) -> bool:
        return self.reader.counts_records

    def beginning_at(self, progress: Progress) -> RowMapDataset:
        return self.with_reader(self.reader.beginning_at(progress))

    def repeated(self, times: int) -> RowMapDataset:
        return self.with_reader(self.reader.repeated(times))

    def repeat(
        self, num_epochs: int | None = None, *, reseed_each_epoch: bool = True
    ) -> grain.MapDataset:
        """As of any `grain.MapDataset`; where sizes change, epochs differ in their batches."""
        if not self.counts_records or not (reseed_each_epoch or self.has_several_sizes):
            return super().repeat(num_epochs, reseed_each_epoch=reseed_each_epoch)
        if not reseed_each_epoch:
            raise ShardingError(
                "batches whose size changes cannot be repeated with reseed_each_epoch=False.",
                remedy="repeat the records, before BatchSchedule; batches then go over the borders"
                " of epochs.",
            )
        if num_epochs is not None:
            require_int("num_epochs", num_epochs, 1)
        return self.with_reader(self.reader.repeated(num_epochs or sys.maxsize))

    @property
    def has_several_sizes(self) -> bool:
        """Whether full batches are of one size here and of another there."""
        return self.counts_records and len(self.reader.global_batch_sizes) > 1

    @property
    def host_batch_sizes(self) -> tuple[int, ...]:
        if not self.has_several_sizes:
            return ()
        if self._rows is None:
            return self.reader.global_batch_sizes
        return tuple(len(rows) for rows in self._rows.values())

    @property
    def makes_batches(self) -> bool:
        """Whether it makes batches of records, and not of the batches below it."""
        return not self.reader.reads_whole_batches

    @property
    def has_all_rows(self) -> bool:
        """Whether its batches are whole, so that a stage may still choose among their rows."""
        return self._rows is None

    @property
    def reads_many(self) -> bool:
        return self.reader.reads_many

    @property
    def only_asks_sources(self) -> bool:
        return self.reader.only_asks_sources

    @property
    def reads_other_rows(self) -> bool:
        """Whether every row of a batch is evaluated, although only some are kept."""
        if self._rows is None or not self.reader.reads_whole_batches:
            return False
        return any(len(rows) < size for size, rows in self._rows.items())

    @property
    def records_per_batch(self) -> int:
        if self.reader.reads_whole_batches:
            return 1
        if self._rows is None:
            return max(self.reader.global_batch_sizes)
        return max(len(rows) for rows in self._rows.values())

    def begin(self, indices: Sequence[int], faults: Faults) -> list[MadeBatch]:
        rows, size_of = self._rows, self.reader.global_batch_size_of
        chosen = [None if rows is None else rows[size_of(index)] for index in indices]
        return self.reader.begin(indices, chosen, faults)

    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        return self.reader.read(pieces, until)
