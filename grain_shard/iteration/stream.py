"""`Stream`: the batches of an `IterDataset`, one after the other."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Mapping
from typing import Any, cast

from grain_shard.background import Background
from grain_shard.errors import ShardingError, StateError
from grain_shard.grain_inside.flags import mark_flags_as_parsed
from grain_shard.grain_inside.read_ahead import replace_records
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.state_files import KIND, STREAM
from grain_shard.iteration.host_batches import THREAD, HostBatches, Opened
from grain_shard.reading.faults import FaultCounts, FaultRules, Faults
from grain_shard.reading.iterable import require_another_pass
from grain_shard.reading.retried_records import RetriedRecords
from grain_shard.reading.state_json import from_json, to_json
from grain_shard.reading.stream_dataset import BatchIterator, StreamDataset, StreamIterator
from grain_shard.tasks import Producer, naming_closed
from grain_shard.trees import Batch


class Stream(HostBatches):
    """The batches of a stream; a position is the pickled state of its iterator.

    Args:
        ds: This host's batches, in arrays that nothing else refers to.
        buffer_size: Batches that may wait on the host or be in the making.
        rows: What the stream yields on each of several hosts, "global" or "local".
        fault_rules: What becomes of reads that fail, of the random-access parts that Grain reads.
    """

    kind = STREAM
    ends_by_vote = True
    _PARENT = "parent"  # the state's key for that of Grain's iterator
    # Nothing can be compared of an arbitrary iterator.
    fingerprint: Mapping[str, Any] = {}
    compared: Mapping[str, Any] = {}

    def __init__(
        self,
        ds: StreamDataset,
        *,
        buffer_size: int,
        rows: str = GLOBAL,
        fault_rules: FaultRules = FaultRules(),  # noqa: B008 (it is frozen)
    ):
        self._ds, self._buffer_size, self.rows = ds, buffer_size, rows
        self._fault_rules = fault_rules
        self.padding = ds.padding
        self._position: bytes | None = None  # of the latest beginning

    def num_batches(self) -> int | None:
        return None

    def _iterate(self) -> BatchIterator:
        faults = Faults(self._fault_rules)
        ds = replace_records(self._ds, lambda records: RetriedRecords(records, faults))
        return _WithFaults(cast(StreamDataset, ds), faults)

    def open(self, position: bytes | None) -> Opened:
        mark_flags_as_parsed()  # there may be an .mp_prefetch in the stream
        iterator = self._iterate()
        if position is not None:
            try:
                iterator.go_to(position)
            except (KeyError, TypeError, IndexError) as error:
                raise StateError(
                    f"the stream cannot take this state: {type(error).__name__}: {error}.\n"
                    "  remedy: restore with the pipeline that saved it."
                ) from error
        batches = Background(
            lambda item: item,
            _WithPosition(iterator, self.kind),
            buffer_size=self._buffer_size,
            name=THREAD,
        )
        self._position = iterator.position()
        return Opened(
            self._position,
            batches,
            first_digest=lambda: iterator.first_digest,
            faults=iterator.faults,
        )

    def first(self) -> Batch:
        require_another_pass(self._ds)
        with contextlib.closing(self._iterate()) as iterator:
            batch = next(iterator, None)
        if batch is None:
            raise ShardingError(
                "this host's stream has no batch at all, so nothing tells what its padding should"
                " look like.",
                remedy='give every host some records, or pass remainder="drop".',
            )
        return batch

    def next_batch(self, position: bytes) -> Mapping[str, Any]:
        return {}  # a stream does not count its batches

    def to_state(self, position: bytes) -> dict[str, Any]:
        return {KIND: self.kind, self._PARENT: to_json(pickle.loads(position))}

    def from_state(self, state: dict[str, Any]) -> bytes:
        if self._position is not None:
            self.to_state(self._position)  # what has no state cannot take one
        if not isinstance(state, dict) or set(state) != {KIND, self._PARENT}:
            raise StateError(
                f"this is no state of a stream: {state!r}.\n"
                "  remedy: restore with the pipeline that saved it."
            )
        return pickle.dumps(from_json(state[self._PARENT]))


class _WithFaults(StreamIterator):
    """The batches of a stream, with what was counted of the reads below them."""

    def __init__(self, ds: StreamDataset, faults: Faults):
        self._batches, self._faults = iter(ds), faults
        super().__init__(self._batches)

    def __next__(self) -> Batch:
        batch = super().__next__()
        self.first_digest = self._batches.first_digest
        return batch

    def faults(self) -> FaultCounts:
        return self._faults.counts()

    def stop(self) -> None:
        self._faults.stop()
        self._batches.stop()

    def close(self) -> None:
        self.stop()
        self._batches.close()


class _WithPosition(Producer[tuple[Batch, bytes]]):
    """Batches with the position after each; closes where they come from."""

    def __init__(self, iterator: BatchIterator, kind: str):
        self._iterator, self._kind = iterator, kind

    def __next__(self) -> tuple[Batch, bytes]:
        return next(self._iterator), self._iterator.position()

    def stop(self) -> None:
        self._iterator.stop()

    def close(self) -> None:
        with naming_closed(f"this host's {self._kind}"):
            self._iterator.close()
