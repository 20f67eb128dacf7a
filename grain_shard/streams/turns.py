"""Takes the next turn of every stream of a host, in this process or in worker processes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from grain_shard.reading.faults import FaultCounts, Faults
from grain_shard.streams.reader import StreamReader
from grain_shard.streams.streams import Streams, StreamState, Turn
from grain_shard.threads.tasks import Producer
from grain_shard.threads.worker_processes import WorkerProcesses


@dataclass(frozen=True)
class TurnSettings:
    """The settings with which turns are taken, in this process or in a worker process.

    Attributes:
        streams: The streams of all hosts.
        rows: Number of rows that each stream gives in a turn.
        faults: Decides on records that cannot be read, and counts them.
        num_threads: Number of threads that read ahead for all streams of the process together. None
            adapts the number while they read.
        batches: Most batches that wait on the host or are unfinished.
    """

    streams: Streams
    rows: int
    faults: Faults
    num_threads: int | None = 1
    batches: int = 1


class Turns(Producer[list[Turn]]):
    """The turns of the streams, each a list with an entry for each stream of this process.

    They never end: a stream that has ended gives no rows.

    Args:
        settings: The settings of the turns.
        states: The state from which each stream starts, by the stream's number. Only these streams
            run, in this order.
    """

    def __init__(self, settings: TurnSettings, states: Mapping[int, StreamState]):
        self._rows = settings.rows
        self._reads = settings.streams.reads(
            settings.faults,
            settings.num_threads,
            num_streams=len(states),
            rows=settings.rows,
            batches=settings.batches,
        )
        self._readers = {
            number: StreamReader(settings.streams, number, state, self._reads)
            for number, state in states.items()
        }
        if settings.streams.stays_open:
            settings.streams.look_at(next(iter(self.pickled_states().values())))

    def pickled_states(self) -> dict[int, bytes]:
        """Returns the pickled state of each stream after the last turn, by the stream's number."""
        return {number: reader.pickled_state for number, reader in self._readers.items()}

    def __next__(self) -> list[Turn]:
        return [reader.turn(self._rows) for reader in self._readers.values()]

    def stop(self) -> None:
        self._reads.stop()

    def __del__(self) -> None:
        if hasattr(self, "_reads"):  # False if `__init__` failed before it made the reads
            self.stop()  # the threads do not refer to this object, so they would run on

    def close(self) -> None:
        """Closes all streams. If one cannot be closed, the others are closed nevertheless.

        Raises:
            BaseException: The first error of closing.
        """
        self._reads.stop()  # first, because a stream may wait for records from it
        failed: BaseException | None = None
        # This loop uses no name of a module: at the interpreter's exit the names may be gone.
        for close in (self._reads.close, *(reader.close for reader in self._readers.values())):
            try:
                close()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed


class TurnsOfWorkers(WorkerProcesses):
    """The turns of the streams, taken in worker processes.

    Each worker runs some of the streams. The processes start with the first ``next``. The rows may
    be views of shared memory.

    Args:
        settings: The settings of the turns. `settings.faults` adds up the failed reads that the
            workers count. Each worker gets a pickled copy, and counts in it.
        states: The state from which each stream starts, by the stream's number.
        num_workers: Number of processes. With fewer streams than this, each has its own process.
    """

    def __init__(self, settings: TurnSettings, states: Mapping[int, StreamState], num_workers: int):
        self._faults, self._num_workers = settings.faults, min(num_workers, len(states))
        of_worker = functools.partial(_turns_of_worker, settings, states)
        # Grain keeps at least four of each worker.
        buffer_size = settings.batches * self._num_workers
        super().__init__(of_worker, self._num_workers, buffer_size=buffer_size)

    def __next__(self) -> list[Turn]:
        turns: list[Turn] = []
        for _ in range(self._num_workers):
            of_worker, counts = super().__next__()
            self._faults.add(counts)
            turns += of_worker
        return sorted(turns, key=lambda turn: turn.number)


def _turns_of_worker(
    settings: TurnSettings, states: Mapping[int, StreamState], worker: int, num_workers: int
) -> Iterator[tuple[list[Turn], FaultCounts]]:
    """Yields the turns of one worker's streams, with the new counts of failed reads.

    Args:
        settings: The worker's copy of the settings.
        states: The state from which each stream of the host starts.
        worker: Number of this worker.
        num_workers: Number of workers. Each one runs every `num_workers`-th stream.
    """
    own = dict(list(states.items())[worker::num_workers])
    with contextlib.closing(Turns(settings, own)) as turns:
        while True:
            yield next(turns), settings.faults.taken()
