"""Takes the turns of a host's streams, in this process or in worker processes.

A turn is the rows that one stream gives to one batch. The streams of a process run side by side:
a task of a pool takes a turn of one stream, or of several if turns are short. At most one thread is
inside a stream. The streams that have given the fewest turns come first.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Generic, TypeVar

from grain_shard.errors import Raised
from grain_shard.streams.reader import StreamReader
from grain_shard.streams.streams import StreamReads, Streams, StreamState, Turn
from grain_shard.threads.pace import ReadPace
from grain_shard.threads.pool import Pool, Task, Tasks
from grain_shard.threads.producer import Producer
from grain_shard.threads.worker_processes import WorkerProcesses

T = TypeVar("T")
# The prefix of the names of the threads that take turns in a worker process.
READS = "grain-shard-feeds"
# The maximum number of turns of a task. A task costs as much as one or two short turns. If the
# streams suddenly become slow, other streams wait for the rest of the task.
_MOST_TURNS = 16
# Makes a result, such as a batch, of one turn of each stream. Returns [result], or [] if the result
# is left out. Raises StopIteration once streams have ended.
Join = Callable[[Sequence[Turn]], Iterable[T]]


class Turns(Producer[list[Turn]]):
    """The turns of the streams, taken by the thread that asks for them.

    An item is a list with one turn of each stream of this process. The items never end: a stream
    that has ended gives turns without rows.

    Args:
        streams: The streams of all hosts.
        reads: The way in which this process reads them.
        states: The state from which each stream starts, by the stream's number. Only these streams
            run, in this order.

    Attributes:
        readers: The streams of this process.
    """

    def __init__(self, streams: Streams, reads: StreamReads, states: Mapping[int, StreamState]):
        self._reads = reads = reads._replace(num_streams=len(states))
        self.readers: list[StreamReader] = [
            StreamReader(streams, number, state, reads) for number, state in states.items()
        ]
        if streams.stays_open:
            streams.look_at(self.readers[0].pickled_state)

    def pickled_states(self) -> dict[int, bytes]:
        """Returns the pickled state of each stream after its last turn, by the stream's number."""
        return {reader.number: reader.pickled_state for reader in self.readers}

    def __next__(self) -> list[Turn]:
        return [reader.turn(self._reads.rows) for reader in self.readers]

    def pool(self, join: Join[T], *, size: int, name: str) -> Pool[T]:
        """Returns a pool whose threads take the turns and make the results.

        Args:
            join: Makes a result of one turn of each stream. It is called in order.
            size: The maximum number of results that wait or are unfinished.
            name: Prefix of the names of the threads.
        """
        pace = ReadPace(self._reads.num_threads, most=len(self.readers))
        return Pool(_TurnTasks(self, join, self._reads, pace), size, name=name, pace=pace)

    def close(self) -> None:
        """Closes all streams, even if closing one of them raises an error.

        Raises:
            BaseException: The first of these errors.
        """
        failed: BaseException | None = None
        # No name of this module is used: at the interpreter's exit the names may be gone.
        for reader in self.readers:
            try:
                reader.close()
            except BaseException as error:
                failed = failed or error
        if failed is not None:
            raise failed


class _TurnTasks(Tasks[T], Generic[T]):
    """The turns of the streams as tasks. Each task takes one turn of each of some streams.

    The turns of a stream are numbered from 0. The turns with the same number make a result
    together. The task that completes them also makes the result.

    Attributes:
        is_stopped: True once nobody needs further turns.
    """

    def __init__(self, turns: Turns, join: Join[T], reads: StreamReads, pace: ReadPace):
        self._turns, self._join, self._reads, self._pace = turns, join, reads, pace
        self._lock = threading.Lock()
        self._drawn = dict.fromkeys(turns.readers, 0)  # number of turns drawn, by stream
        self._busy = set[StreamReader]()  # streams that a thread is inside of
        # Turn number -> the turns with this number so far, or errors in their place.
        self._taken: dict[int, list[Turn | Raised]] = {}
        self._next = 0  # number of the next turns to join
        self._failed = sys.maxsize  # number of the first turn that failed
        self._left_out = 0  # number of turns of each stream that made no result
        self._is_joining = False  # True while a thread makes a result
        self._is_over = False  # True after an error or the end: no further result is made
        self.is_stopped = False

    def draw(self, limit: int) -> Task[T] | None:
        with self._lock:
            free = [reader for reader in self._drawn if reader not in self._busy]
            number = min((self._drawn[reader] for reader in free), default=limit + self._left_out)
            if number - self._left_out >= limit:
                return None
            first = [reader for reader in free if self._drawn[reader] == number]
            readers = first[: min(self._pace.at_a_time(len(self._drawn)), _MOST_TURNS)]
            self._busy.update(readers)
            self._drawn.update(dict.fromkeys(readers, number + 1))
            return _TurnTask(self, readers, number, self._reads.rows)

    def results_after(
        self, number: int, reader: StreamReader, turn: Turn | Raised
    ) -> Iterator[tuple[int, T | Raised]]:
        """Notes a turn, and yields (number, result) for each result that can be made now.

        The thread that has taken the turn calls this.

        Args:
            number: Number of the turn.
            reader: The stream.
            turn: The turn, or its error. A stream that has raised an error gives no further turn.
        """
        with self._lock:
            if isinstance(turn, Turn):
                self._busy.discard(reader)
            else:  # the stream stays busy, so it is not drawn any more
                self._failed = min(self._failed, number)
            self._taken.setdefault(number, []).append(turn)
        while (turns := self._next_turns()) is not None:
            # `_next_turns` has set `_is_joining`: no other thread changes `_next` and `_left_out`.
            # Results are numbered without the turns that made none: if the turns 0 and 2 make
            # results, and the turns 1 make none, the results are 0 and 1.
            result_number = self._next - self._left_out
            results = list[T | Raised]()  # one result, or none if it is left out
            try:
                results += self._join(_without_error(turns))
            except StopIteration:
                results.append(Raised(StopIteration(), None))
            except BaseException as error:
                results.append(Raised.of(error))
            with self._lock:
                self._next += 1
                self._left_out += not results
                self._is_over = any(isinstance(result, Raised) for result in results)
                self._is_joining = False
            while results:  # `pop` drops the reference to a batch
                yield result_number, results.pop()

    def _next_turns(self) -> list[Turn | Raised] | None:
        """Returns the turns for the next result, if this thread can make it now.

        Returns:
            The turns, complete or with an error among them. None if a turn is missing; if another
            thread is making a result, as that thread then makes this one, too; or after an error or
            the end.
        """
        with self._lock:
            turns = self._taken.get(self._next, [])
            is_complete = len(turns) == len(self._drawn) or self._next == self._failed
            if self._is_joining or self._is_over or not is_complete:
                return None
            self._is_joining = True
            return self._taken.pop(self._next)

    def stop(self) -> None:
        self.is_stopped = True
        self._reads.faults.stop()

    def close(self) -> None:
        self._turns.close()


class _TurnTask(Generic[T]):
    """The turns with the same number of some streams."""

    def __init__(self, tasks: _TurnTasks[T], readers: list[StreamReader], number: int, rows: int):
        self._tasks, self._readers, self._number, self._rows = tasks, readers, number, rows
        self.size = len(readers)

    def run(self) -> Iterator[tuple[int, T | Raised]]:
        for reader in self._readers:
            if self._tasks.is_stopped:
                return
            try:
                turn: Turn | Raised = reader.turn(self._rows)
            except BaseException as error:
                turn = Raised.of(error)
            yield from self._tasks.results_after(self._number, reader, turn)


def _without_error(turns: list[Turn | Raised]) -> list[Turn]:
    """Returns the turns in the order of the streams, or raises the error that is among them."""
    found = list[Turn]()
    for turn in turns:
        if isinstance(turn, Raised):
            turn.throw()
        found.append(turn)
    return sorted(found, key=lambda turn: turn.number)


class TurnsOfWorkers(WorkerProcesses):
    """The turns of the streams, taken in worker processes.

    Each worker runs some of the streams: one at least, so there are at most as many workers as
    streams. The processes start with the first ``next``. The rows may be views of shared memory.
    """

    def __init__(
        self,
        streams: Streams,
        reads: StreamReads,
        states: Mapping[int, StreamState],
        num_workers: int,
    ):
        self._num_workers = min(num_workers, len(states))
        of_worker = functools.partial(_turns_of_worker, streams, reads, states)
        super().__init__(
            of_worker, self._num_workers, buffer_size=reads.batches * self._num_workers
        )

    def __next__(self) -> list[Turn]:
        turns: list[Turn] = []
        for _ in range(self._num_workers):
            turns += super().__next__()
        return sorted(turns, key=lambda turn: turn.number)


def _turns_of_worker(
    streams: Streams,
    reads: StreamReads,
    states: Mapping[int, StreamState],
    worker: int,
    num_workers: int,
) -> Iterator[list[Turn]]:
    """Yields the turns of one worker's streams: every `num_workers`-th stream of the host."""
    own = dict(list(states.items())[worker::num_workers])
    turns = Turns(streams, reads, own)
    with contextlib.closing(turns.pool(lambda turns: [turns], size=1, name=READS)) as pool:
        yield from map(list, pool)
