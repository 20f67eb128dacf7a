"""`WholeBatching`: batches evaluated as a whole, because no row can be read alone."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import grain
import numpy as np

from grain_shard.grain_inside.routes import Elements, Route
from grain_shard.host_arrays import copied, empty
from grain_shard.reading.batch_builder import BatchBuilder
from grain_shard.reading.batching import Batching
from grain_shard.reading.cuts import Cuts
from grain_shard.reading.faults import Faults
from grain_shard.reading.fingerprint import Fingerprint, pipeline_digests
from grain_shard.reading.forgotten_batch import refuse_records
from grain_shard.reading.record_batching import RecordBatching
from grain_shard.reading.stack import RowTemplate
from grain_shard.trees import FlatBatch, check_record, is_text


@dataclass(frozen=True, kw_only=True)
class WholeBatching(Batching):
    """Batches that are evaluated as a whole, of which some rows are then kept.

    Attributes:
        batches: The dataset of whole batches.
    """

    batches: WholeBatches

    @classmethod
    def of(cls, ds: grain.MapDataset, made_of: RecordBatching | None) -> WholeBatching:
        """Returns the `WholeBatching` of a dataset of batches.

        Args:
            ds: The dataset of batches.
            made_of: The batching of the records of which the batches are made; None if unknown.
        """
        batches = WholeBatches(ds, made_of)
        if made_of is None:
            return cls(cuts=Cuts(len(ds), {0: 1}), batches=batches)
        return cls(cuts=made_of.cuts, num_epochs=made_of.num_epochs, batches=batches)

    @property
    def unpadded_sizes(self) -> tuple[int, ...]:
        return (self.batches.size,)

    def epochs(self) -> Cuts | None:
        batches = self.batches
        if batches.made_of is not None:
            return batches.made_of.epochs()
        last = len(batches.ds) - 1
        return Cuts(last * batches.size + FlatBatch.of(batches.ds[last]).rows, {0: batches.size})

    def fingerprint(self) -> Fingerprint:
        made_of = self.batches.made_of
        if made_of is None:
            unknown = {"records": None, "global_batch_size": None}
            return {**unknown, **pipeline_digests(self.batches.ds), **super().fingerprint()}
        found = {**made_of.fingerprint(), **super().fingerprint()}
        return {**found, "global_batch_size": self.batches.size}

    def begin(self, indices: Sequence[int], faults: Faults) -> list[BatchBuilder]:
        return [_WholeBatch(self, index, faults) for index in indices]


class WholeBatches:
    """A dataset of whole batches, and the number of rows of a full batch once it is known.

    Args:
        ds: The dataset of batches.
        made_of: The batching of the records of which the batches are made; None if unknown.
    """

    def __init__(self, ds: grain.MapDataset, made_of: RecordBatching | None):
        self.ds: grain.MapDataset = ds
        self.made_of = made_of
        self._is_checked = False

    @property
    def per_epoch(self) -> int:
        """Number of batches in an epoch of the dataset, including batches that the chain drops."""
        return len(self.ds) if self.made_of is None else self.made_of.cuts.steps_before(1)

    @functools.cached_property
    def size(self) -> int:
        """Number of rows of a full batch. If it is unknown, the first use reads the first batch."""
        if self.made_of is not None:
            return self.made_of.unpadded_sizes[0]
        batch = FlatBatch.of(self.ds[0])
        refuse_records(self.ds, batch)
        return batch.rows

    def check_record(self, batch: FlatBatch) -> None:
        """Checks that Grain has not stacked the keys of a mapping in place of its values.

        Grain does that if JAX does not know the type of the mapping. A record is read to find out,
        but only for the first batch, and only if that batch looks as if it holds keys.

        Raises:
            ShardingError: The records have a mapping that JAX does not know.
        """
        node = None if self.made_of is None else self.made_of.node
        if node is None or not node.stacks or self._is_checked:
            return
        # Rows made of keys are text, or are the same for all records.
        rows = [array for array in batch.arrays if array.ndim > 1]
        if any(is_text(array) or (array == array[:1]).all() for array in rows):
            check_record(node.records[0], is_changed_later=True)
        self._is_checked = True


class _WholeBatch(BatchBuilder):
    """Builds a batch that is read as one element of a dataset of batches."""

    def __init__(self, batching: WholeBatching, index: int, faults: Faults):
        ds, (epoch, record, _, size, after) = batching.batches.ds, batching.cuts.cut(index)
        # The index of the batch in the dataset, which includes the batches that the chain drops.
        below = np.array([epoch * batching.batches.per_epoch + record // size])
        # Without padding this number is unused, and is not computed, because that may read a batch.
        padded = 0 if batching.padding is None else batching.host_batch_sizes[0]
        way, template = Route(ds, below), RowTemplate(ds)
        super().__init__(index, after, below, way, template, faults, padded, batching.padding)
        self._batching = batching
        self._batch: FlatBatch | None = None

    def _put(self, elements: Elements, start: int) -> None:
        """Keeps copies of the rows that this host needs of the batch, the only element.

        Raises:
            ShardingError: The batch has an unexpected number of rows.
        """
        (batch,) = self._with_arrays(start, elements[:1])
        flat, batching = FlatBatch.of(batch), self._batching
        rows = None  # all rows of the batch
        batching.batches.check_record(flat)
        made_of = batching.batches.made_of
        if made_of is not None:
            # If batches were sliced or shuffled, only `made_of` knows the records of a batch.
            cuts = batching.cuts if made_of.sliced is None else made_of
            expected = cuts.cut(self.index).num_records
            if flat.rows != expected:
                flat.refuse(
                    f"batch {self.index} has {flat.rows} rows, but is made of {expected} records:"
                    " a transformation after .batch changes the number of rows.",
                    remedy="change the number of rows before .batch, or in a stream:"
                    " .to_iter_dataset().batch(B).map(...). The first batch of a stream sets the"
                    " batch size.",
                )
        if batching.layout is not None:
            ((size, rows),) = batching.kept.items()  # only a `BatchSchedule` has several sizes
            if flat.rows > size:
                flat.refuse(
                    f"batch {self.index} has {flat.rows} rows, more than the {size} of a full"
                    " batch.",
                    remedy="give all batches the same number of rows, except the last batch of an"
                    " epoch. To do so, shuffle, mix or concatenate before .batch, or use"
                    " .batch(B, drop_remainder=True).",
                )
        self._batch = take_rows(flat, rows)

    def _stacked(self) -> FlatBatch:
        batch, self._batch = self._batch, None
        assert batch is not None
        return batch

    def _name(self, record: int, among: int) -> str:
        return f"batch {record} of the dataset"


def take_rows(batch: FlatBatch, rows: np.ndarray | None) -> FlatBatch:
    """Returns a batch with copies of the chosen rows and of all scalars.

    The rows are copied for two reasons. The maker of the batch may reuse its arrays. And a view of
    Grain's shared memory loses its offset when a worker process sends it.

    Args:
        batch: The batch.
        rows: int64[n], the row numbers to take, ascending; None for all. Numbers past the last row
            of the batch are skipped.
    """
    existing = np.arange(batch.rows) if rows is None else rows[rows < batch.rows]
    taken: list[np.ndarray] = []
    for array in batch.arrays:
        # If all rows are taken, they are in order, because row numbers ascend.
        if not array.ndim or len(existing) == batch.rows:
            taken.append(copied(array))
            continue
        chosen = empty((len(existing), *array.shape[1:]), array.dtype)
        # By default, numpy would first gather into a temporary buffer. "clip" avoids that, and
        # changes no row number, because all row numbers are in bounds.
        taken.append(np.take(array, existing, axis=0, out=chosen, mode="clip"))
    return FlatBatch(taken, batch.structure, len(existing))
