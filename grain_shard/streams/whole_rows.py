"""`WholeRows`: what becomes of the whole batches of a stream: checks, padding, this host's rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import grain

from grain_shard.digest import MANY_DIGITS, element_digest
from grain_shard.errors import ShardingError, StateError
from grain_shard.grain_inside import nodes
from grain_shard.host_arrays import owned
from grain_shard.reading.faults import FaultRules, Faults
from grain_shard.reading.fingerprint import OTHER_BATCH_SIZE
from grain_shard.reading.forgotten_batch import refuse_records
from grain_shard.reading.iterable import IterableBatches
from grain_shard.reading.padding import SHORT_REMEDY, Padding, pad_batch
from grain_shard.reading.whole_batching import take_rows
from grain_shard.sharding.layout import BatchLayout, round_up
from grain_shard.spans import PAD, span
from grain_shard.streams.rows import Joiner, StreamRows
from grain_shard.streams.streams import Streams, Turn
from grain_shard.streams.turns import Turns, TurnSettings
from grain_shard.trees import Batch, FlatBatch

_ROWS = "rows"  # the name under which a state has the rows of a full batch


@dataclass(frozen=True, kw_only=True)
class WholeRows(StreamRows):
    """The rows of the batches that a user's stream yields.

    Attributes:
        stream: The stream.
        checks: Functions that check the rows of the first batch, which may differ from the size
            that the stream's nodes show.
        copies: True if the arrays of a batch are copied, because other objects may refer to them.
    """

    stream: grain.IterDataset
    checks: tuple[Callable[[int], None], ...] = ()
    copies: bool = False

    @property
    def unpadded_size(self) -> int | None:
        given = None if self.padding is None else self.padding.global_batch_size
        return given or nodes.iter_batch_size(self.stream)

    @property
    def rows_in_turn(self) -> int:
        return 1  # of which each is a batch

    def checked(self, check: Callable[[int], None]) -> WholeRows:
        super().checked(check)
        return replace(self, checks=(*self.checks, lambda rows: check(self.padded_size(rows))))

    def of_host(self, layout: BatchLayout) -> WholeRows:
        return replace(self, layout=layout)

    def to_place(self, layout: BatchLayout) -> WholeRows:
        return self.with_own_arrays()

    def with_own_arrays(self) -> WholeRows:
        """Returns the rows in arrays to which no other object refers."""
        # An `IterableBatches` has copied the arrays.
        return replace(self, copies=not isinstance(self.stream, IterableBatches))

    def begin(self, learned: Mapping[str, int]) -> WholeJoiner:
        return WholeJoiner(self, learned)

    def first(self, streams: Streams, rules: FaultRules) -> Batch:
        streams.require_another_pass()
        joiner = self.begin({})
        with contextlib.closing(Turns(TurnSettings(streams, 1, Faults(rules)), {0: {}})) as turns:
            while not joiner.has_ended(turn := next(turns)):
                if (batch := joiner.join(turn)) is not None:
                    return batch
        raise ShardingError(
            "the stream of this host has no batch, so the shapes of its padding are unknown.",
            remedy='give every host at least one record, or pass remainder="drop".',
        )


class WholeJoiner(Joiner):
    """Pads the batches that a stream yields, and keeps this host's rows of each.

    Args:
        rows: The rows to keep.
        learned: The rows of a full batch, if a batch has shown it; empty at the beginning.

    Raises:
        StateError: The batches had another number of rows than the stream's ``.batch`` makes.
    """

    def __init__(self, rows: WholeRows, learned: Mapping[str, int]):
        self._rows, size = rows, rows.unpadded_size or 0
        before = learned.get(_ROWS, 0)
        if size and before not in (0, size):
            raise StateError(
                f"the state was saved with batches of {before} rows, and this stream has batches of"
                f" {size} rows.\n"
                f"  remedy: {OTHER_BATCH_SIZE}"
            )
        self.learned = {_ROWS: before or size}
        # After a restore the next batch may be the short last one, so its size says nothing.
        self._is_first = not learned

    def has_ended(self, turns: Sequence[Turn]) -> bool:
        return not turns[0].rows

    def join(self, turns: Sequence[Turn]) -> Batch | None:
        rows = self._rows
        batch = turns[0].rows[0]
        if not (rows.checks or rows.padding or rows.layout):
            return owned(batch) if rows.copies else batch
        flat = FlatBatch.of(batch)
        if self._is_first and rows.checks:
            self._check_first(flat)
        self._is_first = False
        padded_size = flat.rows
        if (padding := rows.padding) is not None:
            full = self.learned[_ROWS] or flat.rows
            self.learned = {_ROWS: full}
            padded_size = self._padded_size(flat, full, padding)
            if flat.rows < full and padding.drops_short:
                return None
        kept = None
        if rows.layout is not None:
            kept = rows.layout.rows(padded_size)
            if not self.first_digest and rows.layout.num_hosts > 1:
                self.first_digest = element_digest(flat.arrays, MANY_DIGITS)
        if kept is not None or rows.copies:
            flat = take_rows(flat, kept)
        if padding is None:
            return flat.tree
        with span(PAD):
            return pad_batch(flat, padded_size if kept is None else len(kept), padding)

    def _check_first(self, flat: FlatBatch) -> None:
        refuse_records(self._rows.stream, flat)
        if flat.rows != self._rows.unpadded_size:
            for check in self._rows.checks:
                check(flat.rows)

    def _padded_size(self, flat: FlatBatch, full: int, padding: Padding) -> int:
        """Returns the number of rows of a padded batch.

        Args:
            flat: The batch.
            full: Rows of a full batch. If it is not known before, the first batch counts as full.
            padding: The padding.

        Raises:
            ShardingError: The batch has more rows than a full one; it is short, and a short batch
                is refused; or it is not to be padded, and the shards do not divide it.
        """
        if flat.rows > full or (flat.rows < full and padding.refuses_short):
            flat.refuse(
                f"the batch has {flat.rows} rows, but a full batch has {full} rows.",
                remedy=f"if the last batch is short, {SHORT_REMEDY} Give all other batches of the"
                " stream the same number of rows.",
            )
        padded_size = round_up(full, padding.divisor)
        if not padding.pads_short and padded_size != full:
            flat.refuse(
                f"{full} rows do not split into {padding.divisor} shards.",
                remedy=f'use a batch size of {padded_size}, or pass remainder="pad".',
            )
        return padded_size
