"""`RecordBatching`: batches whose rows depend on one record each, so each row is read alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import grain
import numpy as np

from grain_shard.errors import BadRecordsError, describe_error
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import NEVER, route
from grain_shard.reading.batch_builder import BatchBuilder, Known, Rows
from grain_shard.reading.batching import Batching
from grain_shard.reading.cuts import Cut, Cuts
from grain_shard.reading.faults import Faults
from grain_shard.reading.fingerprint import Fingerprint, records_fingerprint
from grain_shard.reading.origin import Origin, record_name
from grain_shard.reading.stack import RowStacker, Stack


@dataclass(frozen=True)
class Slice:
    """Batches that a slice has chosen. A batch can then not begin at any other record.

    Attributes:
        by_record: The cuts of the records into the batches below the slice.
        index_below: Maps the index of a batch to the index below the slice.
    """

    by_record: Cuts
    index_below: Callable[[int], int]


@dataclass(frozen=True, kw_only=True)
class RecordBatching(Batching):
    """Records, batched by Grain's ``.batch`` or by a `BatchSchedule`.

    Attributes:
        template: The records that are batched, and the structure of their rows.
        drop_remainder: True if ``.batch`` drops the records that do not fill a batch.
        above: The nodes that follow the batching and are part of the fingerprint.
        epoch_below: Maps an epoch to the records' epoch; None if both are the same.
        sliced: The slice of the batches, if there is one.
    """

    template: RowTemplate
    drop_remainder: bool = False
    above: tuple[grain.MapDataset, ...] = ()
    epoch_below: Callable[[int], int] | None = None
    sliced: Slice | None = None

    @classmethod
    def of(cls, node: nodes.BatchNode, num_batches: int) -> RecordBatching:
        """Returns the batches of Grain's ``.batch`` and of the nodes that follow it.

        Args:
            node: The known facts of these nodes.
            num_batches: The number of batches of the whole dataset.
        """
        sizes, drop = {0: node.global_batch_size}, node.drop_remainder
        cuts, sliced = Cuts(len(node.records), sizes, drop_remainder=drop), None
        if node.num_epochs is None:
            cuts, sliced = Cuts(num_batches, {0: 1}), Slice(cuts, node.batch_index)
        return cls(
            cuts=cuts,
            num_epochs=1 if node.num_epochs is None else node.num_epochs,
            template=RowTemplate(node.records),
            drop_remainder=drop,
            above=node.above,
            epoch_below=node.epoch_below,
            sliced=sliced,
        )

    @property
    def counts_records(self) -> bool:
        return self.sliced is None

    @property
    def reads_rows_alone(self) -> bool:
        return True

    @property
    def reads_many(self) -> bool:
        return route(self.template.records, np.arange(0)).reads_many

    @property
    def by_record(self) -> Cuts:
        """Cuts of the records; with a slice, cuts of the records below it."""
        return self.cuts if self.sliced is None else self.sliced.by_record

    @property
    def unpadded_sizes(self) -> tuple[int, ...]:
        return self.by_record.sizes

    def cut(self, index: int) -> Cut:
        """Returns the records of a batch."""
        if self.sliced is None:
            return self.cuts.cut(index)
        return self.sliced.by_record.cut(self.sliced.index_below(index))

    def epochs(self) -> Cuts | None:
        if self.sliced is None:
            return self.cuts
        if self.by_record.has_short(1):
            return None
        (size,) = self.unpadded_sizes
        return Cuts(self.cuts.records * size, {0: size})

    def dropping_remainder(self) -> RecordBatching:
        return replace(self, cuts=self.cuts.dropping_remainder())

    def fingerprint_of_batches(self) -> Fingerprint:
        found = records_fingerprint(self.template.records, self.above, self.drop_remainder)
        if self.sliced is None:
            return found
        (global_batch_size,) = self.unpadded_sizes
        return {**found, "global_batch_size": global_batch_size}

    def begin(self, indices: Sequence[int], faults: Faults) -> list[BatchBuilder]:
        cuts = [self.cut(index) for index in indices]
        of_batches = [self._records_of(cut) for cut in cuts]
        stops = itertools.accumulate(map(len, of_batches))
        way = route(self.template.records, np.concatenate(of_batches))
        return [
            BatchBuilder(
                index,
                records,
                way.part(stop - len(records), stop),
                self.template,
                faults,
                self.host_batch_size_of(cut.size),
                self.padding,
            )
            for index, cut, records, stop in zip(indices, cuts, of_batches, stops, strict=True)
        ]

    def _records_of(self, cut: Cut) -> np.ndarray:
        """Returns the existing records of the rows to keep, in their order: int64[n]."""
        epoch, record, existing, size = cut
        if self.epoch_below is not None and self.sliced is None:
            epoch = self.epoch_below(epoch)
        start, rows = epoch * self.by_record.records + record, self.rows_of(size)
        return start + (np.arange(existing) if rows is None else rows[rows < existing])


# The most records to try, if the first ones are unreadable, to learn the structure of all.
_MOST_LOOKED_AT = 1000
# Held while one record is read to learn the structure of all. It is no attribute of a template,
# because templates are pickled for worker processes, and locks cannot be pickled.
_LEARNING = threading.Lock()


class RowTemplate(Rows):
    """The records of a pipeline, and the structure of their rows once one was read.

    Args:
        records: The dataset that is batched.
    """

    def __init__(self, records: grain.MapDataset):
        self.records: grain.MapDataset = records
        self._stacker: RowStacker | None = None

    def stacker(self, faults: Faults, known: Known | None) -> RowStacker:
        """Returns a stacker for rows with the structure of the first row ever read.

        Args:
            faults: The rules for failed reads, if a record must be read.
            known: A row that was read already, which may be the first, and its record.
        """
        if self._stacker is None:
            with _LEARNING:
                if self._stacker is None:
                    row, record = known or self._first(faults)
                    self._stacker = RowStacker(row, "record {}", record)
        return self._stacker

    def _first(self, faults: Faults) -> Known:
        """Returns the row of the first readable record, and the record."""
        error: BaseException = LookupError("there is no record")
        for record in range(min(len(self.records), _MOST_LOOKED_AT)):
            way = route(self.records, np.array([record]))
            (row,) = way.finish(way.read(NEVER, faults), NEVER, faults)
            if type(row) is not Unreadable:
                return row, record
            error = row.error
            if not faults.may_leave_out(error):
                raise error
        raise BadRecordsError(
            f"none of the first {min(len(self.records), _MOST_LOOKED_AT):,} records can be read, so"
            f" the look of a row is not known; the last: {describe_error(error)}.\n"
            "  remedy: look at the source, and at what .map does."
        ) from error

    def stack(self, size: int, faults: Faults, known: Known | None) -> Stack:
        return Stack(self.stacker(faults, known), size)

    def empty_element(self, faults: Faults, known: Known | None) -> Any:
        return self.stacker(faults, known).empty_row

    @property
    def rows_at_a_time(self) -> int:
        return 1 if self._stacker is None else self._stacker.rows_at_a_time

    def origin(self, record: int) -> Origin | None:
        return Origin.of(self.records, record)

    def evaluate(self, record: int) -> Any:
        return self.records[record]

    def name(self, record: int, among: int) -> str:
        above = "the dataset above .batch"
        if among > 1:
            return f"one of the records {record} to {record + among - 1} of {above}"
        return record_name(record, above, self.origin(record))
