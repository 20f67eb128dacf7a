"""The feeds' turns, one feed after the other, in this process or in worker processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping

from grain_shard.feeding.feed_reader import FeedReader, FeedState, FeedStreams, FeedTurn
from grain_shard.feeding.shared_reads import SharedReads
from grain_shard.reading.faults import FaultCounts, Faults
from grain_shard.tasks import Producer
from grain_shard.worker_processes import WorkerProcesses


class FeedTurns(Producer[list[FeedTurn]]):
    """Takes the next turn of every feed. It has no end: a feed that has ended gives no rows.

    Args:
        feeds: The feeds of all hosts.
        faults: Decides on records that cannot be read, and counts them.
        rows_per_feed: Rows of a turn.
        num_threads: Threads that read ahead for the feeds; None finds their number.
        feed_states: The feeds to run, in the order of their rows, and their states at the start.
    """

    def __init__(
        self,
        feeds: FeedStreams,
        faults: Faults,
        rows_per_feed: int,
        num_threads: int | None,
        feed_states: Mapping[int, FeedState],
    ):
        self._rows_per_feed = rows_per_feed
        self._reads = SharedReads(faults, rows_per_feed * len(feed_states), num_threads)
        self._readers = [
            FeedReader(feeds, feed, at, self._reads) for feed, at in feed_states.items()
        ]

    def __next__(self) -> list[FeedTurn]:
        turns = [reader.turn(self._rows_per_feed) for reader in self._readers]
        for row in (turn.rows[0] for turn in turns if turn.rows):
            self._reads.learn_row(row)
            break
        return turns

    def stop(self) -> None:
        self._reads.stop()

    def __del__(self) -> None:
        if hasattr(self, "_reads"):  # `__init__` came so far
            self.stop()  # the threads refer to the reads, not to this object

    def close(self) -> None:
        """Closes the feeds, each of them also if closing another one fails."""
        self._reads.stop()  # first, because a feed may wait for it
        failed: BaseException | None = None
        # No name of a module, because the interpreter's exit may have cleared it.
        for close in (self._reads.close, *(reader.close for reader in self._readers)):
            try:
                close()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed


OpenTurns = Callable[[Mapping[int, FeedState]], FeedTurns]


class FeedWorkers(WorkerProcesses):
    """Takes the next turn of every feed, as `FeedTurns` does, in worker processes.

    The processes start with the first ``next``. The rows of a turn may lie in shared memory.

    Args:
        open_turns: Opens the turns of a worker's feeds, in the worker.
        faults: Adds up the workers' counts of reads that failed. Each worker counts in a copy,
            which is pickled together with `open_turns`.
        feed_states: The feeds to run, and their states at the start.
        num_workers: Number of processes; no more are started than there are feeds.
        buffer_size: Most batches that wait or are unfinished. Grain keeps at least four.
    """

    def __init__(
        self,
        open_turns: OpenTurns,
        faults: Faults,
        feed_states: Mapping[int, FeedState],
        num_workers: int,
        buffer_size: int,
    ):
        self._faults, self._num_workers = faults, min(num_workers, len(feed_states))
        of_worker = functools.partial(_turns_of_worker, open_turns, faults, feed_states)
        super().__init__(of_worker, self._num_workers, buffer_size=buffer_size * self._num_workers)

    def __next__(self) -> list[FeedTurn]:
        turns: list[FeedTurn] = []
        for _ in range(self._num_workers):
            of_worker, counts = super().__next__()
            self._faults.add(counts)
            turns += of_worker
        return sorted(turns, key=lambda turn: turn.feed)


def _turns_of_worker(
    open_turns: OpenTurns,
    faults: Faults,
    feed_states: Mapping[int, FeedState],
    worker: int,
    num_workers: int,
) -> Iterator[tuple[list[FeedTurn], FaultCounts]]:
    """Yields the turns of some feeds in a worker, with the counts of reads that failed."""
    feeds = list(feed_states)[worker::num_workers]
    with contextlib.closing(open_turns({feed: feed_states[feed] for feed in feeds})) as turns:
        while True:
            yield next(turns), faults.taken()
