"""`RecordBatching`: batches in which each row depends on one record, so it can be read alone."""

from __future__ import annotations

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
    """Batches that Grain's ``.batch`` or a `BatchSchedule` makes of records.

    Attributes:
        template: The records that are batched, and the structure of their rows.
        node: Facts about Grain's ``.batch`` and the nodes after it; None for a `BatchSchedule`.
        sliced: If batches are sliced or shuffled, the cuts of the records into batches before that;
            `cuts` then counts each batch as one record. None otherwise.
    """

    template: RowTemplate
    node: nodes.BatchNode | None = None
    sliced: Cuts | None = None
    reads_rows_alone: ClassVar[bool] = True

    @classmethod
    def of(cls, node: nodes.BatchNode, num_batches: int) -> RecordBatching:
        """Returns the `num_batches` batches that Grain's ``.batch`` and the nodes after it make."""
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
        """The cuts of the records into batches, before any slice or shuffle of the batches."""
        return self.sliced or self.cuts

    @property
    def unpadded_sizes(self) -> tuple[int, ...]:
        return self.by_record.sizes

    def cut(self, index: int) -> Cut:
        """Returns the records of a batch, and the position of the run after it.

        The epoch in the result is an epoch of the records. A ``.repeat`` of the batches may read
        the same epoch of the records several times.
        """
        if self.node is not None and self.sliced is not None:
            cut = self.sliced.cut(self.node.batch_index(index))
            return cut._replace(after=self.cuts.progress(index + 1))
        cut = self.cuts.cut(index)
        return cut if self.node is None else cut._replace(epoch=self.node.epoch_below(cut.epoch))

    def epochs(self) -> Cuts | None:
        if self.sliced is None:
            return self.cuts
        if self.by_record.has_short(1):
            return None
        (size,) = self.unpadded_sizes
        return Cuts(self.cuts.records * size, {0: size})

    def fingerprint(self) -> Fingerprint:
        after = () if self.node is None else self.node.after
        drop_remainder = self.node is not None and self.node.drop_remainder
        found = records_fingerprint(self.template.records, after, drop_remainder)
        found |= super().fingerprint()
        if self.sliced is None:
            return found
        (global_batch_size,) = self.unpadded_sizes
        return {**found, "global_batch_size": global_batch_size}

    def begin(self, indices: Sequence[int], faults: Faults) -> list[BatchBuilder]:
        cuts = [self.cut(index) for index in indices]
        records: list[np.ndarray] = []  # the records that this host reads for each batch: int64[n]
        for cut in cuts:
            # The indices of a later epoch continue after the earlier epochs, as in Grain.
            first = cut.epoch * self.by_record.records + cut.record
            rows = self.kept[cut.size]
            records.append(first + rows[rows < cut.num_records])  # further rows are padding
        # One route for the records of all these batches. Each builder gets its part of it.
        way = route(self.template.records, np.concatenate(records))
        stop = 0
        builders: list[BatchBuilder] = []
        for index, cut, of_batch in zip(indices, cuts, records, strict=True):
            start, stop = stop, stop + len(of_batch)
            part, num_rows = way.part(start, stop), len(self.kept[cut.size])
            builders.append(
                BatchBuilder(
                    index, cut.after, of_batch, part, self.template, faults, num_rows, self.padding
                )
            )
        return builders
