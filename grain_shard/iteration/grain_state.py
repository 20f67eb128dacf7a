"""The states of Grain's own iterators over random access, from which a run can go on.

Grain 0.2.18 counts the batches that ``.batch(B).to_iter_dataset()`` has given, and with
``.mp_prefetch`` those of each worker; `grain.experimental.ElasticIterator` counts records. A state
holds no batch size, and none of the records' order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import jax
from absl import logging

from grain_shard.errors import ShardingError, StateError
from grain_shard.hosts.state_files import KIND, PROCESSES

T = TypeVar("T")

_BATCHES, _RECORDS, _WORKERS = "next_index", "global_next_index", "iterators_in_use_states"


class GrainState(NamedTuple):
    """The batches, or records, that an iterator of Grain has given in a process.

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
        """Reads a state; None if it is none of a Grain iterator over random access.

        Example:
            >>> workers = [{"next_index": 2}, {"next_index": 1}]
            >>> GrainState.of({"iterators_in_use_states": workers, "processes": 1})
            GrainState(key='next_index', given=3, processes=1)
        """
        if not isinstance(state, Mapping) or KIND in state:
            return None
        processes = state.get(PROCESSES, jax.process_count())
        for key, states in ((_BATCHES, state.get(_WORKERS, [state])), (_RECORDS, [state])):
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
            StateError: The pipeline has no such position, or several processes have each read
                records of their own, which the state does not tell. The message has the `seek`
                that goes on.
        """
        count, processes = self.given, self.processes
        if self.key == _BATCHES and processes > 1:
            raise StateError(
                f"Grain's iterators on {processes} processes have saved this state: each had given"
                f" {count} batches, and the state does not tell of which records.\n"
                f"  remedy: if each process had every {processes}th record of the shuffled ones, in"
                f" batches of b, batches.seek(record={processes * count} * b) goes on. If each had"
                f" all records, batches.seek(record={count} * b). If each shuffled a part of its"
                " own, no place in this order has all that they have read behind it: begin with"
                " the next epoch."
            )
        counts_batches = self.key == _BATCHES
        step, record = (count, None) if counts_batches else (None, count)
        try:
            position = position_at(step=step, record=record)
        except ShardingError as error:
            raise StateError(f"a Grain iterator has saved this state, but {error}") from error
        logging.warning(
            "grain_shard: a Grain iterator has saved this state. It is taken for %d %s of this very"
            " pipeline, in the same order and size; the run goes on after them.",
            count,
            "batches" if counts_batches else "records",
        )
        return position
