"""The records of a `grain.MapDataset` as a stream, found many at a time.

A record is found by following its index down the pipeline, through shuffles, slices and repeats, to
the source. Grain does that for each record, and it takes longer than most of the steps after it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside.recovery import AT_ONCE, Recovery, Unreadable
from grain_shard.grain_inside.routes import route
from grain_shard.reading.faults import Skipped
from grain_shard.reading.origin import Origin, record_name
from grain_shard.tasks import Raised

# How many records are found in one go, at first and at most. To find them takes microseconds. But a
# source that reads many in a call reads them all at once, and the first rows must not wait for it.
_FOUND, _READ_IN_A_CALL = (64, 1024), (4, 256)

# Yields the records of a dataset from an index on, one after the other.
Elements = Callable[[grain.MapDataset, int], Generator[Any]]


def evaluated_in_turn(
    records: grain.MapDataset, start: int, faults: Recovery = AT_ONCE
) -> Generator[Any]:
    """Evaluates records when they are asked for, and not before.

    Only a source that reads many records in one call reads them ahead.
    """
    reads_many = route(records, np.arange(0)).reads_many
    count, most = _READ_IN_A_CALL if reads_many else _FOUND
    while start < len(records):
        stop = min(start + count, len(records))
        for element in route(records, np.arange(start, stop)).each(faults):
            yield element
            start += 1
        count = min(2 * count, most)


class RecordStream(grain.IterDataset):
    """Yields the elements of Grain's ``.to_iter_dataset()``, in less time.

    Args:
        records: The records.
        elements: Evaluates them.
        skipped: Counts unreadable records, which are skipped; None if an unreadable record is an
            error.
    """

    def __init__(
        self,
        records: grain.MapDataset,
        elements: Elements = evaluated_in_turn,
        skipped: Skipped | None = None,
    ):
        super().__init__(records)
        self.records, self.elements, self.skipped = records, elements, skipped

    def __iter__(self) -> RecordIterator:
        return RecordIterator(self)


class RecordIterator(grain.DatasetIterator):
    """Iterates over records; its state is the state of Grain's iterator."""

    def __init__(self, stream: RecordStream):
        super().__init__()
        self._stream, self._length, self._next_index = stream, len(stream.records), 0
        self._next_elements: Generator[Any] | None = None  # from the next index on

    def __next__(self) -> Any:
        records, skipped = self._stream.records, self._stream.skipped
        while self._next_index < self._length:
            if self._next_elements is None:
                self._next_elements = self._stream.elements(records, self._next_index)
            element = None
            try:
                element = next(self._next_elements)
                if type(element) is Unreadable and (
                    skipped is None or not skipped.may_skip(element)
                ):
                    Raised.of(element.error).throw()  # a StopIteration would pass for the end
            except BaseException as error:
                self._next_elements = None  # whoever asks again gets the same record again
                error.add_note(f"grain_shard: while evaluating {self._name(element)}")
                raise
            self._next_index += 1
            if skipped is not None and skipped.skips(element, records, self._next_index - 1):
                continue
            if element is not None:  # Grain leaves out None, too
                return element
        raise StopIteration

    def _name(self, element: Any) -> str:
        """Returns the name of the next record, whose element is not there or `Unreadable`."""
        origin = Origin.of(self._stream.records, self._next_index)
        name = record_name(self._next_index, "the dataset above .to_iter_dataset", origin)
        among = element.among if type(element) is Unreadable else 1
        return name if among == 1 else f"one of the {among} records from {name} on"

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next_index}

    def set_state(self, state: dict[str, Any]) -> None:
        index = state["next_index"]
        if not 0 <= index <= self._length:
            raise IndexError(f"record {index} of a dataset of {self._length}")
        self._let_go()
        self._next_index = index

    def close(self) -> None:
        self._let_go()
        super().close()

    def _let_go(self) -> None:
        if self._next_elements is not None:
            self._next_elements.close()
            self._next_elements = None
