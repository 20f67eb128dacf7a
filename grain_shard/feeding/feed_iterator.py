"""The batches of feeds, one after the other, in this process or from workers."""

from __future__ import annotations

import functools
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from grain_shard.feeding.feed_position import FeedsPosition
from grain_shard.feeding.feed_reader import Entry
from grain_shard.feeding.feed_rows import FeedRows
from grain_shard.feeding.feed_turns import FeedTurns, Piece, row_stacker
from grain_shard.feeding.feed_workers import FeedWorkers
from grain_shard.reading.faults import FaultCounts, FaultRules, Faults
from grain_shard.reading.fingerprint import Fingerprint
from grain_shard.reading.stack import RowStacker
from grain_shard.reading.stream_dataset import BatchIterator
from grain_shard.spans import BATCH, span
from grain_shard.trees import Batch


class FeedIterator(BatchIterator):
    """The batches of feeds.

    Args:
        rows: Which rows each feed gives.
        open_turns: From what becomes of records that cannot be had, and where each feed is to
            start, to what takes from the feeds.
        fingerprint: Tells what a state must agree with; called where there is a state.
        num_workers: Worker processes that run the feeds; 0 for none.
        buffer_size: Batches that these make ahead. Grain lets them make four at least.
        fault_rules: What becomes of reads that fail.
    """

    def __init__(
        self,
        rows: FeedRows,
        open_turns: Callable[[Faults, Mapping[int, Entry]], FeedTurns],
        fingerprint: Callable[[], Fingerprint],
        *,
        num_workers: int,
        buffer_size: int,
        fault_rules: FaultRules,
    ):
        super().__init__()
        self._rows, self._open_turns, self._fingerprint = rows, open_turns, fingerprint
        self._fault_rules = fault_rules
        self._num_workers, self._buffer_size = num_workers, buffer_size
        self._stacker: RowStacker | None = None
        self._is_closed = self._ended = False
        self._failure: BaseException | None = None
        self._position = FeedsPosition.at_start(rows.by_feed)
        self._turns = self._turns_from(self._position)

    def _turns_from(self, position: FeedsPosition) -> FeedTurns | FeedWorkers:
        entries = position.opened()
        self._faults = Faults(self._fault_rules)
        open_turns = functools.partial(self._open_turns, self._faults)
        if self._num_workers:
            workers, buffer_size = self._num_workers, self._buffer_size
            return FeedWorkers(open_turns, entries, workers, buffer_size, self._faults)
        return open_turns(entries)

    def _move(self, position: FeedsPosition) -> None:
        # Moved also if closing what was open fails: a closed feed would begin anew.
        before, self._turns = self._turns, self._turns_from(position)
        self._position, self._ended, self._failure = position, False, None
        before.close()

    def __next__(self) -> Batch:
        self._require_open()
        if self._ended:
            raise StopIteration
        if self._failure is not None:
            raise self._failure
        try:
            pieces = self._turns.of_one_batch()
            self._ended = self._rows.end_with(pieces)
            batch = None if self._ended else self._joined(pieces)
        except Exception as error:
            # The feeds have given their rows already: a next batch would lack them.
            self._failure = error
            raise
        if self._ended:
            raise StopIteration
        entries = {piece.feed: piece.entry for piece in pieces}
        self._position = FeedsPosition(self._position.step + 1, entries)
        return batch

    def _joined(self, pieces: Sequence[Piece]) -> Batch:
        with span(BATCH):
            rows = (row for piece in pieces for row in piece.rows)
            self._stacker = self._stacker or row_stacker(next(rows))
            return self._rows.join(pieces, self._stacker)

    def faults(self) -> FaultCounts:
        """What was counted of reads that failed."""
        return self._faults.counts()

    def position(self) -> bytes:
        return pickle.dumps(self._position)

    def go_to(self, position: bytes) -> None:
        self._move(pickle.loads(position))

    def get_state(self) -> dict[str, Any]:
        return self._position.to_state(self._fingerprint())

    def set_state(self, state: dict[str, Any]) -> None:
        self._require_open()
        self._move(FeedsPosition.of_state(state, self._fingerprint(), self._rows.by_feed))

    def stop(self) -> None:
        self._turns.stop()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._turns.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise ValueError("this is a closed iterator; make another by iter(ds).")
