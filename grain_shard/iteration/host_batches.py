"""How this host's batches are produced, and which state goes with each.

There are three kinds of pipelines, and this is what an iterator asks of each. `RandomAccess` reads
batch k of a `MapDataset`: its position is k and the record with which that batch begins, whoever
reads it, in whatever thread or process.
`Stream` asks an `IterDataset` for its next batch: its position is whatever Grain's iterator says
after that batch. `HostFeeds`, in a room of its own, is a stream whose state can be cut into feeds.
"""

from __future__ import annotations

import contextlib
import operator
import pickle
import sys
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
from grain_shard.reading.cuts import START, Progress
from grain_shard.reading.fingerprint import (
    HOW_TO_COUNT_RECORDS,
    Fingerprint,
    check_fingerprint,
)
from grain_shard.reading.iterable import require_another_pass
from grain_shard.reading.pad_rows import PadRows
from grain_shard.reading.reads import Reads
from grain_shard.reading.row_dataset import BatchMapDataset
from grain_shard.reading.state_json import from_json, to_json
from grain_shard.reading.stream_dataset import BatchIterator, StreamDataset
from grain_shard.trees import Batch
from grain_shard.worker_processes import WorkerProcesses

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
        fingerprint: What must be the same when a state is restored.
        compared: What must be the same on all hosts.
        padding: What the rows of padding in its batches hold.
        host_batch_sizes: If full batches are of several sizes, all of them, in rows of this host.
    """

    kind: str
    ends_by_vote: bool = False
    rows: str = GLOBAL
    fingerprint: Mapping[str, Any]
    compared: Mapping[str, Any]
    padding: PadRows = PadRows()
    host_batch_sizes: tuple[int, ...] = ()

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
    def next_batch(self, position: Position) -> Mapping[str, Any]:
        """What tells which batch is the next one, as far as that is the same on every host."""

    def position_at(self, *, step: int | None, record: int | None) -> Position:
        """The position before a step, or before a record.

        Args:
            step: Batches that come before it, in a run from the beginning.
            record: Records that come before it. One of both is given.

        Raises:
            ShardingError: There is none, or nobody can say where it is.
        """
        raise ShardingError(
            "seek needs random access, and this is a stream: where a record of it is, only reading"
            " up to it tells.",
            remedy="go on from a state, by set_state(saved); or keep a MapDataset down to .batch.",
        )

    def repeated(self, times: int) -> HostBatches:
        """As many passes in one, each with an order and augmentations of its own.

        Raises:
            ShardingError: Where an epoch ends cannot be known.
        """
        raise ShardingError(
            "epochs needs random access, and this is a stream: each iter(ds) is a pass, and nobody"
            " knows its end before it comes.",
            remedy="call iter(ds) for each epoch, and shuffle by the epoch's number in the source;"
            " or keep a MapDataset down to .batch.",
        )

    def pass_of(self, position: Position) -> tuple[int, int]:
        """Which pass of `repeated` the next batch is of, and how many batches that still has."""
        raise NotImplementedError

    def next_pass(self, position: Position) -> Position:
        """The beginning of the pass that follows that of the next batch."""
        raise NotImplementedError

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
        fields_before: The fields of the fingerprint that are others in a state of a run that has
            come so far, since what follows may still change.
        passes: How often the dataset is gone through.
    """

    kind = RANDOM_ACCESS
    _STEP, _EPOCH, _RECORD = "step", "epoch", "record"  # the state's keys, as in `Progress`

    def __init__(
        self,
        ds: BatchMapDataset,
        fingerprint: Fingerprint,
        *,
        buffer_size: int,
        num_threads: int | None,
        num_workers: int,
        reread_slow: bool,
        fields_before: Callable[[Progress], Fingerprint] = lambda progress: {},
        passes: int = 1,
    ):
        self._ds, self.fingerprint, self._buffer_size = ds, fingerprint, buffer_size
        self._fields_before, self._passes = fields_before, passes
        self._num_threads, self._num_workers = num_threads, num_workers
        self._reread_slow = reread_slow
        self.host_batch_sizes = ds.host_batch_sizes
        self.compared = {**fingerprint, "epochs": ds.num_epochs}
        if ds.counts_records:
            by_step = ds.cuts.sizes_by_step
            self.compared["global_batch_size"] = by_step if len(by_step) > 1 else by_step[0]

    def num_batches(self) -> int | None:
        return len(self._ds)

    def repeated(self, times: int) -> RandomAccess:
        if len(self._ds) * times > sys.maxsize:
            raise ShardingError(
                f"{times} epochs of a dataset that is endless already have no border.",
                remedy="leave out its .repeat().",
            )
        return RandomAccess(
            self._ds.repeated(times),
            dict(self.fingerprint),
            buffer_size=self._buffer_size,
            num_threads=self._num_threads,
            num_workers=self._num_workers,
            reread_slow=self._reread_slow,
            fields_before=self._fields_before,
            passes=self._passes * times,
        )

    @property
    def _epochs_of_a_pass(self) -> int:
        return self._ds.num_epochs // self._passes

    def pass_of(self, position: Progress) -> tuple[int, int]:
        epochs = self._epochs_of_a_pass
        cuts, number = self._ds.cuts.beginning_at(position), position.epoch // epochs
        while number < self._passes:
            left = cuts.steps_before((number + 1) * epochs) - position.step
            if left:
                return number, left
            number += 1  # what is left of this one is dropped
        return number, 0

    def next_pass(self, position: Progress) -> Progress:
        number, left = self.pass_of(position)
        return Progress(position.step + left, (number + 1) * self._epochs_of_a_pass, 0)

    def position_at(self, *, step: int | None, record: int | None) -> Progress:
        cuts, batches = self._ds.cuts, len(self._ds)
        step, record = _whole_number(step), _whole_number(record)
        if step is not None:
            if type(step) is not int or not 0 <= step <= batches:
                raise ShardingError(
                    f"there is no step {step!r}: the dataset has {batches:,} batches.",
                    remedy=f"seek a step from 0 to {batches:,}; more than that are in"
                    " ds.epochs(n), or after .batch(B).repeat(n).",
                )
            return cuts.progress(step)
        if not self._ds.counts_records:
            raise ShardingError(
                "these batches cannot begin at any record, since they are made as a whole.",
                remedy=f"seek a step. {HOW_TO_COUNT_RECORDS}",
            )
        records = cuts.records * self._ds.num_epochs
        if type(record) is not int or not 0 <= record <= records:
            raise ShardingError(
                f"there is no record {record!r}: all epochs together have {records:,}.",
                remedy=f"seek a record from 0 to {records:,}.",
            )
        epoch, record = divmod(record, cuts.records)
        return Progress(cuts.step_of(epoch, record), epoch, record)

    def open(self, position: Progress | None) -> Opened:
        start = self._ds.cuts.progress(0) if position is None else position
        ds = self._ds.beginning_at(start)
        cuts, indices = ds.cuts, range(start.step, len(ds))
        if self._num_workers and indices:
            return Opened(start, self._from_workers(ds, start.step))
        most = min(MOST_THREADS, self._buffer_size * max(1, ds.records_per_batch))
        pace = ReadPace(self._num_threads, most=most)
        reads = Reads(
            ds,
            indices,
            self._buffer_size,
            pace,
            lambda index: cuts.progress(index + 1),
            reread_slow=self._reread_slow,
        )
        batches = TaskStage(reads, buffer_size=self._buffer_size, pace=pace, name=_THREAD)
        return Opened(start, batches, threads=lambda: f"{pace}{reads.lateness}")

    def _from_workers(self, ds: BatchMapDataset, start: int) -> Background[Any, tuple[Batch, Any]]:
        """Batches that worker processes make; one waits here, out of their shared memory."""
        cuts, from_start = ds.cuts, ds[start:]
        workers = WorkerProcesses(
            from_start.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
            self._num_workers,
            buffer_size=self._buffer_size,
        )
        return Background(
            lambda item: (owned(item[1]), cuts.progress(item[0] + 1)),
            _Numbered(workers, start, len(ds)),
            buffer_size=1,
            name=_THREAD,
        )

    def first(self) -> Batch:
        return self._ds[0]

    def next_batch(self, position: Progress) -> Mapping[str, Any]:
        step, epoch, record = position
        if not self._ds.counts_records:
            return {"next batch": step}
        return {"next batch": step, "next record": f"{record} of epoch {epoch}"}

    def to_state(self, position: Progress) -> dict[str, Any]:
        fingerprint = {**self.fingerprint, **self._fields_before(position)}
        return {KIND: self.kind, **self._counted(position), **fingerprint}

    def _require_counted_alike(self, state: Mapping[str, Any]) -> None:
        """Refuses a state of batches that can begin at any record for those that can't, or reverse.

        Raises:
            StateError: It is one.
        """
        if (self._RECORD in state) == self._ds.counts_records:
            return
        whole, cut = "when it was saved", "now"
        if not self._ds.counts_records:
            whole, cut = cut, whole
        raise StateError(
            f"the state counts otherwise: {whole} batches are made as a whole (by a batch_fn, a"
            f" slice, or a .map after .batch), {cut} they are not.\n"
            "  remedy: restore with the pipeline that saved it."
        )

    def _counted(self, progress: Progress) -> dict[str, int]:
        """How far a run has come, as a state says it."""
        step, epoch, record = progress
        if not self._ds.counts_records:
            return {self._STEP: step}
        return {self._STEP: step, self._EPOCH: epoch, self._RECORD: record}

    def from_state(self, state: dict[str, Any]) -> Progress:
        progress = self._progress_in(state)
        current = {**self.fingerprint, **(self._fields_before(progress) if progress else {})}
        keys = tuple(self._counted(START))
        if isinstance(state, Mapping) and state.get(KIND) == self.kind and self._STEP in state:
            same = all(state.get(name, value) == value for name, value in current.items())
            if same or not all(key in state for key in keys):
                self._require_counted_alike(state)
        check_fingerprint(state, current, kind="a random-access pipeline", keys=keys)
        if progress is None:
            stands = ", ".join(f"{key} {state[key]!r}" for key in keys)
            raise StateError(
                f"the state stands at {stands}, and there is no such place: the dataset has"
                f" {len(self._ds):,} batches.\n  remedy: pass what get_state() gave, unchanged, to"
                " a pipeline of no fewer epochs."
            )
        return progress

    def _progress_in(self, state: Any) -> Progress | None:
        """Where a state stands; None if that is not in this dataset."""
        if not isinstance(state, Mapping):
            return None
        cuts, epochs = self._ds.cuts, self._ds.num_epochs
        step, epoch, record = (state.get(key, 0) for key in (self._STEP, self._EPOCH, self._RECORD))
        if not all(type(count) is int and count >= 0 for count in (step, epoch, record)):
            return None
        if not self._ds.counts_records:
            return cuts.progress(step) if step <= len(self._ds) else None
        within = epoch < epochs and record <= cuts.records
        return Progress(step, epoch, record) if within or (epoch, record) == (epochs, 0) else None


def _whole_number(value: Any) -> Any:
    """An integer of NumPy or JAX, as the step of a training state is one, as an int."""
    if isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


class _Numbered(Producer[tuple[int, Batch]]):
    """Batches with their indices; closes where they come from.

    Args:
        batches: What the workers make.
        start: The index of the first of them.
        stop: That after the last one.
    """

    def __init__(self, batches: WorkerProcesses, start: int, stop: int):
        self._batches = batches
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
        self._batches.close()


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
    # Nothing can be compared of an arbitrary iterator.
    fingerprint: Mapping[str, Any] = {}
    compared: Mapping[str, Any] = {}

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

    def next_batch(self, position: bytes) -> Mapping[str, Any]:
        return {}  # a stream does not count its batches

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
