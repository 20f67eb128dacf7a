"""`Stream`: the batches of an `IterDataset`, one after the other."""

from __future__ import annotations

import contextlib
import pickle
from typing import Any

from grain_shard.errors import ShardingError, StateError, shortened
from grain_shard.grain_inside.flags import let_grain_read_its_flags
from grain_shard.hosts.compare import GLOBAL
from grain_shard.hosts.state_files import KIND, STREAM
from grain_shard.iteration.compared_batches import Reread
from grain_shard.iteration.host_batches import HostBatches, Opened, opened_in_order
from grain_shard.reading.contents import Contents
from grain_shard.reading.faults import FaultRules, Faults
from grain_shard.reading.iterable import require_another_pass, require_new_pass
from grain_shard.reading.stream_dataset import StreamDataset
from grain_shard.state_json import restore, sealed, unsealed, why_unsaved
from grain_shard.trees import Batch


class Stream(HostBatches):
    """The batches of a stream. A position is the pickled state of the stream's iterator.

    Args:
        ds: This host's batches. No other object refers to their arrays.
        buffer_size: Most batches that wait on the host or are unfinished.
        rows: The rows that the stream yields on each of several hosts: "global" for the same whole
            batches on every host, "local" for rows of its own.
        fault_rules: The rules for failed reads. They apply to a `MapDataset` inside the stream.
    """

    kind = STREAM
    ends_by_vote = True
    _PARENT = "parent"  # the key under which a state holds the state of the iterator

    def __init__(
        self,
        ds: StreamDataset,
        *,
        buffer_size: int,
        rows: str = GLOBAL,
        fault_rules: FaultRules = FaultRules(),  # noqa: B008 (it is frozen)
    ):
        self._ds, self._buffer_size, self.rows = ds, buffer_size, rows
        self.contents = Contents()
        self._fault_rules, self.padding = fault_rules, ds.facts.padding
        self._why_unsaved = ""

    def open(self, position: bytes | None) -> Opened:
        let_grain_read_its_flags()  # an .mp_prefetch in the stream reads Grain's flags
        faults = Faults(self._fault_rules)
        iterator = self._ds.iterate(faults, self._buffer_size)
        seen = iterator.seen
        if position is not None:
            restore(iterator, pickle.loads(position), "the stream")
        opened = opened_in_order(
            iterator,
            self.kind,
            self._buffer_size,
            faults.counts,
            first_digest=lambda: seen.first_digest,
            rereads=Reread.of_stream(self._ds),
        )
        self._look_at(opened.position)
        return opened

    def require_new_pass(self) -> None:
        require_new_pass(self._ds)

    def first(self) -> Batch:
        require_another_pass(self._ds)
        faults = Faults(self._fault_rules)
        with contextlib.closing(self._ds.iterate(faults)) as iterator:
            self._look_at(iterator.position())
            batch = next(iterator, None)
        if batch is None:
            raise ShardingError(
                "the stream of this host has no batch, so the shapes of its padding are unknown.",
                remedy='give every host at least one record, or pass remainder="drop".',
            )
        return batch

    def why_unsaved(self) -> str:
        return self._why_unsaved

    def _look_at(self, position: bytes) -> None:
        self._why_unsaved = why_unsaved({self._PARENT: pickle.loads(position)})

    def to_state(self, position: bytes) -> dict[str, Any]:
        return {KIND: self.kind, **sealed({self._PARENT: pickle.loads(position)})}

    def from_state(self, state: dict[str, Any]) -> bytes:
        saved = {key: value for key, value in state.items() if key != KIND}
        if state.get(KIND) != self.kind or self._PARENT not in saved:
            raise StateError(
                f"the state is not the state of a stream: {shortened(state)}.\n"
                "  remedy: restore with the pipeline that saved the state."
            )
        return pickle.dumps(unsealed(saved, "the state of the stream")[self._PARENT])
