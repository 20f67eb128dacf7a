"""`FeedSample`: rows of a batch of feeds, which new streams of the same feeds read again."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import grain

from grain_shard.errors import describe_error
from grain_shard.reading.faults import FaultRules, Faults
from grain_shard.reading.row_values import NO_ROW, Row
from grain_shard.reading.sample import THREAD, Sample
from grain_shard.reading.transient import is_transient
from grain_shard.streams.feed_rows import FeedRows
from grain_shard.streams.position import StreamsPosition
from grain_shard.streams.streams import Turn
from grain_shard.streams.turns import Turns, TurnSettings
from grain_shard.threads.background import Background, in_background

# Most rows of a feed to read again.
_ROWS = 4
# The longest wait in seconds for the rows of a feed. A shuffle may read many records before its
# first row, and a filter that no row passes may read without an end.
_LONGEST_S = 5.0


class FeedSample(Sample):
    """The first rows of each feed in a batch. An index of the sample is a row of the host's batch.

    Args:
        plan: The rows of a batch that come from each feed.
        rules: The rules for failed reads.
        position: The position before the batch.
    """

    def __init__(self, plan: FeedRows, rules: FaultRules, position: StreamsPosition):
        self._places: dict[int, tuple[int, int]] = {}  # by row: the feed, and the row of the feed
        start = 0
        for feed, kept in plan.by_feed.items():
            self._places |= {start + n: (feed, row) for n, row in enumerate(kept[:_ROWS])}
            start += len(kept)
        mask_key = None if plan.padding is None else plan.padding.mask_key
        no_records = grain.MapDataset.range(0)  # because no index of a record is known
        super().__init__(no_records, list(self._places), list(self._places), mask_key)
        self._streams, self._rules, self._position = plan.streams, rules, position
        self._stage: Background[list[Any]] | None = None

    def alone(self, records: Iterable[int]) -> Iterator[tuple[int, Row | None]]:
        of_feeds = collections.defaultdict[int, list[int]](list)
        for record in records:
            of_feeds[self._places[record][0]].append(record)
        states = self._position.states()
        for feed, wanted in of_feeds.items():
            places = {record: self._places[record][1] for record in wanted}
            # Without a mask, the batch does not show which of its rows are padding.
            rows, missing = list[Any](), None if self._mask_key is None else NO_ROW
            try:
                rows = self._rows_of({feed: states[feed]}, 1 + max(places.values()))
            except StopIteration:  # stopped, or too late
                missing = None
            except Exception as error:
                missing = None if is_transient(error) else Row.lost(describe_error(error))
            for record, row in places.items():
                yield record, Row.of(rows[row]) if row < len(rows) else missing

    def _rows_of(self, state: Mapping[int, Any], count: int) -> list[Any]:
        """Reads the first rows of a new stream of a feed.

        Args:
            state: The number of the feed, and the state of its stream.
            count: Number of rows.

        Raises:
            StopIteration: The sample was stopped, or the rows took too long.
            Exception: The feed raised it.
        """
        settings = TurnSettings(self._streams, count, Faults(self._rules, is_worker=True))
        turns = Turns(settings, state)
        # In a thread of its own, because the feed may never give a row.
        self._stage = stage = in_background(_rows, turns, buffer_size=1, name=THREAD)
        try:
            if self.is_stopped or not stage.wait_for(lambda: stage.known().results > 0, _LONGEST_S):
                raise StopIteration
            return next(stage)
        finally:
            with contextlib.suppress(Exception):  # the feeds that run raise it when they are closed
                stage.close()

    def stop(self) -> None:
        super().stop()
        if self._stage is not None:
            self._stage.stop()

    def name(self, record: int) -> str:
        feed, row = self._places[record]
        return f"row {row} of feed {feed}"


def _rows(turns: list[Turn]) -> list[Any]:
    (turn,) = turns
    return turn.rows
