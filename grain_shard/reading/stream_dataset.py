"""A stream of batches, and the steps that the chain's stages put each of them through."""

from __future__ import annotations

import pickle
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import grain

from grain_shard.errors import StateError
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.read_ahead import replace_read_ahead
from grain_shard.host_arrays import owned
from grain_shard.reading.faults import FAIL_AT_ONCE, Faults
from grain_shard.reading.iterable import is_from_iterable
from grain_shard.reading.pad_rows import PadRows
from grain_shard.reading.retried_records import RetriedRecords
from grain_shard.spans import READ, span
from grain_shard.trees import Batch


@dataclass
class SeenBatches:
    """The facts that a stream's batches have shown since it began.

    Attributes:
        rows: Rows of a full batch, before padding; 0 until they are known.
        is_begun: Whether a batch has come. After a restore the first batch may be the short last
            one of the stream, so it is not checked like the first of a stream.
        first_digest: The digest of the first whole batch that every host reads; "" for none.
    """

    rows: int = 0
    is_begun: bool = False
    first_digest: str = ""


# In place of a batch that a step drops.
DROPPED: Any = object()
# Makes the next form of a batch, or DROPPED.
Step = Callable[[Batch, SeenBatches], Batch]


@dataclass(frozen=True)
class StreamFacts:
    """The facts that are known of a stream's batches before any is read.

    Attributes:
        global_batch_size: Rows of a full batch; None if only the batches tell.
        unpadded_batch_size: Rows of a full batch before padding; None if only the batches tell.
        rows_to_expect: Rows of every batch but a short one, where padding needs them; 0 if only the
            first batch tells.
        owns_arrays: Whether nothing else refers to the arrays of the batches.
        padding: The content of rows of padding.
    """

    global_batch_size: int | None = None
    unpadded_batch_size: int | None = None
    rows_to_expect: int = 0
    owns_arrays: bool = False
    padding: PadRows = PadRows()  # noqa: RUF009 (it is frozen)


class StreamDataset(grain.IterDataset):
    """A stream of batches, each of which goes through some steps.

    Args:
        parent: The dataset below, as Grain shows it.
        source: The user's dataset, which gives the batches.
        facts: The facts that are known of the batches.
        steps: The steps, in order.
        made_by: The stage that made this dataset, for its text.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        source: grain.IterDataset,
        facts: StreamFacts,
        steps: Sequence[Step] = (),
        made_by: Any = "StreamDataset",
    ):
        super().__init__(parent)
        self.facts, self._source, self._steps, self._made_by = facts, source, steps, made_by

    @classmethod
    def of(cls, ds: grain.IterDataset, *, global_batch_size: int | None = None) -> StreamDataset:
        """The batches of a dataset of the user's."""
        owns_arrays = is_from_iterable(ds)
        return cls(ds, ds, StreamFacts(global_batch_size, global_batch_size, 0, owns_arrays))

    def after(self, step: Step, made_by: Any, **facts: Any) -> StreamDataset:
        """Returns the batches after one more step.

        Args:
            step: The step.
            made_by: The stage whose step it is.
            **facts: The fields of `StreamFacts` that it changes.
        """
        changed, steps = replace(self.facts, **facts), (*self._steps, step)
        return StreamDataset(self, self._source, changed, steps, made_by)

    def with_own_arrays(self) -> StreamDataset:
        """Returns the same batches, in arrays that nothing else refers to."""
        if self.facts.owns_arrays:
            return self
        return self.after(lambda batch, seen: owned(batch), "copies", owns_arrays=True)

    def iterate(self, faults: Faults) -> StreamIterator:
        """Returns an iterator over the batches.

        Args:
            faults: Decides on reads that fail, in the random-access parts that Grain reads.
        """
        source = replace_read_ahead(
            self._source,
            lambda records, options: RetriedRecords(records, faults).to_iter_dataset(options),
        )
        return StreamIterator(
            iter(source),
            self._steps,
            self.facts.rows_to_expect,
            batch_sizes=nodes.batch_sizes(self._source),
            faults=faults,
        )

    def __iter__(self) -> StreamIterator:
        return self.iterate(Faults(FAIL_AT_ONCE))

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return str(self._made_by)


class BatchIterator(grain.DatasetIterator):
    """An iterator over batches, with the methods that a background stage needs."""

    @abstractmethod
    def position(self) -> Any:
        """Returns the position after the last batch, in a form that later batches do not change."""

    @abstractmethod
    def stop(self) -> None:
        """Lets a ``next`` that waits for threads of its own return soon; called by any thread."""


class StreamIterator(BatchIterator):
    """The batches of a stream, each after all steps.

    Its state also holds the rows of a full batch, because the first batch after a restore may be
    the short last one, and the sizes of every ``.batch`` that is seen, because the stream may count
    the batches of one.

    Args:
        source: The user's iterator.
        steps: The steps, in order. They run in the thread that asks for the batch.
        rows_to_expect: Rows of a full batch; 0 if only the first batch tells.
        batch_sizes: The sizes of each ``.batch`` in the stream.
        faults: Decides on reads that fail.

    Attributes:
        seen: The facts that the batches have shown.
    """

    _PARENT, _ROWS, _BATCH_SIZES = "parent", "rows", "batch_sizes"  # the state's keys

    def __init__(
        self,
        source: grain.DatasetIterator,
        steps: Sequence[Step],
        rows_to_expect: int,
        *,
        batch_sizes: list[int],
        faults: Faults,
    ):
        super().__init__(source)
        self._source, self._steps, self._faults = source, steps, faults
        self._rows_to_expect, self._batch_sizes = rows_to_expect, batch_sizes
        self.seen = SeenBatches(rows_to_expect)

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
        # A copy, since iterators may go on to change a state that they have handed out. Pickling is
        # the fastest way to copy it.
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
            _refuse(f"batches of {rows} rows", str(self._rows_to_expect))
        if sizes != self._batch_sizes:
            _refuse(f".batch({sizes})", f".batch({self._batch_sizes})")
        self._source.set_state(state[self._PARENT])
        self.seen.rows, self.seen.is_begun = rows, True

    def stop(self) -> None:
        self._faults.stop()

    def close(self) -> None:
        self.stop()
        super().close()


def _refuse(saved: str, now: str) -> NoReturn:
    raise StateError(
        f"the state was saved with {saved}, and these have {now}.\n"
        "  remedy: restore with the pipeline that saved it. In the middle of a run batches of"
        " another size can be cut of a MapDataset down to .batch, and of feeds."
    )
