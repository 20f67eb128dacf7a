"""How this host's batches are produced, and which state goes with each.

There are three kinds of pipelines, and this is what an iterator asks of each. `RandomAccess` reads
batch k of a `MapDataset`: its position is k, whoever reads it, in whatever thread or process.
`Stream` asks an `IterDataset` for its next batch: its position is whatever Grain's iterator says
after that batch. `HostFeeds`, in a room of its own, is a stream whose state can be cut into feeds.
"""

from __future__ import annotations

import contextlib
import gc
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import grain

from grain_shard.background import Background, Producer, TaskStage
from grain_shard.errors import ShardingError, StateError
from grain_shard.grain_inside.flags import mark_flags_as_parsed
from grain_shard.host_arrays import owned
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.state_files import KIND, RANDOM_ACCESS, STREAM
from grain_shard.pace import MOST_THREADS, ReadPace
from grain_shard.reading.fingerprint import Fingerprint, check_fingerprint
from grain_shard.reading.iterable import require_another_pass
from grain_shard.reading.pad_rows import PadRows
from grain_shard.reading.reads import Reads
from grain_shard.reading.row_dataset import BatchMapDataset
from grain_shard.reading.state_json import from_json, to_json
from grain_shard.reading.stream_dataset import BatchIterator, StreamDataset
from grain_shard.trees import Batch

Position = Any
_THREAD = "grain-shard-host"


class Opened(NamedTuple):
    """A position, and this host's batches from there, each with the position after it.

    Attributes:
        position: Where the batches begin.
        batches: (batch, position after it), made in the background.
        first_digest: Of the first whole batch once that was read, where every host reads the same
            whole batches; "" elsewhere.
        threads: How many threads read side by side now, and why, in words, and how many reads were
            asked for again; "" where that is not found while it runs.
    """

    position: Position
    batches: TaskStage[tuple[Batch, Position]]
    first_digest: Callable[[], str] = str
    threads: Callable[[], str] = str


class HostBatches(ABC):
    """A sequence of this host's batches that can be opened at any position.

    Attributes:
        kind: What to call it, in states and to other hosts.
        ends_by_vote: Whether the hosts have to agree batch by batch on where it ends, since nothing
            else tells.
        rows: What it yields on each of several hosts: some rows of batches that are the same
            everywhere ("global"), rows of its own ("local"), or those of its feeds ("feeds").
        fingerprint: What must be the same on all hosts, and when a state is restored.
        padding: What the rows of padding in its batches hold.
    """

    kind: str
    ends_by_vote: bool = False
    rows: str = GLOBAL
    fingerprint: Mapping[str, Any]
    padding: PadRows = PadRows()

    @abstractmethod
    def num_batches(self) -> int | None:
        """The length of one pass; None if only the end tells it."""

    @abstractmethod
    def open(self, position: Position | None) -> Opened:
        """Starts at a position, or at the beginning.

        Args:
            position: Where to start; None for the beginning.

        Raises:
            StateError: The pipeline cannot start there.
        """

    @abstractmethod
    def first(self) -> Batch:
        """A batch like the first one, for its shapes; read here and now.

        Raises:
            ShardingError: There is none.
        """

    @abstractmethod
    def next_batch(self, position: Position) -> int | None:
        """The index of the next batch, if that is the same on every host; else None."""

    def past_end(self, position: Position) -> Position:
        """The position after a batch for which this host had no row any more."""
        return position

    @abstractmethod
    def to_state(self, position: Position) -> dict[str, Any]:
        """The position as plain JSON, if what the user wrote allows it."""

    @abstractmethod
    def from_state(self, state: dict[str, Any]) -> Position:
        """The position that a state was made from.

        Raises:
            StateError: The state belongs to something else.
        """


class RandomAccess(HostBatches):
    """The batches of a `MapDataset`.

    Args:
        ds: This host's batches by index, in arrays that nothing else refers to.
        fingerprint: What a state must agree with.
        buffer_size: Batches that may wait on the host or be in the making.
        num_threads: Threads that read side by side; None finds how many help.
        num_workers: Grain worker processes that make them instead, if not 0. Grain keeps four
            batches for each of them at least, so that many may be on the host.
        reread_slow: Whether threads may ask a source a second time for what comes late.
        fields_before: Of a batch, the fields of the fingerprint that are others in a state that
            stands there, since what follows may still change.
    """

    kind = RANDOM_ACCESS
    _BATCH = "batch"  # the state's key for the index of the next batch

    def __init__(
        self,
        ds: BatchMapDataset,
        fingerprint: Fingerprint,
        *,
        buffer_size: int,
        num_threads: int | None,
        num_workers: int,
        reread_slow: bool,
        fields_before: Callable[[int], Fingerprint] = lambda batch: {},
    ):
        self._ds, self.fingerprint, self._buffer_size = ds, fingerprint, buffer_size
        self._fields_before = fields_before
        self._num_threads, self._num_workers = num_threads, num_workers
        self._reread_slow = reread_slow

    def num_batches(self) -> int | None:
        return len(self._ds)

    def open(self, position: int | None) -> Opened:
        start = position or 0
        indices = range(start, len(self._ds))
        if self._num_workers and indices:
            return Opened(start, self._from_workers(start))
        most = min(MOST_THREADS, self._buffer_size * max(1, self._ds.records_per_batch))
        pace = ReadPace(self._num_threads, most=most)
        reads = Reads(self._ds, indices, self._buffer_size, pace, reread_slow=self._reread_slow)
        batches = TaskStage(reads, buffer_size=self._buffer_size, pace=pace, name=_THREAD)
        return Opened(start, batches, threads=lambda: f"{pace}{reads.lateness}")

    def _from_workers(self, start: int) -> Background[Any, tuple[Batch, int]]:
        """Batches that worker processes make; one waits here, out of their shared memory."""
        mark_flags_as_parsed()
        # Grain keeps 2 * per_worker + 2 batches for each worker: in its queue and in another one of
        # this process, one that the worker makes and one that is on its way.
        per_worker = max(1, self._buffer_size // (2 * self._num_workers) - 1)
        ds: grain.MapDataset = self._ds[start:]
        from_workers = ds.to_iter_dataset(
            grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        ).mp_prefetch(
            grain.MultiprocessingOptions(self._num_workers, per_worker_buffer_size=per_worker)
        )
        return Background(
            lambda item: (owned(item[1]), item[0] + 1),
            _Numbered(from_workers.__iter__(), start, len(self._ds)),
            buffer_size=1,
            name=_THREAD,
        )

    def first(self) -> Batch:
        return self._ds[0]

    def next_batch(self, position: int) -> int:
        return position

    def to_state(self, position: int) -> dict[str, Any]:
        return {KIND: self.kind, self._BATCH: position, **self._fingerprint_at(position)}

    def _fingerprint_at(self, position: Any) -> Fingerprint:
        """The fingerprint in a state that stands there; of no position, that of the whole."""
        known = type(position) is int and 0 <= position <= len(self._ds)
        return {**self.fingerprint, **(self._fields_before(position) if known else {})}

    def from_state(self, state: dict[str, Any]) -> int:
        batch = state.get(self._BATCH) if isinstance(state, Mapping) else None
        current = self._fingerprint_at(batch)
        check_fingerprint(state, current, kind="a random-access pipeline", keys=(self._BATCH,))
        batches = len(self._ds)
        if type(batch) is not int or not 0 <= batch <= batches:
            raise StateError(
                f"the state stands at batch {batch!r} of {batches}.\n"
                "  remedy: pass what get_state() gave, unchanged."
            )
        return batch


class _Numbered(Producer[tuple[int, Batch]]):
    """Batches with their indices; closes where they come from.

    Args:
        batches: What the workers make.
        start: The index of the first of them.
        stop: That after the last one.
    """

    def __init__(self, batches: grain.DatasetIterator, start: int, stop: int):
        self._batches: Any = batches
        self._next, self._stop = start, stop

    def __next__(self) -> tuple[int, Batch]:
        try:
            batch = next(self._batches)
        except StopIteration:
            if self._next == self._stop:
                raise
            raise RuntimeError(
                f"the worker processes ended after {self._next} of {self._stop} batches: the"
                " pipeline raised StopIteration, which Grain takes for the end of a worker's data."
                " Look for a bare next() in the source or in a .map."
            ) from None
        self._next += 1
        return self._next - 1, batch

    def close(self) -> None:
        batches, self._batches = self._batches, iter(())
        batches.close()
        # Grain's iterators are in reference cycles, with the semaphores of their processes. If the
        # collector comes upon those while others are being made, they leak.
        del batches
        gc.collect()


class Stream(HostBatches):
    """The batches of a stream; a position is the pickled state of its iterator.

    Args:
        ds: This host's batches, in arrays that nothing else refers to.
        buffer_size: Batches that may wait on the host or be in the making.
        rows: What the stream yields on each of several hosts, "global" or "local".
    """

    kind = STREAM
    ends_by_vote = True
    _PARENT = "parent"  # the state's key for that of Grain's iterator
    fingerprint: Mapping[str, Any] = {}  # nothing can be compared of an arbitrary iterator

    def __init__(self, ds: StreamDataset, *, buffer_size: int, rows: str = GLOBAL):
        self._ds, self._buffer_size, self.rows = ds, buffer_size, rows
        self.padding = ds.padding
        self._position: bytes | None = None  # of the latest beginning

    def num_batches(self) -> int | None:
        return None

    def _iterate(self) -> BatchIterator:
        return iter(self._ds)

    def open(self, position: bytes | None) -> Opened:
        mark_flags_as_parsed()  # there may be an .mp_prefetch in the stream
        iterator = self._iterate()
        if position is not None:
            try:
                iterator.go_to(position)
            except (KeyError, TypeError, IndexError) as error:
                raise StateError(
                    f"the stream cannot take this state: {type(error).__name__}: {error}.\n"
                    "  remedy: restore with the pipeline that saved it."
                ) from error
        batches = Background(
            lambda item: item, _WithPosition(iterator), buffer_size=self._buffer_size, name=_THREAD
        )
        self._position = iterator.position()
        return Opened(self._position, batches, lambda: iterator.first_digest)

    def first(self) -> Batch:
        require_another_pass(self._ds)
        with contextlib.closing(self._iterate()) as iterator:
            batch = next(iterator, None)
        if batch is None:
            raise ShardingError(
                "this host's stream has no batch at all, so nothing tells what its padding should"
                " look like.",
                remedy='give every host some records, or pass remainder="drop".',
            )
        return batch

    def next_batch(self, position: bytes) -> int | None:
        return None  # a stream does not count its batches

    def to_state(self, position: bytes) -> dict[str, Any]:
        return {KIND: self.kind, self._PARENT: to_json(pickle.loads(position))}

    def from_state(self, state: dict[str, Any]) -> bytes:
        if self._position is not None:
            self.to_state(self._position)  # what has no state cannot take one
        if not isinstance(state, dict) or set(state) != {KIND, self._PARENT}:
            raise StateError(
                f"this is no state of a stream: {state!r}.\n"
                "  remedy: restore with the pipeline that saved it."
            )
        return pickle.dumps(from_json(state[self._PARENT]))


class _WithPosition(Producer[tuple[Batch, bytes]]):
    """Batches with the position after each; closes where they come from."""

    def __init__(self, iterator: BatchIterator):
        self._iterator = iterator

    def __next__(self) -> tuple[Batch, bytes]:
        return next(self._iterator), self._iterator.position()

    def stop(self) -> None:
        self._iterator.stop()

    def close(self) -> None:
        self._iterator.close()
