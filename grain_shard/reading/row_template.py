"""`RowTemplate`: the structure of the rows of a pipeline, learned from the first row read."""

from __future__ import annotations

import threading
from typing import Any

import grain
import numpy as np

from grain_shard.errors import BadRecordsError, describe_error
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import NEVER, route
from grain_shard.reading.faults import Faults
from grain_shard.reading.stack import RowStacker

# The most records to try, if the first ones are unreadable, to learn the structure of all.
_MOST_LOOKED_AT = 1000
# Held while one record is read to learn the structure of all. It is no attribute of a template,
# because templates are pickled for worker processes, and locks cannot be pickled.
_LEARNING = threading.Lock()


# A row that was read already, and its record.
Known = tuple[Any, int]


class RowTemplate:
    """The records of a pipeline, and the structure of their rows once one was read.

    Args:
        records: The dataset that is batched.

    Attributes:
        rows_at_a_time: The most rows to make before they are written; 1 before one was read.
    """

    def __init__(self, records: grain.MapDataset):
        self.records: grain.MapDataset = records
        self.rows_at_a_time: int = 1
        self._stacker: RowStacker | None = None

    def stacker(self, faults: Faults, known: Known | None = None) -> RowStacker:
        """Returns a stacker for rows with the structure of the first row ever read.

        Args:
            faults: The rules for failed reads, if a record must be read.
            known: A row that was read already, which may be the first, and its record.
        """
        if self._stacker is None:
            with _LEARNING:
                if self._stacker is None:
                    row, record = known or self._first(faults)
                    stacker = RowStacker(row, "record {}", record)
                    self._stacker, self.rows_at_a_time = stacker, stacker.rows_at_a_time
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
