"""Reading some rows of a batch without the others.

A `RowReader` is a sequence of batches that can be asked for chosen rows. Where a row of the batch
depends on its record alone, `RecordRows` reaches below ``.batch`` and evaluates those records and
no more. Where it does not (a custom ``batch_fn``, a ``.map`` after ``.batch``), `WholeBatchRows`
evaluates the batch and keeps the rows, which costs more and gives the same.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import grain
import jax
import numpy as np

from grain_shard import _grain
from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.spans import BATCH, READ, span
from grain_shard.trees import Batch, FlatBatch, as_arrays, flatten


class Epoch(NamedTuple):
    """The batches of one epoch, of which all but the last are always full."""

    batches: int
    full: int

    @classmethod
    def of(cls, node: _grain.BatchNode) -> Epoch | None:
        """What the batch node makes of its records; None if a slice was taken of its batches."""
        if not node.epochs_in_order:
            return None
        full, rest = divmod(len(node.records), node.global_batch_size)
        return cls(full + bool(rest and not node.drop_remainder), full)


class RowReader(Protocol):
    """A sequence of batches that can be read row by row."""

    reads_whole_batches: bool  # whether reading one row evaluates all rows of the batch

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

    def read(self, index: int, rows: np.ndarray) -> Batch:
        """The chosen rows of batch `index`, less those past the end of a short batch.

        Args:
            index: Which batch; an index past `num_batches` is in a later epoch, as in Grain.
            rows: int64[n], ascending.

        Returns:
            A tree of arrays ``[m, ...]`` with m <= n, that nothing else refers to.
        """
        ...


class RowMapDataset(grain.MapDataset):
    """A dataset of batches that hands out their rows: what our `MapDataset` nodes are."""

    reader: RowReader

    def __init__(self, parent: grain.MapDataset, reader: RowReader):
        super().__init__(parent)
        self.reader = reader

    def __len__(self) -> int:
        return self.reader.num_batches()

    def __getitem__(self, index):
        if isinstance(index, slice):
            return self.slice(index)
        return self.reader.read(index, np.arange(self.reader.global_batch_size))


def row_reader(ds: grain.MapDataset) -> RowReader:
    """The cheapest reader that gives exactly the rows of this dataset's batches."""
    if isinstance(ds, RowMapDataset):
        return ds.reader
    node = _grain.batch_node(ds)
    if node is not None and node.only_stacks:
        return RecordRows(ds, node)
    return WholeBatchRows(ds, node)


# Held while the structure record is read. Of no reader, since those are sent to worker processes.
_LEARNING = threading.Lock()


class RecordRows:
    """Rows read below ``.batch``: row r of batch k is record k * B + r of what stands above it."""

    reads_whole_batches = False

    def __init__(self, ds: grain.MapDataset, node: _grain.BatchNode):
        self._ds, self._node = ds, node
        self._row: _Row | None = None

    @property
    def global_batch_size(self) -> int:
        return self._node.global_batch_size

    def num_batches(self) -> int:
        return len(self._ds)

    def epoch(self) -> Epoch | None:
        return Epoch.of(self._node)

    def read(self, index: int, rows: np.ndarray) -> Batch:
        records = _record_indices(self._node, index, rows)
        if not records:
            # All padding. One record, once, tells what the rows would look like.
            with _LEARNING:
                self._row = self._row or _Row.of(self._read_all(0, [0])[0])
            return self._row.empty_batch()
        with span(READ):
            values = self._read_all(index, records)
        with span(BATCH):
            self._row = self._row or _Row.of(values[0])
            return self._row.stack(values, records)

    def _read_all(self, index: int, records: Sequence[int]) -> Sequence[Any]:
        source = self._node.records
        try:
            return _grain.get_records(source, records)
        except Exception as error:
            # Read them again one by one, to be able to say which it was.
            for record in records:
                try:
                    source[record]
                except Exception as one:
                    one.add_note(
                        f"grain_shard: while evaluating record {record} of the dataset above"
                        f" .batch, for batch {index}"
                    )
                    raise one from None
            error.add_note(
                f"grain_shard: while evaluating records {records[0]} to {records[-1]} of the"
                f" dataset above .batch, for batch {index}; none of them failed a second time"
            )
            raise


def _record_indices(node: _grain.BatchNode, index: int, rows: np.ndarray) -> list[int]:
    """The records of the chosen rows that exist, in their order."""
    size, records = node.global_batch_size, len(node.records)
    per_epoch = records // size if node.drop_remainder else -(-records // size)
    epoch, batch = divmod(node.batch_index(index), per_epoch)
    existing = rows[rows < min(size, records - batch * size)]
    return (existing + (epoch * records + batch * size)).tolist()


class _Row(NamedTuple):
    """What every record looks like, learned from the first one read."""

    structure: Any
    paths: list[str]
    shapes: list[tuple[int, ...]]
    dtypes: list[np.dtype]

    @classmethod
    def of(cls, value: Any) -> _Row:
        paths, leaves, _ = flatten(value)
        arrays = as_arrays(paths, leaves)
        return cls(
            jax.tree.structure(value), paths, [a.shape for a in arrays], [a.dtype for a in arrays]
        )

    def empty_batch(self) -> Batch:
        """A batch of this structure with no rows."""
        shapes_dtypes = zip(self.shapes, self.dtypes, strict=True)
        return self.structure.unflatten([np.zeros((0, *s), d) for s, d in shapes_dtypes])

    def stack(self, values: Sequence[Any], records: Sequence[int]) -> Batch:
        """The records as one batch; each must look like the first one that was read."""
        flat = []
        for value, record in zip(values, records, strict=True):
            leaves, structure = jax.tree.flatten(value)
            if structure != self.structure:
                self._refuse_structure(value, record)
            flat.append(leaves)
        columns = zip(*flat, strict=True)
        return self.structure.unflatten(
            [self._stack_leaf(i, column, records) for i, column in enumerate(columns)]
        )

    def _stack_leaf(self, i: int, column: Sequence[Any], records: Sequence[int]) -> np.ndarray:
        shape, dtype = self.shapes[i], self.dtypes[i]
        text = dtype.kind in "US"  # its dtype carries a width, which may differ from row to row
        kinds = {(np.shape(value), getattr(value, "dtype", None)) for value in column}
        if text or kinds != {(shape, dtype)}:
            for value, record in zip(column, records, strict=True):
                self._check_row(i, np.asarray(value), record)
        if shape and not text:
            # Not np.stack, which makes a view of each row first.
            return np.concatenate(column).reshape(len(column), *shape)
        return np.stack(column) if shape else np.asarray(column)

    def _check_row(self, i: int, row: np.ndarray, record: int) -> None:
        shape, dtype = self.shapes[i], self.dtypes[i]
        same_dtype = row.dtype.kind == dtype.kind if dtype.kind in "US" else row.dtype == dtype
        if row.shape != shape or not same_dtype:
            raise ShardingError(
                f"record {record} holds {describe_leaf(row)}, other records hold"
                f" {dtype}[{', '.join(map(str, shape))}].",
                path=self.paths[i],
                leaf=describe_leaf(row),
                remedy="give every record one shape and dtype before .batch (pad or cast in .map),"
                " or pass a batch_fn that does.",
            )

    def _refuse_structure(self, value: Any, record: int) -> None:
        paths, leaves, _ = flatten(value)
        as_arrays(paths, leaves)  # a None is named by its path
        differing = sorted(set(paths) ^ set(self.paths))
        raise ShardingError(
            f"record {record} has another structure than the other records"
            f" (only on one side: {', '.join(differing) or 'the containers'}).",
            path=differing[0] if differing else None,
            remedy="return the same tree for every record from .map.",
        )


class WholeBatchRows:
    """Rows kept from whole batches, where a row cannot be had alone."""

    reads_whole_batches = True

    def __init__(self, ds: grain.MapDataset, node: _grain.BatchNode | None):
        self._ds, self._node = ds, node
        self._size = node.global_batch_size if node else None

    @property
    def global_batch_size(self) -> int:
        if self._size is None:  # nothing tells it but a batch
            self._size = self._rows_of(0)
        return self._size

    def num_batches(self) -> int:
        return len(self._ds)

    def epoch(self) -> Epoch | None:
        if self._node is not None:
            return Epoch.of(self._node)
        batches = len(self._ds)
        short = self._rows_of(batches - 1) < self.global_batch_size
        return Epoch(batches, batches - short)

    def read(self, index: int, rows: np.ndarray) -> Batch:
        with span(READ):
            batch = FlatBatch.of(self._ds[index])
        if batch.rows > self.global_batch_size:
            batch.refuse(
                f"batch {index} has {batch.rows} rows, more than the {self.global_batch_size} of a"
                " full batch.",
                remedy="give every batch but the last of an epoch the same number of rows: shuffle,"
                " mix or concatenate before .batch, or use .batch(B, drop_remainder=True).",
            )
        with span(BATCH):
            return take_rows(batch, rows)

    def _rows_of(self, index: int) -> int:
        return FlatBatch.of(self._ds[index]).rows


def take_rows(batch: FlatBatch, rows: np.ndarray) -> Batch:
    """The chosen rows that exist, as a batch; scalars belong to every row.

    Always in fresh plain arrays: the caller's buffer may be reused, and a view of Grain's shared
    memory loses its offset on the way out of a worker.
    """
    existing = rows[rows < batch.rows]
    return batch.structure.unflatten(
        [np.asarray(a[existing] if a.ndim else a.copy()) for a in batch.arrays]
    )
