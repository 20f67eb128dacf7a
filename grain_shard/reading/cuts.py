"""The cuts of epochs' records into batches, as integers.

A run counts records: its position is a record of an epoch. Batch sizes only decide the next cuts,
so they may change at any record, and no record is left out or taken twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple


class Progress(NamedTuple):
    """The position of a run.

    Attributes:
        step: Batches handed out so far.
        epoch: Epoch of the next record.
        record: The next record, counted within the epoch.
    """

    step: int
    epoch: int
    record: int


START = Progress(0, 0, 0)


class Cut(NamedTuple):
    """The records of one batch.

    Attributes:
        epoch: Epoch of the records.
        record: The first record, counted within the epoch.
        num_records: Number of records; less than `size` at the end of an epoch.
        size: Number of records of a full batch at this step.
    """

    epoch: int
    record: int
    num_records: int
    size: int


class Cuts:
    """The batches of a run. No batch has records of two epochs.

    Example:
        >>> cuts = Cuts(10, {0: 4, 2: 3})
        >>> for step in range(4):
        ...     print(cuts.cut(step))
        Cut(epoch=0, record=0, num_records=4, size=4)
        Cut(epoch=0, record=4, num_records=4, size=4)
        Cut(epoch=0, record=8, num_records=2, size=3)
        Cut(epoch=1, record=0, num_records=3, size=3)

    Args:
        records: Records in an epoch.
        sizes: Maps a step to the size of a full batch from that step on; ascending, from step 0.
        drop_remainder: True leaves out the short batch at the end of an epoch.
        begin: Position of the first batch, whatever the sizes were before.
    """

    def __init__(
        self,
        records: int,
        sizes: Mapping[int, int],
        *,
        drop_remainder: bool = False,
        begin: Progress = START,
    ):
        self.records: int = records
        self.drop_remainder: bool = drop_remainder
        self.begin: Progress = begin
        self.sizes_by_step: dict[int, int] = dict(sizes)
        current = sizes[max(step for step in sizes if step <= begin.step)]
        self._stretches = [_Stretch(self, begin, current)]
        for step, size in sizes.items():
            if step > begin.step:
                self._stretches.append(_Stretch(self, self.progress(step), size))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes of full batches, each once."""
        return tuple(dict.fromkeys(self.sizes_by_step.values()))

    def beginning_at(self, progress: Progress) -> Cuts:
        """Returns the same sizes at the same steps, with the first cut at this position."""
        drop_remainder = self.drop_remainder
        return Cuts(self.records, self.sizes_by_step, drop_remainder=drop_remainder, begin=progress)

    def dropping_remainder(self) -> Cuts:
        """Returns the same cuts, without short batches."""
        return Cuts(self.records, self.sizes_by_step, drop_remainder=True, begin=self.begin)

    def cut(self, step: int) -> Cut:
        """Returns the records of the batch of a step."""
        return self._stretch_at(step).cut(step)

    def progress(self, step: int) -> Progress:
        """Returns the position before a step: the record after the last one handed out."""
        if step == self.begin.step:
            return self.begin
        last = self.cut(step - 1)
        record = last.record + last.num_records
        if record == self.records:
            return Progress(step, last.epoch + 1, 0)
        return Progress(step, last.epoch, record)

    def step_of(self, epoch: int, record: int) -> int:
        """Returns the step whose batch has a record; for a dropped record, the step after it."""
        after = bisect_right(self._stretches, (epoch, record), key=lambda s: s.start[1:])
        return self._stretches[after - 1].step_of(epoch, record)

    def steps_before(self, epoch: int) -> int:
        """Returns the number of steps done when an epoch begins."""
        for stretch, following in zip(self._stretches, self._stretches[1:], strict=False):
            step = stretch.steps_before(epoch)
            if step < following.start.step:
                return step
        return self._stretches[-1].steps_before(epoch)

    def has_short(self, epochs: int) -> bool:
        """Returns True if a batch of the first `epochs` epochs is short."""
        steps = self.steps_before(epochs)
        for stretch in self._stretches:
            # Epochs that end within a stretch end alike, except the one in which it begins.
            for following in (stretch.start.epoch + 1, stretch.start.epoch + 2):
                last = stretch.steps_before(following) - 1
                if stretch.start.step <= last < steps and self._stretch_at(last) is stretch:
                    cut = stretch.cut(last)
                    if cut.num_records < cut.size:
                        return True
        return False

    def _stretch_at(self, step: int) -> _Stretch:
        return self._stretches[bisect_right(self._stretches, step, key=lambda s: s.start.step) - 1]


class _Stretch:
    """A part of a run in which the batch size stays the same.

    Args:
        cuts: The cuts of the whole run.
        start: Position at which the stretch begins.
        size: Size of a full batch.
    """

    def __init__(self, cuts: Cuts, start: Progress, size: int):
        self.start, self._size = start, size
        self._records, self._drop = cuts.records, cuts.drop_remainder
        self._first_epoch = self._batches(cuts.records - start.record)
        self._each_epoch = self._batches(cuts.records)

    def _batches(self, records: int) -> int:
        return records // self._size if self._drop else -(-records // self._size)

    def cut(self, step: int) -> Cut:
        epoch, record, batch = self.start.epoch, self.start.record, step - self.start.step
        if not 0 <= batch < self._first_epoch:
            later, batch = divmod(batch - self._first_epoch, self._each_epoch)
            epoch, record = epoch + 1 + later, 0
        record += batch * self._size
        return Cut(epoch, record, min(self._size, self._records - record), self._size)

    def step_of(self, epoch: int, record: int) -> int:
        if epoch == self.start.epoch:
            batch = (record - self.start.record) // self._size
            return self.start.step + min(batch, self._first_epoch)
        return self.steps_before(epoch) + min(record // self._size, self._each_epoch)

    def steps_before(self, epoch: int) -> int:
        later = epoch - self.start.epoch - 1
        if later < 0:
            return self.start.step
        return self.start.step + self._first_epoch + later * self._each_epoch
