"""`PadToDivisible`: every batch gets the same number of rows, and a mask of the real ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import grain

from grain_shard.errors import ShardingError, StateError, require_int
from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.feeding.feed_rows import Padding
from grain_shard.grain_inside import nodes
from grain_shard.reading.pad_batch import REMAINDERS, Remainder, pad_batch
from grain_shard.reading.pad_rows import PadRows
from grain_shard.reading.row_dataset import RowMapDataset
from grain_shard.reading.stream_dataset import StreamDataset, StreamIterator
from grain_shard.sharding.layout import round_up
from grain_shard.spans import PAD, READ, span
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
    def padding(self) -> Padding:
        """The padding of each batch."""
        rows = PadRows(self.pad_value, self.mask_key)
        return Padding(self.divisor, self.remainder, rows, self.global_batch_size)

    def of_random_access(self, ds: RowMapDataset) -> RowMapDataset:
        """The padded dataset.

        Raises:
            ShardingError: `remainder` is "error" and the last batch is short, or "drop" and it
                cannot be told which batches are short.
        """
        ds = ds.whole()
        return RowMapDataset(ds, ds.batching.padded(self.padding), self)

    def of_stream(self, ds: StreamDataset) -> StreamDataset:
        """The padded dataset. A batch that is short in the middle is refused when it comes."""
        size, sizes = self.global_batch_size or ds.global_batch_size, nodes.batch_sizes(ds)
        return StreamDataset(
            ds,
            lambda source: _PadIterator(source, self, size or 0, sizes),
            self,
            global_batch_size=size and round_up(size, self.divisor),
            unpadded_batch_size=ds.global_batch_size,
            owns_arrays=ds.owns_arrays,
            padding=self.padding.rows,
        )

    def of_feeds(self, ds: FeedBatches) -> FeedBatches:
        """The dataset, in which padding takes the rows of a feed that has ended."""
        return ds.padded(self.padding)


class _PadIterator(StreamIterator):
    """Takes the first batch for a full one if nothing else says how large that is.

    The size is part of the state: after a restore the first batch may be the short last one. So are
    those of every ``.batch`` that is seen, since a stream may count the batches of one.

    Args:
        source: The batches.
        pad: How to pad them.
        rows: Rows of a full batch, 0 if nothing tells.
        batch_sizes: Of each ``.batch`` above.
    """

    _PARENT, _ROWS, _BATCH_SIZES = "parent", "rows", "batch_sizes"  # the state's keys

    def __init__(
        self,
        source: grain.DatasetIterator,
        pad: PadToDivisible,
        rows: int,
        batch_sizes: list[int],
    ):
        super().__init__(source)
        self._pad, self._rows, self._known = pad, rows, rows
        self._batch_sizes = batch_sizes

    def __next__(self) -> Batch:
        remainder = self._pad.remainder
        while True:
            with span(READ):
                batch = super().__next__()
            flat = FlatBatch.of(batch)
            self._rows = self._rows or flat.rows
            if flat.rows == self._rows or (flat.rows < self._rows and remainder == "pad"):
                padded_rows = round_up(self._rows, self._pad.divisor)
                if remainder != "pad" and padded_rows != self._rows:
                    flat.refuse(
                        f"{self._rows} rows do not split into {self._pad.divisor} shards.",
                        remedy=f'batch by {padded_rows}, or pass remainder="pad".',
                    )
                with span(PAD):
                    return pad_batch(batch, padded_rows, self._pad.padding.rows)
            if flat.rows > self._rows or remainder == "error":
                flat.refuse(
                    f"the batch has {flat.rows} rows, a full one has {self._rows}.",
                    remedy="batch the stream with one size; a short last batch needs"
                    ' remainder="pad" or "drop".',
                )

    def get_state(self) -> dict[str, Any]:
        return {
            self._PARENT: super().get_state(),
            self._ROWS: self._rows,
            self._BATCH_SIZES: list(self._batch_sizes),
        }

    def set_state(self, state: dict[str, Any]) -> None:
        rows, sizes = state[self._ROWS], state[self._BATCH_SIZES]
        if self._known and rows and rows != self._known:
            self._refuse(f"batches of {rows} rows", str(self._known))
        if sizes != self._batch_sizes:
            self._refuse(f".batch({sizes})", f".batch({self._batch_sizes})")
        super().set_state(state[self._PARENT])
        self._rows = rows

    def _refuse(self, saved: str, now: str) -> NoReturn:
        raise StateError(
            f"the state was saved with {saved}, and these have {now}.\n"
            "  remedy: restore with the pipeline that saved it. In the middle of a run batches of"
            " another size can be cut of a MapDataset down to .batch, and of feeds."
        )
