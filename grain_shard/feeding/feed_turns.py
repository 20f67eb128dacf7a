"""Reads the rows of all feeds of a host for a batch, in this process or in worker processes."""

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
    """Reads the rows of every feed for the next batch, one feed after the other.

    It never ends: a feed that has ended gives no rows.

    Args:
        feeds: The feeds of all hosts.
        faults: Decides on records that cannot be read, and counts them.
        rows_per_feed: Number of rows that each feed gives to a batch.
        num_threads: Number of threads that read ahead for all feeds together. None adapts the
            number while they read.
        feed_states: The state from which each feed starts, by the feed's number. Only these feeds
            run, in this order.
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
        num_feeds = len(feed_states)
        self._reads = SharedReads(faults, rows_per_feed * num_feeds, num_threads, num_feeds)
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
        if hasattr(self, "_reads"):  # False if `__init__` failed before it made the reads
            self.stop()  # the threads do not refer to this object, so they would run on

    def close(self) -> None:
        """Closes all feeds. If one feed cannot be closed, the other feeds are closed nevertheless.

        Raises:
            BaseException: The first error of closing.
        """
        self._reads.stop()  # first, because a feed may wait for records from it
        failed: BaseException | None = None
        # This loop uses no name of a module: at the interpreter's exit the names may be gone.
        for close in (self._reads.close, *(reader.close for reader in self._readers)):
            try:
                close()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed


OpenTurns = Callable[[Mapping[int, FeedState]], FeedTurns]


class FeedWorkers(WorkerProcesses):
    """Reads the rows of every feed for the next batch in worker processes.

    Each worker runs some of the feeds. The processes start with the first ``next``. The rows may be
    views of shared memory.

    Args:
        open_turns: Makes the `FeedTurns` of a worker's feeds. It is called in the worker.
        faults: Adds up the failed reads that the workers count. Each worker counts in a copy of its
            own, which is pickled together with `open_turns`.
        feed_states: The state from which each feed starts, by the feed's number.
        num_workers: Number of processes. With fewer feeds than this, each feed has its own process.
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
    """Yields the rows of one worker's feeds, batch by batch, with the new counts of failed reads.

    Args:
        open_turns: Makes the `FeedTurns` of the feeds.
        faults: The worker's copy of the fault counts.
        feed_states: The state from which each feed of the host starts.
        worker: Number of this worker.
        num_workers: Number of workers. Each one runs every `num_workers`-th feed.
    """
    feeds = list(feed_states)[worker::num_workers]
    with contextlib.closing(open_turns({feed: feed_states[feed] for feed in feeds})) as turns:
        while True:
            yield next(turns), faults.taken()
