"""Batches of which some rows can be read without the others, as a `grain.MapDataset`.

A batch is read in two steps. `fetch` reads for several batches what the source gives in one call;
`make` makes one batch of its part. A source of files reads a thousand records in one call for half
of what four calls cost.
"""

from __future__ import annotations

import collections
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from grain_shard.background import Producer
from grain_shard.grain_inside.nodes import Epoch
from grain_shard.reading.fingerprint import Fingerprint
from grain_shard.trees import Batch

# Of array_record, 256 records in a call cost 25 us each, 1024 cost 12, 2048 cost 10.
_RECORDS_PER_CALL = 1024


class RowReader(ABC):
    """A sequence of batches that can be read row by row.

    Attributes:
        reads_whole_batches: Whether reading one row evaluates all rows of the batch.
    """

    reads_whole_batches: bool = False

    @property
    def reads_many(self) -> bool:
        """Whether to fetch several batches at once is cheaper than one by one."""
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
    def fetch(self, indices: Sequence[int], rows: np.ndarray | None) -> Sequence[Any]:
        """Reads the chosen rows of several batches, as far as one call does for all of them.

        Args:
            indices: Which batches; one past `num_batches` is in a later epoch, as in Grain.
            rows: int64[n], ascending; None for all of them.

        Returns:
            For each batch what `make` takes.
        """

    @abstractmethod
    def make(self, fetched: Any, rows: np.ndarray | None) -> Batch:
        """The chosen rows of one batch, less those past the end of a short one.

        Args:
            fetched: Of that batch.
            rows: The same as for `fetch`.

        Returns:
            A tree of arrays ``[m, ...]``, at most as many as were chosen, that nothing else refers
            to.
        """


class BatchMapDataset(grain.MapDataset):
    """Batches by index, made in two steps: read for several at once, then made one by one."""

    @property
    def reads_many(self) -> bool:
        """Whether to fetch several batches at once is cheaper than one by one."""
        return False

    @property
    @abstractmethod
    def rows_per_batch(self) -> int:
        """How many rows a batch has, at the most."""

    @abstractmethod
    def fetch(self, indices: Sequence[int]) -> Sequence[Any]:
        """Reads for several batches; for each, what `make` takes."""

    @abstractmethod
    def make(self, fetched: Any) -> Batch:
        """One batch, in arrays that nothing else refers to."""

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self.make(self.fetch([index])[0])


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
    def reads_other_rows(self) -> bool:
        """Whether every row of a batch is evaluated, although only some are kept."""
        if self._rows is None or not self.reader.reads_whole_batches:
            return False
        return len(self._rows) < self.reader.global_batch_size

    @property
    def rows_per_batch(self) -> int:
        return self.reader.global_batch_size if self._rows is None else len(self._rows)

    def fetch(self, indices: Sequence[int]) -> Sequence[Any]:
        return self.reader.fetch(indices, self._rows)

    def make(self, fetched: Any) -> Batch:
        return self.reader.make(fetched, self._rows)


class Fetches(Producer[tuple[int, Any]]):
    """Batch indices with what was fetched for each; as many in one call as there is room for.

    Args:
        ds: The dataset to fetch from.
        indices: The batches.
        buffer_size: How many batches may wait or be in the making.
    """

    def __init__(self, ds: BatchMapDataset, indices: range, buffer_size: int):
        self._ds, self._indices = ds, indices
        self._fetched: collections.deque[tuple[int, Any]] = collections.deque()
        self._count = 1  # the first batch comes alone, to be there soon; then they double
        self._most = max(1, _RECORDS_PER_CALL // max(1, ds.rows_per_batch))
        # A large call is waited for until three quarters of the buffer are free for it. The rest,
        # and what waits on the devices, feeds the training loop while the call lasts.
        self._enough = max(1, 3 * buffer_size // 4)

    @property
    def room_wanted(self) -> int:
        if self._fetched or not self._indices:
            return 1
        return min(self._enough, self._count, len(self._indices))

    def draw(self, room: int) -> tuple[int, Any]:
        if not self._fetched and self._indices:
            count, self._count = min(room, self._count), min(2 * self._count, self._most)
            try:
                self._read(count)
            except Exception:
                if count == 1:
                    raise
                # One of several batches cannot be read. Each is read alone now, so that those
                # before the bad one still come, and the error comes in its place.
                self._read(1)
        return next(self)

    def __next__(self) -> tuple[int, Any]:
        if not self._fetched:
            raise StopIteration
        return self._fetched.popleft()

    def _read(self, count: int) -> None:
        indices = self._indices[:count]
        try:
            fetched = self._ds.fetch(indices)
        except StopIteration as error:  # which would be taken for the end of the batches
            raise RuntimeError("the pipeline raised StopIteration") from error
        self._fetched.extend(zip(indices, fetched, strict=True))
        self._indices = self._indices[count:]
