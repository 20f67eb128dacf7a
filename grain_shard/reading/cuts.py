"""`Cuts`: which records of an epoch are in which batch, computed from integers alone.

The position of a run is the epoch and the index of the next record. Batch sizes only decide where
the batches after it end. So the batch size may change at any record, and no record is left out or
read twice.
"""

from __future__ import annotations

import functools
import operator
import sys
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple


class Progress(NamedTuple):
    """The position of a run between two batches.

    Attributes:
        step: Number of batches handed out so far.
        epoch: Epoch of the next record, from 0.
        record: Index of the next record within the epoch.
    """

    step: int
    epoch: int
    record: int


START = Progress(0, 0, 0)


class Cut(NamedTuple):
    """The records of one batch.

    Attributes:
        epoch: Epoch of the records.
        record: Index of the first record within the epoch.
        num_records: Number of records; less than `size` at the end of an epoch.
        size: Number of records of a full batch at this step.
        after: The position after this batch.
    """

    epoch: int
    record: int
    num_records: int
    size: int
    after: Progress


@dataclass(frozen=True)
class Cuts:
    """The division of a run's records into batches. No batch has records of two epochs.

    Example:
        >>> cuts = Cuts(10, {0: 4, 2: 3})
        >>> for step in range(4):
        ...     print(cuts.cut(step))
        Cut(epoch=0, record=0, num_records=4, size=4, after=Progress(step=1, epoch=0, record=4))
        Cut(epoch=0, record=4, num_records=4, size=4, after=Progress(step=2, epoch=0, record=8))
        Cut(epoch=0, record=8, num_records=2, size=3, after=Progress(step=3, epoch=1, record=0))
        Cut(epoch=1, record=0, num_records=3, size=3, after=Progress(step=4, epoch=1, record=3))

    Attributes:
        records: Number of records in an epoch.
        sizes_by_step: Maps a step, which is the number of a batch in the run, to the size of full
            batches from that step on. Steps ascend from 0.
        drops_short: True leaves out the short batch at the end of an epoch.
        begin: Position at which the first batch begins. Batches of earlier steps are not made.
    """

    records: int
    sizes_by_step: Mapping[int, int]
    drops_short: bool = False
    begin: Progress = START

    @property
    def sizes(self) -> tuple[int, ...]:
        """All sizes of full batches in the run, each listed once."""
        return tuple(dict.fromkeys(self.sizes_by_step.values()))

    def beginning_at(self, progress: Progress) -> Cuts:
        """Returns cuts with the same sizes at the same steps, which begin at another position."""
        return replace(self, begin=progress)

    @functools.cached_property
    def _stretches(self) -> list[_Stretch]:
        """The parts of the run with one batch size each. The first part begins at `begin`."""
        stretches = list[_Stretch]()
        step_of_first_size = max(step for step in self.sizes_by_step if step <= self.begin.step)
        for step, size in self.sizes_by_step.items():
            if step >= step_of_first_size:
                # A part begins where the last batch of the part before it ends.
                start = stretches[-1].cut(step - 1).after if stretches else self.begin
                stretches.append(_Stretch(self.records, self.drops_short, start, size))
        return stretches

    def cut(self, step: int) -> Cut:
        """Returns the records of the batch with number `step`."""
        after = bisect_right(self._stretches, step, key=operator.attrgetter("start.step"))
        return self._stretches[after - 1].cut(step)

    def progress(self, step: int) -> Progress:
        """Returns the position of a run that has handed out all batches before `step`."""
        return self.begin if step == self.begin.step else self.cut(step - 1).after

    def step_of(self, epoch: int, record: int) -> int:
        """Returns the step whose batch has a given record.

        For a dropped record, returns the step of the next batch. For a record before `begin`,
        returns the first step.
        """
        after = bisect_right(self._stretches, (epoch, record), key=lambda s: s.start[1:])
        return self._stretches[max(0, after - 1)].step_of(epoch, record)

    def steps_before(self, epoch: int) -> int:
        """Returns the number of batches of the run before an epoch begins."""
        return self.step_of(epoch, 0)

    def has_short(self, epochs: int) -> bool:
        """Returns True if a batch of the first `epochs` epochs is short."""
        if self.records == sys.maxsize:  # the length of Grain's endless repeat, which has no end
            return False
        # Only the last batch of an epoch can be short. Two epochs of each stretch are enough: the
        # one in which the stretch begins, and the next one. Further epochs of the stretch have the
        # same batches as that one, up to the epoch in which the following stretch begins.
        examined = {stretch.start.epoch + later for stretch in self._stretches for later in (0, 1)}
        ends = [self.steps_before(epoch + 1) for epoch in examined if epoch < epochs]
        last_batches = [self.cut(step - 1) for step in ends if step > self.begin.step]
        return any(cut.num_records < cut.size for cut in last_batches)


@dataclass
class _Stretch:
    """A part of a run in which the batch size stays the same.

    Its first epoch may begin at any record. All its later epochs are whole and have equal batches.

    Attributes:
        records: Number of records in an epoch.
        drops_short: True leaves out the short batch at the end of an epoch.
        start: Position at which this part begins.
        size: Size of a full batch.
    """

    records: int
    drops_short: bool
    start: Progress
    size: int

    def __post_init__(self) -> None:
        rounding = 0 if self.drops_short else self.size - 1  # a short batch counts, unless dropped
        self._batches_of_first = (self.records - self.start.record + rounding) // self.size
        self._batches_of_whole = (self.records + rounding) // self.size

    def cut(self, step: int) -> Cut:
        epoch, record, batch = self.start.epoch, self.start.record, step - self.start.step
        # A batch number may be negative, because a slice may count from the end.
        if not 0 <= batch < self._batches_of_first:
            whole_epochs, batch = divmod(batch - self._batches_of_first, self._batches_of_whole)
            epoch, record = epoch + 1 + whole_epochs, 0
        record += batch * self.size
        stop = min(record + self.size, self.records)
        after = (epoch, stop) if stop < self.records else (epoch + 1, 0)
        return Cut(epoch, record, stop - record, self.size, Progress(step + 1, *after))

    def step_of(self, epoch: int, record: int) -> int:
        later = epoch - self.start.epoch
        if later > 0:
            batch = min(record // self.size, self._batches_of_whole)
            batch += self._batches_of_first + (later - 1) * self._batches_of_whole
        else:
            batch = min(max(0, record - self.start.record) // self.size, self._batches_of_first)
        return self.start.step + batch
