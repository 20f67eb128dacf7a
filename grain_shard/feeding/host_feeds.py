"""How this host's batches are made of feeds: the third kind of `HostBatches`.

The host runs the feeds whose rows it holds, and joins what they give, batch by batch.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Sharding

from grain_shard.background import Background
from grain_shard.errors import ShardingError
from grain_shard.feeding.feed_batches import FeedBatches
from grain_shard.feeding.feed_pool import FeedPool, Piece
from grain_shard.feeding.feed_rows import ENDED, MISSING, FeedStacker, named
from grain_shard.hosts.ends import Announced
from grain_shard.hosts.rounds import Rounds
from grain_shard.iteration.host_batches import Opened, let_grain_read_its_flags
from grain_shard.reading.pad_batch import Remainder, pad_batch
from grain_shard.sharding.layout import BatchLayout, mesh_axes_of, shards_by_host
from grain_shard.spans import BATCH, span
from grain_shard.trees import Batch


class FeedsPosition(NamedTuple):
    """How many batches were handed out, and where this host's feeds then stood, pickled."""

    step: int
    entries: dict[int, bytes]


class HostFeeds:
    """The rows of `FeedBatches` that this host holds.

    Args:
        ds: The batches of all feeds.
        layout: Which rows this host holds.
        remainder: What becomes of a batch for which a feed has not rows enough: "pad" it, until
            the last feed has ended; "drop" it, and end; or "error".
        mask_key: The key of the mask in the batch; None for no mask.
        buffer_size: Batches that may wait on the host or be in the making.
        num_threads: Threads that run feeds side by side; None for one, as Python's interpreter runs
            one at a time, and switching between them costs a tenth of what packing takes.
    """

    def __init__(
        self,
        ds: FeedBatches,
        layout: BatchLayout,
        *,
        remainder: Remainder,
        mask_key: str | None,
        buffer_size: int,
        num_threads: int | None,
    ):
        self._ds, self._remainder, self._mask_key = ds, remainder, mask_key
        self._rows = rows_by_feed(ds, layout)
        self._num_rows = len(layout.rows(layout.padded(ds.global_batch_size)))
        self._buffer_size, self._num_threads = buffer_size, num_threads or 1

    def num_batches(self) -> int | None:
        return None

    def open(self, position: FeedsPosition | None, rounds: Rounds | None) -> Opened:
        let_grain_read_its_flags()  # there may be an .mp_prefetch in a feed
        position = position or FeedsPosition(0, dict.fromkeys(self._rows, pickle.dumps({})))
        pool = FeedPool(
            self._ds, {feed: pickle.loads(entry) for feed, entry in position.entries.items()}
        )
        stacker, step = FeedStacker(), position.step + 1

        def make(number: int) -> tuple[Batch | None, FeedsPosition]:
            pieces = pool.take(number)
            with span(BATCH):
                batch = None if self._ends_with(pieces) else self._join(pieces, stacker)
            return batch, FeedsPosition(step + number, {p.feed: p.entry for p in pieces})

        # With other hosts, batches wait where they have been announced: beyond those in the making.
        waiting = 0 if rounds is None else max(1, self._buffer_size - self._num_threads)
        made = Background(
            make,
            pool,
            buffer_size=max(1, self._buffer_size - waiting),
            num_threads=self._num_threads,
            name="grain-shard-feed",
        )
        batches = _UntilNone(made)
        return Opened(
            position, batches if rounds is None else _Announcing(batches, rounds, waiting)
        )

    def _ends_with(self, pieces: Sequence[Piece]) -> bool:
        """Whether this host has no batch to make of what its feeds gave.

        Raises:
            ShardingError: A feed gave fewer rows than it should, which is to be an error.
        """
        full = self._ds.feed_batch_size
        short = [piece for piece in pieces if len(piece.rows) < full]
        if not any(piece.rows for piece in pieces):
            return True
        if short and self._remainder == "error":
            raise ShardingError(
                f"feed {short[0].feed} has {len(short[0].rows)} rows left, of the {full} that each"
                " feed gives to a batch.",
                remedy='pass remainder="pad" (zeros and a mask) or remainder="drop".',
            )
        return bool(short) and self._remainder == "drop"

    def _join(self, pieces: Sequence[Piece], stacker: FeedStacker) -> Batch:
        """The batch of this host's rows, with zeros where feeds lack some, and the mask."""
        rows, feeds = [], []
        for piece in pieces:
            for row in piece.rows[:1]:
                stacker.learn(row)
            for place in self._rows[piece.feed]:
                rows.append(piece.rows[place] if place < len(piece.rows) else MISSING)
                feeds.append(piece.feed)
        batch = stacker.stack(rows, feeds)
        padded = pad_batch(batch, self._num_rows, self._mask_key)  # if shards do not divide it
        if self._mask_key is not None:
            padded[self._mask_key][: len(rows)] = [row is not MISSING for row in rows]
        return padded

    def first(self) -> Batch:
        """A batch of padding, for a host of which no feed has had a row yet.

        Raises:
            ShardingError: No feed of any host has one.
        """
        stacker = FeedStacker()
        nothing = [Piece(feed, [], b"") for feed in self._rows]
        for feed in range(self._ds.num_feeds):
            (reader,) = self._ds.readers({feed: {}}).values()
            with named(feed, self._ds.num_feeds):
                rows = reader.take(1)
                reader.close()
            if rows:
                stacker.learn(rows[0])
                return self._join(nothing, stacker)
        raise ShardingError(
            "no feed has a row, so nothing tells what a batch looks like.",
            remedy="check the source, and what make_feed filters out.",
        )

    def past_end(self, position: FeedsPosition) -> FeedsPosition:
        """The position after a batch for which this host's feeds had no row any more."""
        ended = pickle.dumps(ENDED)
        return FeedsPosition(position.step + 1, dict.fromkeys(position.entries, ended))

    def place(self, position: FeedsPosition) -> int | None:
        return position.step

    def to_state(self, position: FeedsPosition) -> dict[str, Any]:
        entries = {feed: pickle.loads(entry) for feed, entry in position.entries.items()}
        return self._ds.to_state(position.step, entries)

    def from_state(self, state: dict[str, Any]) -> FeedsPosition:
        entries = self._ds.from_state(state, self._rows)
        return FeedsPosition(state["step"], {f: pickle.dumps(e) for f, e in entries.items()})


def rows_by_feed(ds: FeedBatches, layout: BatchLayout) -> dict[int, list[int]]:
    """The feeds whose rows a host holds, and which of each feed's rows of a batch these are.

    Example:
        >>> from grain_shard.feeding.feed_batches import feeds
        >>> ds = feeds(lambda feed: ..., num_feeds=4).batch(8)
        >>> rows_by_feed(ds, BatchLayout(divisor=8, shards=(2, 3, 4)))
        {1: [0, 1], 2: [0]}
    """
    rows = layout.rows(layout.padded(ds.global_batch_size))
    feeds, places = np.divmod(rows[rows < ds.global_batch_size], ds.feed_batch_size)
    return {int(feed): places[feeds == feed].tolist() for feed in np.unique(feeds)}


def check_feeds(ds: FeedBatches, shardings: Sequence[Sharding], remainder: Remainder) -> None:
    """Refuses what the hosts of a mesh cannot share among them.

    Args:
        ds: The batches of all feeds.
        shardings: Of their leaves.
        remainder: Whether rows of padding may be added to each batch ("pad").

    Raises:
        ShardingError: There are fewer feeds than hosts that hold different rows, a host has no row
            but padding, or the shards do not divide the batch and it must not be padded.
    """
    divisor, held = shards_by_host(shardings)
    mesh_axes = mesh_axes_of(shardings)
    groups, up = len(set(held.values())), -(-ds.global_batch_size // divisor) * divisor
    if remainder != "pad" and up != ds.global_batch_size:
        raise ShardingError(
            f"a batch of {ds.global_batch_size} rows does not split into {divisor} shards.",
            mesh_axes=mesh_axes,
            remedy=f'use a batch size of {up}, or remainder="pad".',
        )
    if ds.num_feeds < groups:
        raise ShardingError(
            f"{ds.num_feeds} feeds are too few for {groups} hosts that hold different rows.",
            mesh_axes=mesh_axes,
            remedy="start with as many feeds as the most hosts that the run will ever see; their"
            " number is fixed for the life of a run.",
        )
    for host, shards in held.items():
        if min(shards) * (up // divisor) >= ds.global_batch_size:
            raise ShardingError(
                f"host {host} would hold nothing but padding: {divisor} shards of a batch of"
                f" {ds.global_batch_size} rows.",
                mesh_axes=mesh_axes,
                remedy=f"use a batch size that is a multiple of {divisor}.",
            )


class _UntilNone(Iterator[tuple[Batch, FeedsPosition]]):
    """The batches up to the first that is None."""

    def __init__(self, made: Background[int, tuple[Batch | None, FeedsPosition]]):
        self._made = made

    def __next__(self) -> tuple[Batch, FeedsPosition]:
        batch, position = next(self._made)
        if batch is None:
            self._made.stop()
            raise StopIteration
        return batch, position

    def stop(self) -> None:
        self._made.stop()

    def close(self) -> None:
        self._made.close()


class _Announcing(Iterator[tuple[Batch, FeedsPosition]]):
    """Announces each batch to the other hosts once it has been made, ahead of who takes it."""

    def __init__(self, batches: _UntilNone, rounds: Rounds, buffer_size: int):
        self._batches = batches
        announced = Announced(batches, rounds, lambda: "")
        self._stage = Background(
            lambda ticket: ticket, announced, buffer_size=buffer_size, name="grain-shard-host"
        )

    def __next__(self) -> tuple[Batch, FeedsPosition]:
        return next(self._stage)

    def stop(self) -> None:
        self._stage.stop()
        self._batches.stop()  # else the stage's thread would wait for the feeds

    def close(self) -> None:
        self.stop()
        self._stage.close()
        self._batches.close()
