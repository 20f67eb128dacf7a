"""The records of a `grain.MapDataset` as a stream, found many at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grain
import numpy as np

from grain_shard.grain_inside.routes import route

# The first rows must not wait for many records; after that, so many are found in one go. A source
# that has batched reads is then asked for as many in a call.
_FIRST_RECORDS, _MOST_RECORDS = 4, 256


class RecordStream(grain.IterDataset):
    """Yields what Grain's ``.to_iter_dataset()`` does without threads, for less.

    A record is evaluated when it is asked for, and not before. Only a source that reads many
    records in one call reads them ahead.

    Args:
        records: The records.
    """

    def __init__(self, records: grain.MapDataset):
        super().__init__(records)
        self._records = records

    def __iter__(self) -> RecordIterator:
        return RecordIterator(self._records)


class RecordIterator(grain.DatasetIterator):
    """Iterates over the records; its state is the one of Grain's iterator."""

    def __init__(self, records: grain.MapDataset):
        super().__init__()
        self._records, self._length = records, len(records)
        self._next_index = 0
        self._found: Iterator[Any] = iter(())  # the records from the next index on
        self._at_a_time = _FIRST_RECORDS

    def __next__(self) -> Any:
        while self._next_index < self._length:
            element = self._evaluate()
            self._next_index += 1
            if element is not None:  # as Grain does, which takes None for "filtered out"
                return element
        raise StopIteration

    def _evaluate(self) -> Any:
        """The record at the next index."""
        try:
            for element in self._found:
                return element
            return self._evaluate_first()
        except Exception as error:
            # What was found ends with an error; whoever asks again gets the same record again.
            self._found = iter(())
            error.add_note(
                f"grain_shard: while evaluating record {self._next_index} of the dataset above"
                " .to_iter_dataset"
            )
            raise

    def _evaluate_first(self) -> Any:
        """The record at the next index, with which the next ones are found."""
        count = min(self._at_a_time, self._length - self._next_index)
        self._at_a_time = min(2 * self._at_a_time, _MOST_RECORDS)
        self._found = self._find(count)
        try:
            return next(self._found)
        except Exception:
            if count == 1:
                raise
            # Perhaps it was another record that a batched read has failed for: this one alone.
            self._at_a_time, self._found = 1, iter(())
            return next(self._find(1))

    def _find(self, count: int) -> Iterator[Any]:
        return route(
            self._records, np.arange(self._next_index, self._next_index + count)
        ).each()

    def get_state(self) -> dict[str, Any]:
        return {"next_index": self._next_index}

    def set_state(self, state: dict[str, Any]) -> None:
        if not 0 <= state["next_index"] <= self._length:
            raise IndexError(
                f"the state stands at record {state['next_index']} of a dataset of {self._length}"
            )
        self._next_index, self._found = state["next_index"], iter(())
        self._at_a_time = _FIRST_RECORDS
