"""Reads the rows of all feeds of a host for a batch, in this process or in worker processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grain_shard.feeding.feed_reader import FeedReader, FeedState, FeedStreams, FeedTurn
from grain_shard.reading.faults import FaultCounts, Faults
from grain_shard.reading.shared_reads import SharedReads
from grain_shard.threads.tasks import Producer
from grain_shard.threads.worker_processes import WorkerProcesses


@dataclass(frozen=True)
class TurnSettings:
    """The settings with which rows are taken from feeds, in this process or in a worker process.

    Attributes:
        feeds: The feeds of all hosts.
        rows_per_feed: Number of rows that each feed gives to a batch.
        num_threads: Number of threads that read ahead for all feeds of the process together. None
            adapts the number while they read.
        faults: Decides on records that cannot be read, and counts them.
    """

    feeds: FeedStreams
    rows_per_feed: int
    num_threads: int | None
    faults: Faults


class FeedTurns(Producer[list[FeedTurn]]):
    """Reads the rows of every feed for the next batch, one feed after the other.

    It never ends: a feed that has ended gives no rows.

    Args:
        settings: The settings of the feeds.
        feed_states: The state from which each feed starts, by the feed's number. Only these feeds
            run, in this order.
    """

    def __init__(self, settings: TurnSettings, feed_states: Mapping[int, FeedState]):
        self._rows_per_feed, num_feeds = settings.rows_per_feed, len(feed_states)
        num_rows = settings.rows_per_feed * num_feeds
        self._reads = SharedReads(settings.faults, num_rows, settings.num_threads, num_feeds)
        self._readers = [
            FeedReader(settings.feeds, feed, at, self._reads) for feed, at in feed_states.items()
        ]

    def __next__(self) -> list[FeedTurn]:
        return [reader.turn(self._rows_per_feed) for reader in self._readers]

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


class FeedWorkers(WorkerProcesses):
    """Reads the rows of every feed for the next batch in worker processes.

    Each worker runs some of the feeds. The processes start with the first ``next``. The rows may be
    views of shared memory.

    Args:
        settings: The settings of the feeds. `settings.faults` adds up the failed reads that the
            workers count. Each worker gets a pickled copy, and counts in it.
        feed_states: The state from which each feed starts, by the feed's number.
        num_workers: Number of processes. With fewer feeds than this, each feed has its own process.
        buffer_size: Most batches that wait or are unfinished. Grain keeps at least four.
    """

    def __init__(
        self,
        settings: TurnSettings,
        feed_states: Mapping[int, FeedState],
        num_workers: int,
        buffer_size: int,
    ):
        self._faults, self._num_workers = settings.faults, min(num_workers, len(feed_states))
        of_worker = functools.partial(_turns_of_worker, settings, feed_states)
        super().__init__(of_worker, self._num_workers, buffer_size=buffer_size * self._num_workers)

    def __next__(self) -> list[FeedTurn]:
        turns: list[FeedTurn] = []
        for _ in range(self._num_workers):
            of_worker, counts = super().__next__()
            self._faults.add(counts)
            turns += of_worker
        return sorted(turns, key=lambda turn: turn.feed)


def _turns_of_worker(
    settings: TurnSettings, feed_states: Mapping[int, FeedState], worker: int, num_workers: int
) -> Iterator[tuple[list[FeedTurn], FaultCounts]]:
    """Yields the rows of one worker's feeds, batch by batch, with the new counts of failed reads.

    Args:
        settings: The worker's copy of the settings.
        feed_states: The state from which each feed of the host starts.
        worker: Number of this worker.
        num_workers: Number of workers. Each one runs every `num_workers`-th feed.
    """
    own = dict(list(feed_states.items())[worker::num_workers])
    with contextlib.closing(FeedTurns(settings, own)) as turns:
        while True:
            yield next(turns), settings.faults.taken()
