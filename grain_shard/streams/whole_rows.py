"""`WholeRows`: checks and pads the whole batches of a stream, and keeps this host's rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from grain_shard.digest import element_digest
from grain_shard.errors import ShardingError, StateError
from grain_shard.grain_inside import nodes
from grain_shard.host_arrays import owned
from grain_shard.reading.faults import FaultRules, Faults
from grain_shard.reading.fingerprint import OTHER_BATCH_SIZE
from grain_shard.reading.forgotten_batch import refuse_records
from grain_shard.reading.from_iterable import IterableBatches, require_another_pass
from grain_shard.reading.host_rows import CheckSize
from grain_shard.reading.padding import SHORT_REMEDY, Padding, pad_batch
from grain_shard.reading.whole_batching import take_rows
from grain_shard.spans import PAD, span
from grain_shard.streams.stream_rows import LEFT_OUT, Joiner, StreamRows
from grain_shard.streams.streams import StreamReads, Turn
from grain_shard.streams.turns import Turns
from grain_shard.trees import Batch, FlatBatch

_ROWS = "rows"  # the key of a state for the number of rows of a full batch


@dataclass(frozen=True, kw_only=True)
class WholeRows(StreamRows):
    """The rows of the batches that a user's stream yields.

    Attributes:
        checks: Functions that check the number of rows of the first batch, because it may differ
            from the size that the pipeline declares.
        copies: True if the arrays of a batch are copied, because other objects may refer to them.
    """

    checks: tuple[Callable[[int], None], ...] = ()
    copies: bool = False

    @property
    def unpadded_size(self) -> int | None:
        given = None if self.padding is None else self.padding.global_batch_size
        return given or nodes.iter_batch_size(self.streams.make(0))

    @property
    def rows_in_turn(self) -> int:
        return 1  # the row is a whole batch

    def checked(self, check: CheckSize) -> WholeRows:
        super().checked(check)
        return replace(self, checks=(*self.checks, lambda rows: check(self.padded_size(rows), 1)))

    def with_own_arrays(self) -> WholeRows:
        # An `IterableBatches` has copied the arrays.
        return replace(self, copies=not isinstance(self.streams.make(0), IterableBatches))

    def begin(self, learned: Mapping[str, int]) -> WholeJoiner:
        return WholeJoiner(self, learned)

    def first(self, rules: FaultRules) -> Batch:
        require_another_pass(self.streams.make(0))
        reads, joiner = StreamReads(Faults(rules)), self.begin({})
        with contextlib.closing(Turns(self.streams, reads, {0: {}})) as turns:
            while not joiner.has_ended(turn := next(turns)):
                if (batch := joiner.join(turn)) is not LEFT_OUT:
                    return batch
        raise ShardingError(
            "the stream of this host has no batch, so the shapes of its padding are unknown.",
            remedy='give every host at least one record, or pass remainder="drop".',
        )


class WholeJoiner(Joiner):
    """Pads the batches that a stream yields, and keeps this host's rows of each.

    Args:
        rows: The rows to keep.
        learned: The number of rows of a full batch, from a saved state; empty at the beginning.

    Raises:
        StateError: The state was saved with another number of rows in a batch.
    """

    def __init__(self, rows: WholeRows, learned: Mapping[str, int]):
        self._rows, size = rows, rows.unpadded_size or 0
        saved = learned.get(_ROWS, 0)
        if size and saved not in (0, size):
            raise StateError(
                f"the state was saved with batches of {saved} rows, and this stream has batches of"
                f" {size} rows.\n  remedy: {OTHER_BATCH_SIZE}"
            )
        self.learned = {_ROWS: saved or size}
        # After a restore the next batch may be the short last one, so its size says nothing.
        self._is_restored = bool(saved)
        self._has_begun = False
        self._padded_size = 0  # rows of each batch with padding; known from the first batch on

    def has_ended(self, turns: Sequence[Turn]) -> bool:
        return not turns[0].rows

    def join(self, turns: Sequence[Turn]) -> Batch:
        rows, batch = self._rows, turns[0].rows[0]
        if not (rows.checks or rows.padding or rows.layout):  # no stage changes the batch
            return owned(batch) if rows.copies else batch
        flat = FlatBatch.of(batch)
        if not self._has_begun:
            self._begin(flat)
        if (padding := rows.padding) is not None and self._is_left_out(flat, padding):
            return LEFT_OUT
        size = self._padded_size or flat.rows  # `_padded_size` is 0 if batches are not padded
        if rows.layout is not None:
            kept = rows.layout.rows(size)
            flat, size = take_rows(flat, kept), len(kept)
        elif rows.copies:
            flat = take_rows(flat, None)
        if padding is None:
            return flat.tree
        with span(PAD):
            return pad_batch(flat, size, padding)

    def _begin(self, flat: FlatBatch) -> None:
        """Checks the first batch, and learns from it the size of a full batch.

        The first batch counts as full if the size was unknown.

        Raises:
            ShardingError: The batch is a single record; a check of its size fails; or the shards do
                not divide its rows, and short batches are not padded.
        """
        rows = self._rows
        if rows.checks and not self._is_restored:  # a restored run may begin with the short batch
            refuse_records(rows.streams.make(0), flat)
            # The declared size was checked when the dataset was built.
            if flat.rows != rows.unpadded_size:
                for check in rows.checks:
                    check(flat.rows)
        if rows.layout is not None and rows.layout.num_hosts > 1:  # the hosts compare it
            self.first_digest = element_digest(flat.arrays)
        if rows.padding is not None:
            full = self.learned[_ROWS] or flat.rows  # 0 if it was unknown
            self.learned = {_ROWS: full}
            self._padded_size = rows.padded_size(full)
            if not rows.padding.pads_short and self._padded_size != full:
                flat.refuse(
                    f"{full} rows do not split into {rows.padding.divisor} shards.",
                    remedy=f'use a batch size of {self._padded_size}, or pass remainder="pad".',
                )
        self._has_begun = True

    def _is_left_out(self, flat: FlatBatch, padding: Padding) -> bool:
        """Returns True if the batch is short, and `padding` drops short batches.

        Raises:
            ShardingError: The batch has more rows than a full batch; or it is short, and `padding`
                refuses short batches.
        """
        full = self.learned[_ROWS]
        if flat.rows > full or (flat.rows < full and padding.refuses_short):
            flat.refuse(
                f"the batch has {flat.rows} rows, but a full batch has {full} rows.",
                remedy=f"if the last batch is short, {SHORT_REMEDY} Give all other batches of the"
                " stream the same number of rows.",
            )
        return flat.rows < full and padding.drops_short
