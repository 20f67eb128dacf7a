"""What feeds give to a batch, taken by worker processes, each of which runs some of the feeds.

A worker does for its feeds what `FeedTurns` does for all of them in one process. It sends what they
give to a batch in one element, the rows stacked, since each array travels in shared memory of its
own. It goes on for ever: feeds that have ended give no rows, and the loop's process alone decides
where the batches end.
"""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import cloudpickle
import grain
import jax
import numpy as np

from grain_shard.errors import ShardingError
from grain_shard.feeding.feed_reader import Entry
from grain_shard.feeding.feed_turns import FeedTurns, Piece, row_stacker
from grain_shard.reading.faults import Faults
from grain_shard.reading.stack import RowStacker, Stack
from grain_shard.trees import Batch
from grain_shard.worker_processes import WithNote, WorkerProcesses

OpenTurns = Callable[[Mapping[int, Entry]], FeedTurns]


class FeedWorkers:
    """Takes from each feed what it gives to a batch, as `FeedTurns` does, in worker processes.

    They start with the first batch that is asked for.

    Args:
        open_turns: Called in each worker with its part of the entries.
        entries: Of each feed, where it is to start.
        num_workers: How many processes; no more than feeds are started.
        buffer_size: Batches that may wait or be in the making. Grain keeps four at least.
        faults: Is told what the workers count of reads that fail.
    """

    def __init__(
        self,
        open_turns: OpenTurns,
        entries: Mapping[int, Entry],
        num_workers: int,
        buffer_size: int,
        faults: Faults,
    ):
        self._faults = faults
        self._open_turns, self._entries = open_turns, entries
        self._num_workers, self._buffer_size = min(num_workers, len(entries)), buffer_size
        self._processes: WorkerProcesses | None = None

    def of_one_batch(self) -> list[Piece]:
        """What every feed gives to the next batch. The rows may lie in shared memory."""
        if self._processes is None:
            self._processes = WorkerProcesses(
                _WorkerFeeds(_pickled(self._open_turns), self._entries),
                self._num_workers,
                buffer_size=self._buffer_size * self._num_workers,
            )
        pieces: list[Piece] = []
        for _ in range(self._num_workers):
            rows, (shares, counts) = next(self._processes)
            self._faults.add(counts)
            pieces += _pieces(rows, shares)
        if {piece.feed for piece in pieces} != set(self._entries):
            raise RuntimeError("a worker process has ended, although feeds never do.")
        return sorted(pieces, key=lambda piece: piece.feed)

    def stop(self) -> None:
        """Does nothing: a worker ends once what it is in returns, in ``close``."""

    def close(self) -> None:
        """Ends the processes."""
        if self._processes is not None:
            self._processes.close()


def _pickled(open_turns: OpenTurns) -> bytes:
    try:
        return cloudpickle.dumps(open_turns)
    except Exception as error:
        raise ShardingError(
            f"make_feed cannot be sent to a worker process: {type(error).__name__}: {error}.",
            remedy="open files, connections and locks inside make_feed, which runs in the worker,"
            " instead of referring to them from it.",
        ) from error


def _pieces(stacked: Batch | None, shares: Sequence[tuple[int, int, bytes]]) -> Iterator[Piece]:
    """Takes the rows of a worker's feeds apart; a row is a view.

    Args:
        stacked: The rows, one feed after the other; None if there is none.
        shares: Of each feed: its number, how many of the rows it gave, and its state after them.
    """
    leaves, structure = jax.tree.flatten(stacked)
    columns = [np.asarray(leaf) for leaf in leaves]
    start = 0
    for feed, count, entry in shares:
        rows = range(start, start + count)
        yield Piece(feed, [structure.unflatten(c[i] for c in columns) for i in rows], entry)
        start += count


class _WorkerFeeds(grain.IterDataset):
    """What feeds give to one batch after the other.

    Args:
        open_turns: What takes it from them, pickled.
        entries: Of each feed, where it is to start.
    """

    def __init__(self, open_turns: bytes, entries: Mapping[int, Entry]):
        super().__init__()
        self._open_turns, self._entries = open_turns, entries

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Called by Grain, in the worker, with its share."""
        feeds = list(self._entries)[sl]
        self._entries = {feed: self._entries[feed] for feed in feeds}

    def __iter__(self) -> _WorkerFeedsIterator:
        return _WorkerFeedsIterator(self._open_turns, self._entries)


class _WorkerFeedsIterator(grain.DatasetIterator):
    """Opens the feeds with the first element: Grain makes an iterator in the loop's process, too.

    It has no state, since each element says where its feeds stand.
    """

    def __init__(self, open_turns: bytes, entries: Mapping[int, Entry]):
        super().__init__()
        self._open_turns, self._entries = open_turns, entries
        self._turns: FeedTurns | None = None
        self._stacker: RowStacker | None = None

    def __next__(self) -> WithNote:
        self._turns = self._turns or self._opened()
        pieces = self._turns.of_one_batch()
        feeds = [piece.feed for piece in pieces for _ in piece.rows]
        rows = [row for piece in pieces for row in piece.rows]
        stacked = None
        if rows:
            self._stacker = self._stacker or row_stacker(rows[0])
            stack = Stack(self._stacker, len(rows))
            stack.write(rows, 0, feeds)
            stacked = stack.batch()
        shares = [(piece.feed, len(piece.rows), piece.entry) for piece in pieces]
        return WithNote.of(stacked, (shares, self._turns.faults.taken()))

    def _opened(self) -> FeedTurns:
        turns: FeedTurns = pickle.loads(self._open_turns)(self._entries)
        weakref.finalize(self, turns.close)  # Grain closes no iterator in a worker
        return turns

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass
