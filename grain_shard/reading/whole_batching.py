"""`WholeBatching`: batches evaluated as a whole, because no row can be read alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside.routes import Route
from grain_shard.host_arrays import copied, empty
from grain_shard.reading.batch_builder import BatchBuilder, Known, Rows
from grain_shard.reading.batching import Batching
from grain_shard.reading.cuts import Cuts
from grain_shard.reading.faults import Faults
from grain_shard.reading.fingerprint import Fingerprint, fingerprint
from grain_shard.reading.forgotten_batch import refuse_records, warn_of_records
from grain_shard.reading.origin import Origin
from grain_shard.reading.record_batching import RecordBatching
from grain_shard.trees import Batch, FlatBatch


@dataclass(frozen=True, kw_only=True)
class WholeBatching(Batching):
    """Whole batches, of which some rows are kept.

    Attributes:
        batches: The batches.
        made_of: The records of the batches, if known.
        batches_per_epoch: Batches in an epoch of the dataset. Some of them may be dropped here.
    """

    batches: Wholes
    made_of: RecordBatching | None
    batches_per_epoch: int

    @classmethod
    def of(cls, ds: grain.MapDataset, made_of: RecordBatching | None) -> WholeBatching:
        """Returns the batches of a dataset."""
        cuts = Cuts(len(ds), {0: 1}) if made_of is None else made_of.cuts
        size = None if made_of is None else made_of.unpadded_sizes[0]
        return cls(
            cuts=cuts,
            num_epochs=1 if made_of is None else made_of.num_epochs,
            batches=Wholes(ds, size),
            made_of=made_of,
            batches_per_epoch=cuts.steps_before(1),
        )

    @property
    def counts_records(self) -> bool:
        return False

    @property
    def reads_rows_alone(self) -> bool:
        return False

    @property
    def reads_many(self) -> bool:
        return False

    @property
    def unpadded_sizes(self) -> tuple[int, ...]:
        return (self.batches.size,)

    def epochs(self) -> Cuts | None:
        if self.made_of is not None:
            return self.made_of.epochs()
        size, last = self.batches.size, self.batches_per_epoch - 1
        return Cuts(last * size + self.batches.rows_of(last), {0: size})

    def dropping_remainder(self) -> WholeBatching:
        cuts = self.epochs()
        assert cuts is not None, "no batch of a slice is dropped"
        return replace(self, cuts=cuts.dropping_remainder())

    def fingerprint_of_batches(self) -> Fingerprint:
        return fingerprint(self.batches.ds)

    def begin(self, indices: Sequence[int], faults: Faults) -> list[BatchBuilder]:
        ds = self.batches.ds
        found = [np.array([self._dataset_index(index)]) for index in indices]
        return [
            BatchBuilder(
                index,
                below,
                Route(ds, below),
                _Whole(self, index),
                faults,
                0 if self.padding is None else self.host_batch_size_of(self.batches.size),
                self.padding,
            )
            for index, below in zip(indices, found, strict=True)
        ]

    def _dataset_index(self, index: int) -> int:
        """Returns the index of a batch in the dataset, which includes the dropped batches."""
        epoch, record, _, size = self.cuts.cut(index)
        return epoch * self.batches_per_epoch + record // size

    def kept(self, index: int, batch: Batch) -> Batch:
        """Returns the rows of a batch to keep, in arrays without other references.

        Raises:
            ShardingError: The batch has an unexpected number of rows.
        """
        flat = FlatBatch.of(batch)
        rows = None if self.rows is None else self.rows_of(self.batches.size)
        if self.made_of is not None:
            sliced = self.made_of.sliced is not None
            existing = (self.made_of if sliced else self.cuts).cut(index).num_records
            if flat.rows != existing:
                flat.refuse(
                    f"batch {index} has {flat.rows} rows, made of {existing} records: what stands"
                    " after .batch changes their number.",
                    remedy="change it before .batch; or in a stream, .to_iter_dataset().batch(B)"
                    ".map(...), whose first batch tells the size.",
                )
        if rows is not None and flat.rows > self.batches.size:
            flat.refuse(
                f"batch {index} has {flat.rows} rows, more than the {self.batches.size} of a full"
                " batch.",
                remedy="give every batch but the last of an epoch the same number of rows: shuffle,"
                " mix or concatenate before .batch, or use .batch(B, drop_remainder=True).",
            )
        return take_rows(flat, rows)


class Wholes:
    """The batches of a dataset, and the number of rows of a full one once it is known.

    Args:
        ds: The dataset.
        size: Rows of a full batch; None if only a batch shows it.
    """

    def __init__(self, ds: grain.MapDataset, size: int | None):
        self.ds: grain.MapDataset = ds
        self._size = size

    @property
    def size(self) -> int:
        """Rows of a full batch; the first use may read the first batch."""
        if self._size is None:
            batch = FlatBatch.of(self.ds[0])
            refuse_records(self.ds, batch)
            warn_of_records(self.ds, batch)
            self._size = batch.rows
        return self._size

    def rows_of(self, index: int) -> int:
        """Returns the rows of a batch; this reads the batch."""
        return FlatBatch.of(self.ds[index]).rows


class _Whole(Rows):
    """One batch, evaluated as one record and stacked alone."""

    def __init__(self, batching: WholeBatching, index: int):
        self._batching, self._index = batching, index
        self._batch: Batch | None = None

    def stack(self, size: int, faults: Faults, known: Known | None) -> _Whole:
        return self

    def write(self, rows: Sequence[Any], start: int, origins: Any) -> None:
        self._batch = self._batching.kept(self._index, rows[0])

    def batch(self) -> Batch:
        return self._batch

    def empty_element(self, faults: Faults, known: Known | None) -> Any:
        raise NotImplementedError("no row of a whole batch is left out")

    def name(self, record: int, among: int) -> str:
        return f"batch {record} of the dataset"

    def origin(self, record: int) -> Origin | None:
        return None

    def evaluate(self, record: int) -> Any:
        return self._batching.batches.ds[record]


def take_rows(batch: FlatBatch, rows: np.ndarray | None) -> Batch:
    """Returns the chosen rows that exist (None: all) as a batch; scalars belong to every row.

    The arrays are plain copies: the caller may reuse its buffer, and a view of Grain's shared
    memory loses its offset on the way out of a worker.
    """
    existing = np.arange(batch.rows) if rows is None else rows[rows < batch.rows]
    return batch.structure.unflatten(
        [_rows_of(array, existing) if array.ndim else copied(array) for array in batch.arrays]
    )


def _rows_of(array: np.ndarray, existing: np.ndarray) -> np.ndarray:
    taken = empty((len(existing), *array.shape[1:]), array.dtype)
    # Without "clip" numpy would first gather into a buffer of its own; all rows are in bounds.
    return np.take(array, existing, axis=0, out=taken, mode="clip")
