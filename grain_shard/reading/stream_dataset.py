"""`StreamDataset`: a stream of batches, and the functions that the chain applies to each batch."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grain

from grain_shard.errors import ShardingError, StateError
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.read_ahead import replace_read_ahead
from grain_shard.host_arrays import owned
from grain_shard.reading.faults import FAIL_AT_ONCE, Faults
from grain_shard.reading.iterable import IterableBatches
from grain_shard.reading.padding import Padding
from grain_shard.reading.record_stream import RecordStream
from grain_shard.reading.retried_records import RetriedRecords
from grain_shard.reading.shared_reads import BYTES_AHEAD, SharedReads
from grain_shard.spans import READ, span
from grain_shard.trees import Batch, check_record


@dataclass
class SeenBatches:
    """Facts that an iterator has learned from the batches of a stream so far.

    Attributes:
        rows: Number of rows of a full batch, before padding; 0 until it is known.
        is_begun: True after the first batch, and after a restore. While it is False, the size of
            the next batch is checked. After a restore the next batch may be the short last one.
        first_digest: Digest of the first batch before this host's rows are taken from it, if every
            host reads the same whole batches; "" otherwise.
    """

    rows: int = 0
    is_begun: bool = False
    first_digest: str = ""


# A `StreamStep` returns this object to drop a batch.
DROPPED: Any = object()
# A function that is applied to each batch of a stream. It returns the changed batch, or DROPPED.
StreamStep = Callable[[Batch, SeenBatches], Batch]


@dataclass(frozen=True)
class StreamFacts:
    """Facts that are known about a stream's batches before any batch is read.

    Attributes:
        global_batch_size: Rows of a full batch; None if unknown before a batch is read.
        unpadded_batch_size: Rows of a full batch before padding; None if unknown before a batch is
            read.
        owns_arrays: True if no other object refers to the arrays of a batch.
        padding: The values of rows of padding, and the key of their mask.
    """

    global_batch_size: int | None = None
    unpadded_batch_size: int | None = None
    owns_arrays: bool = False
    padding: Padding = Padding(1)  # noqa: RUF009 (it is frozen)


class StreamDataset(grain.IterDataset):
    """A stream of a user's batches, to each of which some functions are applied.

    Args:
        parent: The dataset to which the stage was applied. Grain walks down the pipeline through
            the parents.
        source: The user's dataset of batches.
        facts: Facts that are known about the batches.
        steps: The functions to apply to each batch, in order.
        made_by: The stage that made this dataset, for ``str``.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        source: grain.IterDataset,
        facts: StreamFacts,
        steps: Sequence[StreamStep] = (),
        made_by: Any = "StreamDataset",
    ):
        super().__init__(parent)
        self.facts: StreamFacts = facts
        self.source: grain.IterDataset = source
        self.steps: Sequence[StreamStep] = steps
        self._made_by = made_by

    @classmethod
    def of(cls, ds: grain.IterDataset, *, global_batch_size: int | None = None) -> StreamDataset:
        """Returns a stream of the batches of a user's dataset, which no `StreamStep` changes yet.

        Raises:
            ShardingError: Grain would lose epochs of the dataset after a restore.
        """
        refuse_lost_epochs(ds)
        owns_arrays = isinstance(ds, IterableBatches)  # which copies the arrays
        return cls(ds, ds, StreamFacts(global_batch_size, global_batch_size, owns_arrays))

    def after(self, step: StreamStep, made_by: Any, **facts: Any) -> StreamDataset:
        """Returns the stream with one more function, which is applied to each batch last.

        Args:
            step: The function.
            made_by: The stage that adds the function.
            **facts: The fields of `StreamFacts` that change, with their new values.
        """
        changed, steps = replace(self.facts, **facts), (*self.steps, step)
        return StreamDataset(self, self.source, changed, steps, made_by)

    def with_own_arrays(self) -> StreamDataset:
        """Returns the stream with copied arrays, to which no other object refers.

        Returns the same stream if no other object refers to its arrays already.
        """
        if self.facts.owns_arrays:
            return self
        return self.after(lambda batch, seen: owned(batch), "copies", owns_arrays=True)

    def iterate(self, faults: Faults, batches_ahead: int = 1) -> StreamIterator:
        """Returns an iterator over the batches.

        Args:
            faults: The rules for failed reads. They apply to records of the stream that are read by
                index.
            batches_ahead: Records of at most this many batches are read ahead, unless the user gave
                ``.to_iter_dataset`` options of Grain.
        """
        records_per_batch = nodes.records_per_batch(self.source)
        reads = SharedReads(
            faults,
            batches_ahead * (records_per_batch or 1),
            bytes_ahead=BYTES_AHEAD if records_per_batch is None else 0,
        )

        def stream_of(records: grain.MapDataset, options: grain.ReadOptions) -> grain.IterDataset:
            if options == grain.ReadOptions():
                return RecordStream(reads, None, records, options)
            return RetriedRecords(records, faults).to_iter_dataset(options)

        source = replace_read_ahead(self.source, stream_of, check_record)
        return StreamIterator(iter(source), self, faults, reads)

    def __iter__(self) -> StreamIterator:
        return self.iterate(Faults(FAIL_AT_ONCE))

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return str(self._made_by)


class BatchIterator(grain.DatasetIterator):
    """An iterator over batches, with the methods that a background thread needs."""

    @abstractmethod
    def position(self) -> Any:
        """Returns the iterator's position after the last batch that ``next`` returned.

        Later batches do not change the returned object.
        """

    @abstractmethod
    def stop(self) -> None:
        """Ends a ``next`` that waits in another thread, for records or before a further try."""


class StreamIterator(BatchIterator):
    """An iterator over the batches of a stream, which applies the stream's functions to each batch.

    The functions run in the thread that asks for the batch.

    The state of the user's iterator is only a part of this iterator's state. The state also has the
    number of rows of a full batch, because the first batch after a restore may be the short last
    one. And it has the sizes of all known ``.batch`` nodes, because the position of the user's
    iterator may count the batches of such a node.

    Args:
        source: The user's iterator.
        ds: The stream, with its functions.
        faults: The rules for failed reads.
        reads: The threads that read ahead.

    Attributes:
        seen: The facts learned from the batches.
    """

    _PARENT, _ROWS, _BATCH_SIZES = "parent", "rows", "batch_sizes"  # the state's keys

    def __init__(
        self,
        source: grain.DatasetIterator,
        ds: StreamDataset,
        faults: Faults,
        reads: SharedReads,
    ):
        super().__init__(source)
        self._source, self._steps, self._faults, self._reads = source, ds.steps, faults, reads
        self._batch_sizes = nodes.batch_sizes(ds.source)
        self._rows_to_expect = ds.facts.unpadded_batch_size or 0
        self.seen: SeenBatches = SeenBatches(self._rows_to_expect)

    def __next__(self) -> Batch:
        batch = DROPPED
        while batch is DROPPED:
            with span(READ):
                batch = next(self._source)
            for step in self._steps:
                if batch is not DROPPED:
                    batch = step(batch, self.seen)
            self.seen.is_begun = True
        return batch

    def position(self) -> bytes:
        # The state is copied, because an iterator may change a state after it has returned it.
        # Pickling is the fastest way to copy a state.
        return pickle.dumps(self.get_state())

    def get_state(self) -> dict[str, Any]:
        return {
            self._PARENT: self._source.get_state(),
            self._ROWS: self.seen.rows,
            self._BATCH_SIZES: list(self._batch_sizes),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        rows, sizes = state[self._ROWS], state[self._BATCH_SIZES]
        if self._rows_to_expect and rows and rows != self._rows_to_expect:
            _refuse(f"batches of {rows} rows", f"batches of {self._rows_to_expect} rows")
        if sizes != self._batch_sizes:
            _refuse(f".batch({sizes})", f".batch({self._batch_sizes})")
        self._source.set_state(state[self._PARENT])
        self.seen.rows, self.seen.is_begun = rows, True

    def stop(self) -> None:
        self._faults.stop()
        self._reads.stop()

    def close(self) -> None:
        self.stop()
        try:
            self._reads.close()
        finally:
            super().close()

    def __del__(self) -> None:
        if hasattr(self, "_reads"):  # False if `__init__` failed before
            self._reads.stop()  # its threads do not refer to this object, so they would run on


def _refuse(saved: str, now: str) -> NoReturn:
    raise StateError(
        f"the state was saved with {saved}, and this stream has {now}.\n"
        "  remedy: restore with the pipeline that saved the state. To change the batch size within"
        " a run, use a grain.MapDataset down to .batch, or grain_shard.feeds."
    )


def refuse_lost_epochs(ds: grain.IterDataset) -> None:
    """Raises an error if Grain would lose epochs of a stream after a restore.

    Grain loses them if a `RepeatIterDataset` repeats interleaved streams. After a restore in a
    later epoch, such a stream ends with that epoch, without an error. ``.mp_prefetch`` interleaves
    the streams of its workers.

    Args:
        ds: The stream.

    Raises:
        ShardingError: The stream has a `RepeatIterDataset` of interleaved streams.
    """
    if nodes.repeats_interleaved(ds):
        raise ShardingError(
            "a RepeatIterDataset repeats interleaved streams, and Grain loses the later epochs of"
            " such a stream after a restore. (.mp_prefetch interleaves its workers' streams.)",
            remedy="repeat before the interleaving: RepeatIterDataset(ds, n).mp_prefetch(...), or"
            " repeat each interleaved stream, or call .repeat(n) on the MapDataset at the beginning"
            " of the stream.",
        )
