"""How the records of epochs are cut into batches, in integers alone.

A run counts records: where it stands is a record of an epoch. The sizes of batches only say where
the next cuts are, so they may change at any place without a record left out or taken twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a run has come.

    Attributes:
        step: Batches handed out so far.
        epoch: That of the next record.
        record: The next record, counted within the epoch.
    """

    step: int
    epoch: int
    record: int


START = Progress(0, 0, 0)


class Cut(NamedTuple):
    """What a batch is made of.

    Attributes:
        epoch: That of its records.
        record: The first of them, counted within the epoch.
        num_records: How many there are; fewer than `size` at the end of an epoch.
        size: How many a full batch has here.
    """

    epoch: int
    record: int
    num_records: int
    size: int


class Cuts:
    """The batches of a run. None has records of two epochs.

    Example:
        >>> cuts = Cuts(10, {0: 4, 2: 3})
        >>> for step in range(4):
        ...     print(cuts.cut(step))
        Cut(epoch=0, record=0, num_records=4, size=4)
        Cut(epoch=0, record=4, num_records=4, size=4)
        Cut(epoch=0, record=8, num_records=2, size=3)
        Cut(epoch=1, record=0, num_records=3, size=3)

    Args:
        records: How many an epoch has.
        sizes: From a step to the size of a full batch from there on; ascending, from step 0.
        drop_remainder: Whether what does not fill a batch at the end of an epoch is left out.
        begin: Where the first batch begins, whatever the sizes were before.
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
        """All sizes of full batches, each once."""
        return tuple(dict.fromkeys(self.sizes_by_step.values()))

    def beginning_at(self, progress: Progress) -> Cuts:
        """The same sizes from the same steps on, with the first cut there."""
        drop_remainder = self.drop_remainder
        return Cuts(self.records, self.sizes_by_step, drop_remainder=drop_remainder, begin=progress)

    def dropping_remainder(self) -> Cuts:
        """The same, with full batches only."""
        return Cuts(self.records, self.sizes_by_step, drop_remainder=True, begin=self.begin)

    def cut(self, step: int) -> Cut:
        """What the batch of a step is made of."""
        return self._stretch_at(step).cut(step)

    def progress(self, step: int) -> Progress:
        """How far a run has come before a step: to the record behind the last one handed out."""
        if step == self.begin.step:
            return self.begin
        last = self.cut(step - 1)
        record = last.record + last.num_records
        if record == self.records:
            return Progress(step, last.epoch + 1, 0)
        return Progress(step, last.epoch, record)

    def step_of(self, epoch: int, record: int) -> int:
        """The step whose batch has a record; if that is dropped, the step after it."""
        after = bisect_right(self._stretches, (epoch, record), key=lambda s: s.start[1:])
        return self._stretches[after - 1].step_of(epoch, record)

    def steps_before(self, epoch: int) -> int:
        """How many steps are done when an epoch begins."""
        for stretch, following in zip(self._stretches, self._stretches[1:], strict=False):
            step = stretch.steps_before(epoch)
            if step < following.start.step:
                return step
        return self._stretches[-1].steps_before(epoch)

    def has_short(self, epochs: int) -> bool:
        """Whether a batch of the first epochs is not full."""
        steps = self.steps_before(epochs)
        for stretch in self._stretches:
            # All epochs that end within a stretch end alike, but for the one in which it begins.
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
    """A part of a run in which the size stays the same.

    Args:
        cuts: What it is a part of.
        start: Where it begins.
        size: Of a full batch.
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
