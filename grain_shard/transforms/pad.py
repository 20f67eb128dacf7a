"""`PadToDivisible`: every batch gets the same number of rows, and a mask of the real ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from grain_shard.errors import ShardingError, require_int
from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.feeding.feed_rows import FeedPadding
from grain_shard.reading.cuts import START, Cuts, Progress
from grain_shard.reading.faults import Faults
from grain_shard.reading.fingerprint import Fingerprint
from grain_shard.reading.pad_batch import REMAINDERS, Remainder, pad_batch
from grain_shard.reading.pad_rows import PadRows
from grain_shard.reading.row_dataset import MadeBatch, Piece, RowMapDataset, RowReader
from grain_shard.reading.rows import whole_batches
from grain_shard.reading.stream_dataset import DROPPED, SeenBatches, StreamDataset
from grain_shard.sharding.layout import round_up
from grain_shard.spans import PAD, span
from grain_shard.transforms.stage import Stage
from grain_shard.trees import MASK_KEY, Batch, FlatBatch


@dataclass(frozen=True)
class PadToDivisible(Stage):
    """Pads the rows of every batch to a multiple of `divisor`, and adds a mask.

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
        pad_value: What rows of padding hold; see `PadRows`. The mask is False whatever it is.
    """

    divisor: int
    remainder: Remainder = "pad"
    mask_key: str | None = MASK_KEY
    global_batch_size: int | None = None
    pad_value: Any = 0

    def __post_init__(self) -> None:
        require_int("divisor", self.divisor, 1)
        self.padding  # noqa: B018 (refuses what is no value)
        if self.global_batch_size is not None:
            require_int("global_batch_size", self.global_batch_size, 1)
        if self.remainder not in REMAINDERS:
            raise ShardingError(
                f"remainder={self.remainder!r} is not one of {', '.join(REMAINDERS)}.",
                remedy="choose one of them.",
            )

    @property
    def padding(self) -> PadRows:
        """The rows of padding."""
        return PadRows(self.pad_value, self.mask_key)

    def of_random_access(self, ds: RowMapDataset) -> RowMapDataset:
        """The padded dataset.

        Raises:
            ShardingError: `remainder` is "error" and the last batch is short, or "drop" and it
                cannot be told which batches are short.
        """
        ds = whole_batches(ds)
        return RowMapDataset(ds, _PaddedRows(_with_remainder(ds.reader, self), self), self)

    def of_stream(self, ds: StreamDataset) -> StreamDataset:
        """The padded dataset. A batch that is short in the middle is refused when it comes."""
        size = self.global_batch_size or ds.facts.global_batch_size
        return ds.after(
            self._padded,
            self,
            global_batch_size=size and round_up(size, self.divisor),
            unpadded_batch_size=ds.facts.global_batch_size,
            rows_to_expect=size or 0,
            padding=self.padding,
        )

    def _padded(self, batch: Batch, seen: SeenBatches) -> Batch:
        """Pads a batch of a stream, of which the first is full if nothing else tells the size."""
        flat = FlatBatch.of(batch)
        rows = seen.rows = seen.rows or flat.rows
        if flat.rows > rows or (flat.rows < rows and self.remainder == "error"):
            flat.refuse(
                f"the batch has {flat.rows} rows, a full one has {rows}.",
                remedy="batch the stream with one size; a short last batch needs"
                ' remainder="pad" or "drop".',
            )
        if flat.rows < rows and self.remainder == "drop":
            return DROPPED
        padded_rows = round_up(rows, self.divisor)
        if self.remainder != "pad" and padded_rows != rows:
            flat.refuse(
                f"{rows} rows do not split into {self.divisor} shards.",
                remedy=f'batch by {padded_rows}, or pass remainder="pad".',
            )
        with span(PAD):
            return pad_batch(batch, padded_rows, self.padding)

    def of_feeds(self, ds: FeedBatches) -> FeedBatches:
        """The dataset, in which padding takes the rows of a feed that has ended."""
        return ds.padded(FeedPadding(self.divisor, self.remainder, self.padding))


def _with_remainder(reader: RowReader, pad: PadToDivisible) -> RowReader:
    """The batches of which something is to be made.

    Raises:
        ShardingError: They cannot be had as `PadToDivisible.remainder` says.
    """
    if pad.remainder == "pad":
        return reader
    if pad.remainder == "error" and reader.counts_records:
        return _without_short(reader)
    cuts, largest = reader.epochs(), max(reader.global_batch_sizes)
    if cuts is None:
        raise ShardingError(
            f"remainder={pad.remainder!r} needs to know which batches are short, and a slice"
            " stands between .batch and it.",
            remedy="use .batch(B, drop_remainder=True), or slice the records before .batch.",
        )
    if pad.remainder == "drop":
        if cuts.records < largest:
            raise ShardingError(
                "no batch is left: there are fewer records than one batch of"
                f' {largest} rows, and remainder="drop".',
                remedy='pass remainder="pad", or make the batch smaller.',
            )
        return reader.dropping_remainder()
    if cuts.has_short(reader.num_epochs):
        raise _short(f"of {largest} rows")
    return reader


def _without_short(reader: RowReader) -> RowReader:
    """Batches cut by records, if they are all full.

    Raises:
        ShardingError: One is not.
    """
    if reader.cuts.has_short(reader.num_epochs):
        begin, sizes = reader.cuts.begin, " or ".join(map(str, reader.global_batch_sizes))
        from_there = (
            f", from record {begin.record} of epoch {begin.epoch} on" if begin != START else ""
        )
        raise _short(f"of {sizes} rows{from_there}")
    return reader


def _short(batch: str) -> ShardingError:
    return ShardingError(
        f"the records do not fill the last batch {batch}.",
        remedy='pass remainder="pad" (zeros and a mask) or remainder="drop".',
    )


class _PaddedRows(RowReader):
    """A reader whose batches are all full."""

    def __init__(self, inner: RowReader, pad: PadToDivisible):
        self._inner, self._pad, self.padding = inner, pad, pad.padding
        self.reads_whole_batches = inner.reads_whole_batches

    @property
    def cuts(self) -> Cuts:
        return self._inner.cuts

    @property
    def num_epochs(self) -> int:
        return self._inner.num_epochs

    @property
    def counts_records(self) -> bool:
        return self._inner.counts_records

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        return tuple(dict.fromkeys(map(self._padded, self._inner.global_batch_sizes)))

    def global_batch_size_of(self, index: int) -> int:
        return self._padded(self._inner.global_batch_size_of(index))

    @property
    def unpadded_batch_size(self) -> int:
        return self._inner.unpadded_batch_size

    def _padded(self, global_batch_size: int) -> int:
        return round_up(self._pad.global_batch_size or global_batch_size, self._pad.divisor)

    def epochs(self) -> Cuts | None:
        return self._inner.epochs()

    def dropping_remainder(self) -> RowReader:
        return _PaddedRows(self._inner.dropping_remainder(), self._pad)

    def beginning_at(self, progress: Progress) -> RowReader:
        return self._of(self._inner.beginning_at(progress))

    def repeated(self, times: int) -> RowReader:
        return self._of(self._inner.repeated(times))

    def _of(self, inner: RowReader) -> RowReader:
        """Other batches of the same records: they may be short where these are not."""
        if self._pad.remainder == "error" and inner.counts_records:
            inner = _without_short(inner)
        return _PaddedRows(inner, self._pad)

    def fingerprint(self) -> Fingerprint:
        return {**self._inner.fingerprint(), "remainder": self._pad.remainder}

    def fields_before(self, progress: Progress) -> Fingerprint:
        return self._inner.fields_before(progress)

    @property
    def reads_many(self) -> bool:
        return self._inner.reads_many

    @property
    def only_asks_sources(self) -> bool:
        return self._inner.only_asks_sources

    @property
    def can_leave_out(self) -> bool:
        return self._pad.mask_key is not None and not self.reads_whole_batches

    def begin(
        self, indices: Sequence[int], rows: Sequence[np.ndarray | None], faults: Faults
    ) -> list[MadeBatch]:
        sizes = [
            self.global_batch_size_of(index) if chosen is None else len(chosen)
            for index, chosen in zip(indices, rows, strict=True)
        ]
        begun = self._inner.begin(indices, rows, faults)
        return [_PaddedBatch(b, size, self._pad) for b, size in zip(begun, sizes, strict=True)]

    def read(self, pieces: Sequence[Piece], until: float) -> list[list[Any]]:
        inner = [piece._replace(batch=piece.batch.inner) for piece in pieces]
        return self._inner.read(inner, until)


class _PaddedBatch(MadeBatch):
    """A batch that is filled up when it is finished."""

    def __init__(self, inner: MadeBatch, num_rows: int, pad: PadToDivisible):
        self.inner, self.size, self.faults = inner, inner.size, inner.faults
        self._num_rows, self._pad = num_rows, pad

    @property
    def most_at_a_time(self) -> int:
        return self.inner.most_at_a_time

    def write(self, elements: list[Any], start: int, until: float) -> int:
        return self.inner.write(elements, start, until)

    def finish(self) -> Batch:
        batch = self.inner.finish()
        with span(PAD):
            if self._pad.remainder != "pad":
                self._check_full(batch)
            return pad_batch(batch, self._num_rows, self._pad.padding, self.inner.bad_rows)

    def _check_full(self, batch: Batch) -> None:
        """Batches are short at the end of an epoch only, unless something moved them."""
        flat = FlatBatch.of(batch)
        if flat.rows < self._num_rows:
            flat.refuse(
                "a batch is short in the middle of an epoch: something stands between .batch and"
                " .shard_to that changes the order of batches.",
                remedy="shuffle, mix or concatenate before .batch, or use"
                " .batch(B, drop_remainder=True).",
            )
