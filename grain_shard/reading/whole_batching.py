"""`WholeBatching`: batches evaluated as a whole, because no row can be read alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import grain
import numpy as np

from grain_shard.grain_inside.routes import Elements, Route
from grain_shard.host_arrays import copied, empty
from grain_shard.reading.batch_builder import BatchBuilder
from grain_shard.reading.batching import Batching
from grain_shard.reading.cuts import Cuts
from grain_shard.reading.faults import Faults
from grain_shard.reading.fingerprint import Fingerprint, fingerprint
from grain_shard.reading.forgotten_batch import refuse_records, warn_of_records
from grain_shard.reading.record_batching import RecordBatching
from grain_shard.reading.row_template import RowTemplate
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
        return cls(
            cuts=cuts,
            num_epochs=1 if made_of is None else made_of.num_epochs,
            batches=Wholes(ds, made_of),
            made_of=made_of,
            batches_per_epoch=cuts.steps_before(1),
        )

    @property
    def unpadded_sizes(self) -> tuple[int, ...]:
        return (self.batches.size,)

    def epochs(self) -> Cuts | None:
        if self.made_of is not None:
            return self.made_of.epochs()
        size, last = self.batches.size, self.batches_per_epoch - 1
        return Cuts(last * size + FlatBatch.of(self.batches.ds[last]).rows, {0: size})

    def dropping_remainder(self) -> WholeBatching:
        cuts = self.epochs()
        assert cuts is not None, "no batch of a slice is dropped"
        return replace(self, cuts=cuts.dropping_remainder())

    def fingerprint_of_batches(self) -> Fingerprint:
        return fingerprint(self.batches.ds)

    def begin(self, indices: Sequence[int], faults: Faults) -> list[BatchBuilder]:
        return [_WholeBatch(self, index, faults) for index in indices]

    def dataset_index(self, index: int) -> int:
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
        made_of: The records of the batches, if known.
    """

    def __init__(self, ds: grain.MapDataset, made_of: RecordBatching | None):
        self.ds: grain.MapDataset = ds
        self._made_of = made_of

    @functools.cached_property
    def size(self) -> int:
        """Rows of a full batch; the first use may read the first batch."""
        if self._made_of is not None:
            return self._made_of.unpadded_sizes[0]
        batch = FlatBatch.of(self.ds[0])
        refuse_records(self.ds, batch)
        warn_of_records(self.ds, batch)
        return batch.rows


class _WholeBatch(BatchBuilder):
    """One batch, read as one element of the dataset."""

    def __init__(self, batching: WholeBatching, index: int, faults: Faults):
        ds = batching.batches.ds
        below = np.array([batching.dataset_index(index)])
        padded = 0  # unused without padding; the size may have to be read
        if batching.padding is not None:
            padded = batching.host_batch_size_of(batching.batches.size)
        template = RowTemplate(ds)
        super().__init__(index, below, Route(ds, below), template, faults, padded, batching.padding)
        self._batching, self._batch = batching, None

    def _put(self, elements: Elements, start: int) -> None:
        self._batch = self._batching.kept(self._index, elements[0])

    def _stacked(self) -> Batch:
        batch, self._batch = self._batch, None
        return batch

    def _name(self, record: int, among: int) -> str:
        return f"batch {record} of the dataset"


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
