"""`PadToDivisible`: every batch gets the same number of rows, and a mask of the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grain
import numpy as np

from grain_shard.errors import ShardingError, StateError, require_int
from grain_shard.grain_inside.nodes import Epoch, iter_batch_size
from grain_shard.reading.fetch import RowMapDataset, RowReader
from grain_shard.reading.pad_batch import REMAINDERS, Remainder, pad_batch
from grain_shard.reading.rows import row_reader
from grain_shard.spans import PAD, READ, span
from grain_shard.trees import Batch, FlatBatch


@dataclass(frozen=True)
class PadToDivisible:
    """Pads the rows of every batch to a multiple of `divisor`, with zeros, and adds a mask.

    Every batch gets as many rows as a full one, so a training step compiles once. The mask is
    ``bool[global_batch_size]``, True for real rows.

    Example:
        >>> import grain
        >>> ds = grain.MapDataset.range(3).map(lambda x: {"x": x}).batch(3).pipe(PadToDivisible(2))
        >>> ds[0]
        {'x': array([0, 1, 2, 0]), 'valid_mask': array([ True,  True,  True, False])}

    Attributes:
        divisor: What the number of rows must be a multiple of.
        remainder: What becomes of a short batch at the end of an epoch: "pad" it, "drop" it, or
            "error" to refuse it.
        mask_key: The key of the mask in the batch; None for no mask.
        global_batch_size: Rows of a full batch before padding; by default that of the dataset.
    """

    divisor: int
    remainder: Remainder = "pad"
    mask_key: str | None = "valid_mask"
    global_batch_size: int | None = None

    def __post_init__(self):
        require_int("divisor", self.divisor, 1)
        if self.global_batch_size is not None:
            require_int("global_batch_size", self.global_batch_size, 1)
        if self.remainder not in REMAINDERS:
            raise ShardingError(
                f"remainder={self.remainder!r} is not one of {', '.join(REMAINDERS)}.",
                remedy="choose one of them.",
            )

    def __call__(self, ds: Any) -> Any:
        """The padded dataset, of the same kind.

        Raises:
            ShardingError: `remainder` is "error" and the last batch is short, or "drop" and it
                cannot be told which batches are short.
        """
        if isinstance(ds, grain.MapDataset):
            return _PadMapDataset(ds, self)
        return _PadIterDataset(ds, self)

    def padded(self, global_batch_size: int) -> int:
        """The number of rows after padding."""
        return -(-global_batch_size // self.divisor) * self.divisor


class _PaddedRows:
    """A reader whose batches are all full."""

    def __init__(self, inner: RowReader, pad: PadToDivisible):
        self._inner, self._pad = inner, pad
        self.reads_whole_batches = inner.reads_whole_batches
        if pad.remainder == "pad":
            return
        epoch = inner.epoch()
        if epoch is None:
            raise ShardingError(
                f"remainder={pad.remainder!r} needs to know which batches are short, and a slice"
                " stands between .batch and it.",
                remedy="use .batch(B, drop_remainder=True), or slice the records before .batch.",
            )
        if pad.remainder == "drop" and not epoch.full:
            raise ShardingError(
                "no batch is left: there are fewer records than one batch of"
                f' {inner.global_batch_size} rows, and remainder="drop".',
                remedy='pass remainder="pad", or make the batch smaller.',
            )
        if pad.remainder == "error" and epoch.full < epoch.batches:
            raise ShardingError(
                f"the records do not fill the last batch of {inner.global_batch_size} rows.",
                remedy='pass remainder="pad" (zeros and a mask) or remainder="drop".',
            )

    @property
    def global_batch_size(self) -> int:
        return self._pad.padded(self._pad.global_batch_size or self._inner.global_batch_size)

    def epoch(self) -> Epoch | None:
        epoch = self._inner.epoch()
        if epoch is not None and self._pad.remainder == "drop":
            return Epoch(batches=epoch.full, full=epoch.full)
        return epoch

    @property
    def reads_many(self) -> bool:
        return self._inner.reads_many

    def num_batches(self) -> int:
        batches, epoch = self._inner.num_batches(), self._dropping()
        return batches if epoch is None else batches // epoch.batches * epoch.full

    def fetch(self, indices: Sequence[int], rows: np.ndarray) -> Sequence[Any]:
        if (epoch := self._dropping()) is not None:
            indices = [i // epoch.full * epoch.batches + i % epoch.full for i in indices]
        return self._inner.fetch(indices, rows)

    def make(self, fetched: Any, rows: np.ndarray) -> Batch:
        batch = self._inner.make(fetched, rows)
        with span(PAD):
            if self._pad.remainder != "pad":
                self._check_full(batch, rows)
            return pad_batch(batch, len(rows), self._pad.mask_key)

    def _check_full(self, batch: Batch, rows: np.ndarray) -> None:
        """Batches are short at the end of an epoch only, unless something moved them."""
        flat = FlatBatch.of(batch)
        if flat.rows < len(rows):
            flat.refuse(
                "a batch is short in the middle of an epoch: something stands between .batch and"
                " .shard_to that changes the order of batches.",
                remedy="shuffle, mix or concatenate before .batch, or use"
                " .batch(B, drop_remainder=True).",
            )

    def _dropping(self) -> Epoch | None:
        return self._inner.epoch() if self._pad.remainder == "drop" else None


class _PadMapDataset(RowMapDataset):
    def __init__(self, parent: grain.MapDataset, pad: PadToDivisible):
        super().__init__(parent, _PaddedRows(row_reader(parent), pad))
        self._pad = pad

    def __str__(self) -> str:
        return str(self._pad)


class _PadIterDataset(grain.IterDataset):
    def __init__(self, parent: grain.IterDataset, pad: PadToDivisible):
        super().__init__(parent)
        self._pad = pad

    def __iter__(self) -> grain.DatasetIterator:
        (parent,) = self.parents
        # Of feeds, and of what was validated, it is an attribute.
        known = getattr(parent, "global_batch_size", None) or iter_batch_size(parent)
        return _PadIterator(iter(parent), self._pad, self._pad.global_batch_size or known or 0)

    def __str__(self) -> str:
        return str(self._pad)


class _PadIterator(grain.DatasetIterator):
    """Takes the first batch for a full one if nothing else says how large that is.

    The size is part of the state: after a restore the first batch may be the short last one.
    """

    def __init__(self, parent: grain.DatasetIterator, pad: PadToDivisible, rows: int):
        super().__init__(parent)
        self._source, self._pad, self._rows, self._known = parent, pad, rows, rows

    def __next__(self) -> Batch:
        remainder = self._pad.remainder
        while True:
            with span(READ):
                batch = next(self._source)
            flat = FlatBatch.of(batch)
            self._rows = self._rows or flat.rows
            if flat.rows == self._rows or (flat.rows < self._rows and remainder == "pad"):
                if remainder != "pad" and self._rows % self._pad.divisor:
                    flat.refuse(
                        f"{self._rows} rows do not split into {self._pad.divisor} shards.",
                        remedy=f'batch by {self._pad.padded(self._rows)}, or pass remainder="pad".',
                    )
                with span(PAD):
                    return pad_batch(batch, self._pad.padded(self._rows), self._pad.mask_key)
            if flat.rows > self._rows or remainder == "error":
                flat.refuse(
                    f"the batch has {flat.rows} rows, a full one has {self._rows}.",
                    remedy="batch the stream with one size; a short last batch needs"
                    ' remainder="pad" or "drop".',
                )

    def get_state(self) -> dict[str, Any]:
        return {"parent": self._source.get_state(), "rows": self._rows}

    def set_state(self, state: dict[str, Any]) -> None:
        if self._known and state["rows"] and state["rows"] != self._known:
            raise StateError(
                f"the state was saved with batches of {state['rows']} rows, and these have"
                f" {self._known}.\n  remedy: restore with the pipeline that saved it."
            )
        self._source.set_state(state["parent"])
        self._rows = state["rows"]
