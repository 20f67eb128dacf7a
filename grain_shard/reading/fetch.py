"""Reading some rows of batches in two steps: for several at once, then one by one.

`fetch` reads for several batches what the source gives in one call; `make` makes a batch of its
part. A source of files reads a thousand records in one call for half of what four calls cost.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import grain
import numpy as np

from grain_shard.grain_inside.nodes import Epoch
from grain_shard.trees import Batch

# Of array_record, 256 records in a call cost 25 us each, 1024 cost 12, 2048 cost 10.
_RECORDS_PER_CALL = 1024


class RowReader(Protocol):
    """A sequence of batches that can be read row by row."""

    reads_whole_batches: bool  # whether reading one row evaluates all rows of the batch

    @property
    def reads_many(self) -> bool:
        """Whether to fetch several batches at once is cheaper than one by one."""
        ...

    @property
    def global_batch_size(self) -> int:
        """Rows of a full batch."""
        ...

    def num_batches(self) -> int:
        """Batches of one pass. Not cached: Grain's workers slice a source in place."""
        ...

    def epoch(self) -> Epoch | None:
        """The batches of one epoch; None if this dataset is not made of whole epochs."""
        ...

    def fetch(self, indices: Sequence[int], rows: np.ndarray) -> Sequence[Any]:
        """Reads the chosen rows of several batches, as far as one call does for all of them.

        Args:
            indices: Which batches; one past `num_batches` is in a later epoch, as in Grain.
            rows: int64[n], ascending.

        Returns:
            For each batch what `make` takes.
        """
        ...

    def make(self, fetched: Any, rows: np.ndarray) -> Batch:
        """The chosen rows of one batch, less those past the end of a short one.

        Args:
            fetched: Of that batch.
            rows: The same as for `fetch`.

        Returns:
            A tree of arrays ``[m, ...]`` with m <= n, that nothing else refers to.
        """
        ...


class FetchingMapDataset(grain.MapDataset):
    """A dataset of batches, some rows of each, that can be fetched for several batches at once."""

    def __init__(self, parent: grain.MapDataset, reader: RowReader, rows: np.ndarray | None):
        super().__init__(parent)
        self._fetched_by, self._rows = reader, rows

    def __len__(self) -> int:
        return self._fetched_by.num_batches()

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self.make(self.fetch([index])[0])

    @property
    def rows_per_batch(self) -> int:
        """How many rows of a batch this dataset gives."""
        return len(self._chosen())

    @property
    def reads_many(self) -> bool:
        """Whether to fetch several batches at once is cheaper than one by one."""
        return self._fetched_by.reads_many

    def fetch(self, indices: Sequence[int]) -> Sequence[Any]:
        """Reads for several batches; for each, what `make` takes."""
        return self._fetched_by.fetch(indices, self._chosen())

    def make(self, fetched: Any) -> Batch:
        """One batch."""
        return self._fetched_by.make(fetched, self._chosen())

    def _chosen(self) -> np.ndarray:
        return np.arange(self._fetched_by.global_batch_size) if self._rows is None else self._rows


class RowMapDataset(FetchingMapDataset):
    """A dataset of whole batches that hands out any of their rows."""

    def __init__(self, parent: grain.MapDataset, reader: RowReader):
        super().__init__(parent, reader, rows=None)
        self.reader = reader


class Fetches(Iterator[tuple[int, Any]]):
    """Batch indices with what was fetched for each; as many in one call as there is room for.

    Args:
        ds: The dataset to fetch from.
        indices: The batches.
        buffer_size: How many batches may wait or be in the making.
    """

    def __init__(self, ds: FetchingMapDataset, indices: range, buffer_size: int):
        self._ds, self._indices = ds, indices
        self._fetched: collections.deque[tuple[int, Any]] = collections.deque()
        self._count = 1  # the first batch comes alone, to be there soon; then they double
        self._most = max(1, _RECORDS_PER_CALL // max(1, ds.rows_per_batch))
        # Worth waiting for: what waits meanwhile, here and on the devices, lasts for the next call.
        self._enough = max(1, 3 * buffer_size // 4)

    @property
    def room_needed(self) -> int:
        """For how many results there should be room before the next ticket is drawn."""
        if self._fetched or not self._indices:
            return 1
        return min(self._enough, self._count, len(self._indices))

    def fetch(self, room: int) -> None:
        """Reads, if nothing is left of what was read before."""
        if self._fetched or not self._indices:
            return
        count, self._count = min(room, self._count), min(2 * self._count, self._most)
        try:
            self._read(count)
        except Exception:
            if count == 1:
                raise
            self._read(1)  # an error belongs to the batch that has it

    def _read(self, count: int) -> None:
        indices = self._indices[:count]
        self._fetched.extend(zip(indices, self._ds.fetch(indices), strict=True))
        self._indices = self._indices[count:]

    def __next__(self) -> tuple[int, Any]:
        if not self._fetched:
            raise StopIteration
        return self._fetched.popleft()
