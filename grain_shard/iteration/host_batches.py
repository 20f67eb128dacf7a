"""How this host's batches are produced, and which state goes with each.

Three kinds. `RandomAccess` reads batch k of a `MapDataset`: its position is k, whoever reads it,
in whatever thread or process. `Stream` asks an `IterDataset` for its next batch: its position is
whatever Grain's iterator says after that batch. `HostFeeds`, in a file of its own, joins the rows
of many streams: its position is that of each.
"""

from __future__ import annotations

import gc
import os
import pickle
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import grain
from absl import flags

from grain_shard.background import Background
from grain_shard.errors import ShardingError, StateError
from grain_shard.host_arrays import owned
from grain_shard.hosts.ends import Announced
from grain_shard.hosts.rounds import Rounds
from grain_shard.hosts.state_json import from_json, to_json
from grain_shard.reading.fetch import Fetches, FetchingMapDataset
from grain_shard.reading.fingerprint import Fingerprint, check_fingerprint
from grain_shard.trees import Batch

Position = Any
_THREAD = "grain-shard-host"


class Opened(NamedTuple):
    """A position, and an iterator of each batch from there with the position after it."""

    position: Position
    batches: Iterator[tuple[Batch, Position]]  # with stop() and close()


class HostBatches(Protocol):
    """A sequence of this host's batches that can be opened at any position."""

    def open(self, position: Position | None, rounds: Rounds | None) -> Opened:
        """Starts at a position, or at the beginning.

        Args:
            position: Where to start; None for the beginning.
            rounds: Where a stream posts, for the other hosts, how far it goes.
        """
        ...

    def num_batches(self) -> int | None:
        """The length of one pass; None if only the end tells it."""
        ...

    def first(self) -> Batch:
        """The first batch, for its shapes; read here and now.

        Raises:
            ShardingError: There is none.
        """
        ...

    def place(self, position: Position) -> int | None:
        """The index of the next batch, if it is the same on every host."""
        ...

    def to_state(self, position: Position) -> dict[str, Any]:
        """The position as plain JSON, if what the user wrote allows it."""
        ...

    def from_state(self, state: dict[str, Any]) -> Position:
        """The position that a state was made from.

        Raises:
            StateError: The state belongs to something else.
        """
        ...


class RandomAccess:
    """The batches of a `MapDataset`.

    Args:
        ds: A dataset of this host's batches.
        fingerprint: What a state must agree with.
        buffer_size: Batches that may wait on the host or be in the making.
        num_threads: Threads that each make a batch; None chooses by the machine.
        num_workers: Grain worker processes that make them instead, if not 0.
    """

    def __init__(
        self,
        ds: grain.MapDataset,
        fingerprint: Fingerprint,
        *,
        buffer_size: int,
        num_threads: int | None,
        num_workers: int,
    ):
        self._ds, self._fingerprint, self._buffer_size = ds, fingerprint, buffer_size
        # A thread makes a whole batch, so more of them than the buffer has room for would idle.
        self._num_threads = num_threads or min(buffer_size, os.cpu_count() or 1)
        self._num_workers = num_workers

    def num_batches(self) -> int | None:
        return len(self._ds)

    def open(self, position: int | None, rounds: Rounds | None = None) -> Opened:
        start = position or 0
        indices = range(start, len(self._ds))
        if not self._num_workers or not indices:
            make, tickets = self._ds.__getitem__, zip(indices, indices, strict=True)
            if isinstance(self._ds, FetchingMapDataset) and self._ds.reads_many:
                make, tickets = self._ds.make, Fetches(self._ds, indices, self._buffer_size)
            batches = Background(
                lambda ticket: (make(ticket[1]), ticket[0] + 1),
                tickets,
                buffer_size=self._buffer_size,
                num_threads=self._num_threads,
                name=_THREAD,
            )
            return Opened(start, batches)
        # The workers hold the buffer; one batch waits here, out of their shared memory.
        from_workers = iter(self._in_workers(self._ds[start:]))
        batches = Background(
            lambda ticket: (owned(ticket[1]), ticket[0] + 1),
            _Numbered(from_workers, start),
            buffer_size=1,
            name=_THREAD,
        )
        return Opened(start, batches)

    def _in_workers(self, ds: grain.MapDataset) -> grain.IterDataset:
        let_grain_read_its_flags()
        per_worker = max(1, self._buffer_size // self._num_workers)
        # In a worker, one thread makes the next batch while the last one is being sent.
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=1)
        return ds.to_iter_dataset(options).mp_prefetch(
            grain.MultiprocessingOptions(self._num_workers, per_worker_buffer_size=per_worker)
        )

    def first(self) -> Batch:
        return self._ds[0]

    def place(self, position: int) -> int | None:
        return position

    def to_state(self, position: int) -> dict[str, Any]:
        return {"batch": position, **self._fingerprint}

    def from_state(self, state: dict[str, Any]) -> int:
        check_fingerprint(state, self._fingerprint)
        batch, batches = state["batch"], len(self._ds)
        if type(batch) is not int or not 0 <= batch <= batches:
            raise StateError(
                f"the state stands at batch {batch!r} of {batches}.\n"
                "  remedy: pass what get_state() gave, unchanged."
            )
        return batch


def let_grain_read_its_flags() -> None:
    """Grain reads absl's flags to start a worker, and only absl.app.run parses them (grain#1355).

    A plain script, a notebook or pytest never does.
    """
    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


class _Numbered(Iterator[tuple[int, Batch]]):
    """Batches with their indices; closes where they come from."""

    def __init__(self, batches: grain.DatasetIterator, start: int):
        self._batches: Any = batches
        self._next = start

    def __next__(self) -> tuple[int, Batch]:
        batch = next(self._batches)
        self._next += 1
        return self._next - 1, batch

    def close(self) -> None:
        batches, self._batches = self._batches, iter(())
        batches.close()
        # Grain's iterators are in reference cycles, with the semaphores of their processes. If the
        # collector comes upon those while others are being made, they leak.
        del batches
        gc.collect()


class Stream:
    """The batches of an `IterDataset`; a position is the pickled state of its iterator.

    Args:
        ds: A dataset of this host's batches.
        buffer_size: Batches that may wait on the host or be in the making.
    """

    def __init__(self, ds: grain.IterDataset, *, buffer_size: int):
        self._ds, self._buffer_size = ds, buffer_size

    def num_batches(self) -> int | None:
        return None

    def open(self, position: bytes | None, rounds: Rounds | None = None) -> Opened:
        let_grain_read_its_flags()  # there may be an .mp_prefetch in the stream
        iterator = iter(self._ds)
        if position is not None:
            try:
                iterator.set_state(pickle.loads(position))
            except (KeyError, TypeError, IndexError) as error:
                raise StateError(
                    f"the stream cannot take this state: {type(error).__name__}: {error}.\n"
                    "  remedy: restore with the pipeline that saved it."
                ) from error
        stream: Iterator[tuple[Batch, bytes]] = _WithPosition(iterator)
        if rounds is not None:
            stream = Announced(stream, rounds, lambda: getattr(iterator, "first_digest", ""))
        batches = Background(
            lambda ticket: ticket, stream, buffer_size=self._buffer_size, name=_THREAD
        )
        return Opened(_position(iterator), batches)

    def first(self) -> Batch:
        iterator = iter(self._ds)
        batch = next(iterator, None)
        iterator.close()
        if batch is None:
            raise ShardingError(
                "this host's stream has no batch at all, so nothing tells what its padding should"
                " look like.",
                remedy='give every host some records, or pass remainder="drop".',
            )
        return batch

    def past_end(self, position: bytes) -> bytes:
        """The position after a batch for which this host had no row any more."""
        return position

    def place(self, position: bytes) -> None:
        return None  # each host's own

    def to_state(self, position: bytes) -> dict[str, Any]:
        return {"parent": to_json(pickle.loads(position))}

    def from_state(self, state: dict[str, Any]) -> bytes:
        if not isinstance(state, dict) or set(state) != {"parent"}:
            raise StateError(
                f"this is no state of a stream: {state!r}.\n"
                "  remedy: restore with the pipeline that saved it."
            )
        return pickle.dumps(from_json(state["parent"]))


class _WithPosition(Iterator[tuple[Batch, bytes]]):
    """Batches with the position after each; closes where they come from."""

    def __init__(self, iterator: grain.DatasetIterator):
        self._iterator = iterator

    def __next__(self) -> tuple[Batch, bytes]:
        return next(self._iterator), _position(self._iterator)

    def close(self) -> None:
        self._iterator.close()


def _position(iterator: grain.DatasetIterator) -> bytes:
    # A copy, since iterators may hand out what they go on to change; pickle is the fastest one.
    return pickle.dumps(iterator.get_state())
