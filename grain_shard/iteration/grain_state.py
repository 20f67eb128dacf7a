"""The states of Grain's own iterators over random access, from which a run can go on.

Grain 0.2.18 counts the elements that ``.to_iter_dataset()`` has given, and with ``.mp_prefetch``
the elements of each worker: batches if ``.batch`` stands before it, records if ``.batch`` follows.
The state does not tell which. `grain.experimental.ElasticIterator` counts records. A state holds no
batch size, and none of the records' order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from absl import logging

from grain_shard.errors import ShardingError, StateError
from grain_shard.hosts.state_files import KIND, PROCESSES

T = TypeVar("T")

_ELEMENTS, _RECORDS, _WORKERS = "next_index", "global_next_index", "iterators_in_use_states"


class GrainState(NamedTuple):
    """The elements, or records, that an iterator of Grain has given in a process.

    Attributes:
        key: The key of the state that counts them.
        given: Their number.
        processes: The processes that have saved such states.
    """

    key: str
    given: int
    processes: int

    @classmethod
    def of(cls, state: Any) -> GrainState | None:
        """Reads a state; returns None unless a Grain iterator over random access has saved it.

        Example:
            >>> workers = [{"next_index": 2}, {"next_index": 1}]
            >>> GrainState.of({"iterators_in_use_states": workers, "processes": 1})
            GrainState(key='next_index', given=3, processes=1)
        """
        if not isinstance(state, Mapping) or KIND in state:
            return None
        processes = state.get(PROCESSES, jax.process_count())
        for key, states in ((_ELEMENTS, state.get(_WORKERS, [state])), (_RECORDS, [state])):
            counts = [one.get(key) for one in states if isinstance(one, Mapping)]
            whole = [count for count in counts if type(count) is int]
            if whole and whole == counts:
                return cls(key, sum(whole), processes)
        return None

    def position(self, position_at: Callable[..., T]) -> T:
        """Returns the position at which the run goes on, and logs what is assumed for that.

        Args:
            position_at: As in `HostBatches`.

        Raises:
            StateError: The state counts elements, which may be batches or records, or the pipeline
                has no such position. The message has the `seek` that goes on.
        """
        count, processes = self.given, self.processes
        if self.key == _ELEMENTS and processes == 1:
            raise StateError(
                f"Grain's iterator has saved this state: .to_iter_dataset() had given {count}"
                " elements, and the state does not tell if these were batches or records.\n"
                f"  remedy: if .batch stood before .to_iter_dataset(), batches.seek({count}) goes"
                f" on; if .batch followed it, batches.seek(record={count})."
            )
        if self.key == _ELEMENTS:
            raise StateError(
                f"Grain's iterators on {processes} processes have saved this state: each had given"
                f" {count} batches, and the state does not tell of which records.\n"
                f"  remedy: if each process had every {processes}th record of the shuffled ones, in"
                f" batches of b, batches.seek(record={processes * count} * b) goes on. If each had"
                f" all records, batches.seek(record={count} * b). If each shuffled a part of its"
                " own, no place in this order has all that they have read behind it: begin with"
                " the next epoch."
            )
        try:
            position = position_at(step=None, record=count)
        except ShardingError as error:
            raise StateError(
                f"a Grain iterator saved this state after {count} records, but {error}"
            ) from error
        logging.warning(
            "grain_shard: a Grain iterator has saved this state. It is taken for %d records of this"
            " very pipeline, in the same order; the run goes on after them.",
            count,
        )
        return position
