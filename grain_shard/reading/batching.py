"""Records, and how they become batches: by Grain's ``.batch``, or by a `BatchSchedule`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import grain

from grain_shard.grain_inside import nodes
from grain_shard.reading.cuts import Cut, Cuts
from grain_shard.reading.fingerprint import Fingerprint, records_fingerprint


@dataclass(frozen=True)
class Batching:
    """Records, and how they become batches.

    Attributes:
        records: The dataset that is batched.
        by_record: How its records are cut.
        num_epochs: How many epochs of them are one pass.
        drop_remainder: Whether ``.batch`` drops what does not fill a batch.
        above: What follows the batching and is part of the fingerprint.
        epoch_below: From an epoch to that of the records; None if it is the same.
        sliced: If a slice was taken of the batches, how many there are, and from the index of one
            to that before the slice. No batch can begin at any other record then.
    """

    records: grain.MapDataset
    by_record: Cuts
    num_epochs: int = 1
    drop_remainder: bool = False
    above: tuple[grain.MapDataset, ...] = ()
    epoch_below: Callable[[int], int] | None = None
    sliced: tuple[int, Callable[[int], int]] | None = None

    @classmethod
    def of(cls, node: nodes.BatchNode, num_batches: int) -> Batching:
        """What Grain's ``.batch`` and what follows it do.

        Args:
            node: What is known of them.
            num_batches: Of the dataset that was asked about.
        """
        drop = node.drop_remainder
        sizes = {0: node.global_batch_size}
        return cls(
            records=node.records,
            by_record=Cuts(len(node.records), sizes, drop_remainder=drop),
            num_epochs=1 if node.num_epochs is None else node.num_epochs,
            drop_remainder=drop,
            above=node.above,
            epoch_below=node.epoch_below,
            sliced=(num_batches, node.batch_index) if node.num_epochs is None else None,
        )

    @property
    def cuts(self) -> Cuts:
        """As `RowReader.cuts`."""
        return self.by_record if self.sliced is None else Cuts(self.sliced[0], {0: 1})

    def cut(self, index: int) -> Cut:
        """What a batch is made of."""
        return self.by_record.cut(index if self.sliced is None else self.sliced[1](index))

    def first_and_count(self, index: int) -> tuple[int, int]:
        """The first record of a batch, as an index of `records`, and how many it has."""
        epoch, record, count, _ = self.cut(index)
        if self.epoch_below is not None and self.sliced is None:
            epoch = self.epoch_below(epoch)
        return epoch * self.by_record.records + record, count

    def fingerprint(self) -> Fingerprint:
        """What a state must agree with, but for the batch size."""
        return records_fingerprint(self.records, self.above, self.drop_remainder)
