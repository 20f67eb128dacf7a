"""Batches of which some rows can be read without the others, in parts and side by side.

A batch is begun, its records are read in pieces of any size by any thread, each piece is written
where it belongs, and the batch is finished when none is missing. One call of the source may read
pieces of several batches.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from grain_shard.grain_inside.nodes import Epoch
from grain_shard.grain_inside.routes import NEVER
from grain_shard.reading.fingerprint import Fingerprint
from grain_shard.trees import Batch


class MadeBatch(ABC):
    """A batch in the making.

    Attributes:
        size: How many records it is made of; 0 if it is all padding.
    """

    size: int

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
    """

    reads_whole_batches: bool = False

    @property
    def reads_many(self) -> bool:
        """Whether one call reads many records for less than as many calls would."""
        return False

    @property
    def only_asks_sources(self) -> bool:
        """Whether `read` runs nothing of the user's but sources."""
        return False

    @property
    @abstractmethod
    def global_batch_size(self) -> int:
        """Rows of a full batch."""

    @abstractmethod
    def num_batches(self) -> int:
        """Batches of one pass. Not cached: Grain's workers slice a source in place."""

    @abstractmethod
    def epoch(self) -> Epoch | None:
        """The batches of one epoch; None if this dataset is not made of whole epochs."""

    @abstractmethod
    def fingerprint(self) -> Fingerprint:
        """What a saved state must agree with."""

    @abstractmethod
    def fields_before(self, batch: int) -> Fingerprint:
        """The fields of the fingerprint that are others if what follows a batch may change."""

    @abstractmethod
    def begin(self, index: int, rows: np.ndarray | None) -> MadeBatch:
        """A new batch of the chosen rows, less those past the end of a short one.

        Args:
            index: Which batch; one past `num_batches` is in a later epoch, as in Grain.
            rows: int64[n], ascending; None for all of them.
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
    def begin(self, index: int) -> MadeBatch:
        """A new batch, of which nothing has been read yet."""

    @abstractmethod
    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        """As `RowReader.read`."""

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        batch = self.begin(index)
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
        rows: int64[n], the rows of each batch to keep, ascending; None for all of them.
    """

    def __init__(
        self,
        parent: grain.MapDataset,
        reader: RowReader,
        made_by: Any = "RowMapDataset",
        rows: np.ndarray | None = None,
    ):
        super().__init__(parent)
        self.reader, self._made_by, self._rows = reader, made_by, rows

    def __len__(self) -> int:
        return self.reader.num_batches()

    def __str__(self) -> str:
        return str(self._made_by)

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
        return len(self._rows) < self.reader.global_batch_size

    @property
    def records_per_batch(self) -> int:
        if self.reader.reads_whole_batches:
            return 1
        return self.reader.global_batch_size if self._rows is None else len(self._rows)

    def begin(self, index: int) -> MadeBatch:
        return self.reader.begin(index, self._rows)

    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        return self.reader.read(pieces, until)
