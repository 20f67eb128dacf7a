"""`FeedIterator`: the rows of a feed, with leaves of other libraries converted to arrays.

The functions of the feed get the leaves as they are, so they are converted last. A record whose
leaves cannot be converted counts as unreadable, just as if reading it had failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import grain

from grain_shard.errors import Raised
from grain_shard.grain_inside.nodes import before_rows
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.reading.faults import Faults
from grain_shard.reading.record_reads import RecordReads
from grain_shard.reading.row_arrays import read_arrays


class FeedIterator(grain.DatasetIterator):
    """An iterator over the rows of a feed, with the state of the feed's own iterator.

    Args:
        feed: The feed.
        streams: The streams of records of which the feed is made; see `record_stream`.
        faults: The rules for failed reads.
    """

    def __init__(
        self, feed: grain.IterDataset, streams: Sequence[grain.IterDataset], faults: Faults
    ):
        super().__init__()
        self._rows, self._faults = iter(feed), faults
        below = before_rows(feed)
        records = [stream.parents[0] for stream in streams if stream is below]
        self._records = cast(RecordReads, records[0]) if records else None

    def __next__(self) -> Any:
        while True:
            row = read_arrays(next(self._rows), self._faults)
            if type(row) is not Unreadable:
                return row
            # Without `_records` it is unknown which record is in the row, as in a feed that packs.
            if self._records is None:
                Raised.of(row.error).throw()
            self._records.leave_out(row, self._rows.get_state()["next_index"] - 1)

    def get_state(self) -> dict[str, Any]:
        return self._rows.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._rows.set_state(state)

    def close(self) -> None:
        self._rows.close()
        super().close()
