"""The feeds' turns, taken by worker processes, each of which runs some of the feeds.

A worker runs its feeds by `FeedTurns`. It sends their turns of a batch as one element, the rows
stacked, because each array travels in shared memory of its own. It never ends by itself: feeds that
have ended give no rows, and the loop's process alone decides where the batches end.
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
from grain_shard.feeding.feed_rows import row_stacker
from grain_shard.feeding.feed_streams import FeedState, FeedTurn
from grain_shard.feeding.feed_turns import FeedTurns
from grain_shard.reading.faults import Faults
from grain_shard.reading.stack import RowStacker, Stack
from grain_shard.trees import Batch
from grain_shard.worker_processes import WithNote, WorkerProcesses

OpenTurns = Callable[[Mapping[int, FeedState]], FeedTurns]


class FeedWorkers:
    """Takes a turn of each feed for a batch, as `FeedTurns` does, in worker processes.

    They start with the first batch that is asked for.

    Args:
        open_turns: Opens the turns of a worker's feeds, in the worker.
        feed_states: The feeds to run, and their states at the start.
        num_workers: The number of processes; no more are started than there are feeds.
        buffer_size: Batches that may wait or be in the making. Grain keeps four at least.
        faults: Adds up the workers' counts of reads that failed. Pickled with `open_turns`, if that
            refers to it, it counts for itself in each worker.
    """

    def __init__(
        self,
        open_turns: OpenTurns,
        feed_states: Mapping[int, FeedState],
        num_workers: int,
        buffer_size: int,
        faults: Faults,
    ):
        self._faults = faults
        self._open_turns, self._feed_states = open_turns, feed_states
        self._num_workers, self._buffer_size = min(num_workers, len(feed_states)), buffer_size
        self._processes: WorkerProcesses | None = None

    def of_one_batch(self) -> list[FeedTurn]:
        """Returns the next turn of every feed. The rows may lie in shared memory."""
        if self._processes is None:
            self._processes = WorkerProcesses(
                _WorkerFeeds(_pickled(self._open_turns, self._faults), self._feed_states),
                self._num_workers,
                buffer_size=self._buffer_size * self._num_workers,
            )
        turns: list[FeedTurn] = []
        for _ in range(self._num_workers):
            rows, (shares, counts) = next(self._processes)
            self._faults.add(counts)
            turns += _turns(rows, shares)
        if {turn.feed for turn in turns} != set(self._feed_states):
            raise RuntimeError("a worker process has ended, although feeds never do.")
        return sorted(turns, key=lambda turn: turn.feed)

    def stop(self) -> None:
        """Does nothing: a worker ends in ``close``, once the user's code that it runs returns."""

    def close(self) -> None:
        """Ends the processes."""
        if self._processes is not None:
            self._processes.close()


def _pickled(open_turns: OpenTurns, faults: Faults) -> bytes:
    try:
        return cloudpickle.dumps((open_turns, faults))
    except Exception as error:
        raise ShardingError(
            f"make_feed cannot be sent to a worker process: {type(error).__name__}: {error}.",
            remedy="open files, connections and locks inside make_feed, which runs in the worker,"
            " instead of referring to them from it.",
        ) from error


def _turns(stacked: Batch | None, shares: Sequence[tuple[int, int, bytes]]) -> Iterator[FeedTurn]:
    """Takes the rows of a worker's feeds apart; a row is a view.

    Args:
        stacked: The rows, one feed after the other; None if there is none.
        shares: Each feed's number, its number of rows, and its state after them.
    """
    leaves, structure = jax.tree.flatten(stacked)
    columns = [np.asarray(leaf) for leaf in leaves]
    start = 0
    for feed, count, feed_state in shares:
        rows = range(start, start + count)
        yield FeedTurn(feed, [structure.unflatten(c[i] for c in columns) for i in rows], feed_state)
        start += count


class _WorkerFeeds(grain.IterDataset):
    """The turns of some feeds, one batch after the other.

    Args:
        open_turns: Opens them, pickled, and the counts of reads that fail.
        feed_states: The feeds to run, and their states at the start.
    """

    def __init__(self, open_turns: bytes, feed_states: Mapping[int, FeedState]):
        super().__init__()
        self._open_turns, self._feed_states = open_turns, feed_states

    def set_slice(self, sl: slice, sequential_slice: bool = False) -> None:
        """Called by Grain, in the worker, with its share."""
        feeds = list(self._feed_states)[sl]
        self._feed_states = {feed: self._feed_states[feed] for feed in feeds}

    def __iter__(self) -> _WorkerFeedsIterator:
        return _WorkerFeedsIterator(self._open_turns, self._feed_states)


class _WorkerFeedsIterator(grain.DatasetIterator):
    """Opens the feeds with the first element: Grain makes an iterator in the loop's process, too.

    It has no state, because each element holds the states of its feeds.
    """

    def __init__(self, open_turns: bytes, feed_states: Mapping[int, FeedState]):
        super().__init__()
        self._open_turns, self._feed_states = open_turns, feed_states
        self._turns: FeedTurns | None = None
        self._stacker: RowStacker | None = None

    def __next__(self) -> WithNote:
        if self._turns is None:
            self._turns = self._opened()
        turns, stacked = self._turns.of_one_batch(), None
        rows = [row for turn in turns for row in turn.rows]
        if rows:
            feeds = [turn.feed for turn in turns for _ in turn.rows]
            self._stacker = self._stacker or row_stacker(rows[0], feeds[0])
            stack = Stack(self._stacker, len(rows))
            stack.write(rows, 0, feeds)
            stacked = stack.batch()
        shares = [(turn.feed, len(turn.rows), turn.feed_state) for turn in turns]
        return WithNote.of(stacked, (shares, self._faults.taken()))

    def _opened(self) -> FeedTurns:
        open_turns, self._faults = pickle.loads(self._open_turns)
        turns: FeedTurns = open_turns(self._feed_states)
        weakref.finalize(self, turns.close)  # Grain closes no iterator in a worker
        return turns

    def get_state(self) -> dict[str, Any]:
        return {}

    def set_state(self, state: dict[str, Any]) -> None:
        pass
