"""`RecordBatching`: batches whose rows depend on one record each, so each row is read alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.routes import route
from grain_shard.reading.batch_builder import BatchBuilder
from grain_shard.reading.batching import Batching
from grain_shard.reading.cuts import Cut, Cuts
from grain_shard.reading.faults import Faults
from grain_shard.reading.fingerprint import Fingerprint, records_fingerprint
from grain_shard.reading.stack import RowTemplate


@dataclass(frozen=True, kw_only=True)
class RecordBatching(Batching):
    """Records, batched by Grain's ``.batch`` or by a `BatchSchedule`.

    Attributes:
        template: The records that are batched, and the structure of their rows.
        node: The known facts of ``.batch`` and the nodes that follow it; None for other batching.
        sliced: The cuts of the records into the batches of which a slice chose some; None without a
            slice. A chosen batch can then not begin at any other record.
    """

    template: RowTemplate
    node: nodes.BatchNode | None = None
    sliced: Cuts | None = None
    reads_rows_alone: ClassVar[bool] = True

    @classmethod
    def of(cls, node: nodes.BatchNode, num_batches: int) -> RecordBatching:
        """Returns the batches of Grain's ``.batch`` and of the nodes that follow it.

        Args:
            node: The known facts of these nodes.
            num_batches: The number of batches of the whole dataset.
        """
        template = RowTemplate(node.records)
        cuts = Cuts(len(node.records), {0: node.global_batch_size}, node.drop_remainder)
        if node.num_epochs is None:
            return cls(cuts=Cuts(num_batches, {0: 1}), template=template, node=node, sliced=cuts)
        return cls(cuts=cuts, num_epochs=node.num_epochs, template=template, node=node)

    @property
    def counts_records(self) -> bool:
        return self.sliced is None

    @property
    def reads_many(self) -> bool:
        return route(self.template.records, np.arange(0)).reads_many

    @property
    def by_record(self) -> Cuts:
        """Cuts of the records; with a slice, cuts of the records below it."""
        return self.sliced or self.cuts

    @property
    def unpadded_sizes(self) -> tuple[int, ...]:
        return self.by_record.sizes

    def cut(self, index: int) -> Cut:
        """Returns the records of a batch, in the records' own epochs."""
        if self.node is None:
            return self.cuts.cut(index)
        if self.sliced is not None:
            return self.sliced.cut(self.node.batch_index(index))
        cut = self.cuts.cut(index)
        return cut._replace(epoch=self.node.epoch_below(cut.epoch))

    def epochs(self) -> Cuts | None:
        if self.sliced is None:
            return self.cuts
        if self.by_record.has_short(1):
            return None
        (size,) = self.unpadded_sizes
        return Cuts(self.cuts.records * size, {0: size})

    def fingerprint(self) -> Fingerprint:
        above = () if self.node is None else self.node.above
        drop_remainder = self.node is not None and self.node.drop_remainder
        found = records_fingerprint(self.template.records, above, drop_remainder)
        found |= super().fingerprint()
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
        start, rows = epoch * self.by_record.records + record, self.rows_of(size)
        return start + (np.arange(existing) if rows is None else rows[rows < existing])
