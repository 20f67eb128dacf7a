"""Batches in order, as a `grain.IterDataset`: what the chain's stages make of a stream."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import grain

from grain_shard.host_arrays import owned
from grain_shard.reading.faults import FaultCounts
from grain_shard.reading.iterable import is_from_iterable
from grain_shard.reading.pad_rows import PadRows
from grain_shard.trees import Batch

_ZEROS = PadRows()


class BatchIterator(grain.DatasetIterator):
    """An iterator over batches, with what a background stage asks of it.

    Attributes:
        first_digest: Of the first whole batch once that was read, in an iterator that keeps some
            rows of batches that every host reads; "" in all others.
    """

    first_digest: str = ""

    def position(self) -> bytes:
        """Where it stands; a copy, since iterators may hand out a state that they go on to change.

        Pickled, since that is the fastest way to copy a state.
        """
        return pickle.dumps(self.get_state())

    def go_to(self, position: bytes) -> None:
        """Goes on from where it stood."""
        self.set_state(pickle.loads(position))

    def faults(self) -> FaultCounts:
        """What was counted of reads that failed."""
        return FaultCounts()

    def stop(self) -> None:
        """Lets a ``next`` that waits for threads of its own return soon; called by any thread."""


class StreamIterator(BatchIterator):
    """Hands on the batches of another iterator, and its state; stages change what it hands on."""

    def __init__(self, source: grain.DatasetIterator):
        super().__init__(source)
        self._source = source

    def __next__(self) -> Batch:
        return next(self._source)

    def get_state(self) -> dict[str, Any]:
        return self._source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        self._source.set_state(state)


class _OwningIterator(StreamIterator):
    """Copies every batch, in the thread that asks for it."""

    def __next__(self) -> Batch:
        return owned(next(self._source))


class StreamDataset(grain.IterDataset):
    """A stream of batches, and what is known of it.

    Args:
        parent: The dataset below.
        iterate: Makes the iterator from that of the dataset below; a `StreamIterator` hands on
            what that gives, as it is.
        made_by: The stage that made this dataset, for its text.
        global_batch_size: Rows of a full batch; None if only the batches tell.
        unpadded_batch_size: These without rows of padding.
        owns_arrays: Whether nothing else refers to the arrays of its batches.
        padding: What rows of padding hold, in batches and in the place of whole batches.
    """

    def __init__(
        self,
        parent: grain.IterDataset,
        iterate: Callable[[grain.DatasetIterator], StreamIterator] = StreamIterator,
        made_by: Any = "StreamDataset",
        *,
        global_batch_size: int | None,
        unpadded_batch_size: int | None = None,
        owns_arrays: bool = False,
        padding: PadRows = _ZEROS,
    ):
        super().__init__(parent)
        self._iterate, self._made_by = iterate, made_by
        self.global_batch_size: int | None = global_batch_size
        self.unpadded_batch_size: int | None = unpadded_batch_size
        self.owns_arrays: bool = owns_arrays
        self.padding = padding

    @classmethod
    def of(cls, ds: grain.IterDataset, *, global_batch_size: int | None = None) -> StreamDataset:
        """The batches of a dataset of the user's."""
        return cls(ds, global_batch_size=global_batch_size, owns_arrays=is_from_iterable(ds))

    def __iter__(self) -> StreamIterator:
        (parent,) = self.parents
        return self._iterate(iter(parent))

    def __repr__(self) -> str:
        return f"<{self}>"

    def __str__(self) -> str:
        return str(self._made_by)

    def with_own_arrays(self) -> StreamDataset:
        """The same batches, in arrays that nothing else refers to."""
        if self.owns_arrays:
            return self
        return StreamDataset(
            self,
            _OwningIterator,
            "copies",
            global_batch_size=self.global_batch_size,
            unpadded_batch_size=self.unpadded_batch_size,
            owns_arrays=True,
            padding=self.padding,
        )
