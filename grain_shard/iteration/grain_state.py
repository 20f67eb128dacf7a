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
                f"an iterator of Grain saved this state after {count} elements, and the state does"
                " not say whether the elements were batches or records.\n"
                f"  remedy: call batches.seek({count}) if .batch stood before .to_iter_dataset()."
                f" Call batches.seek(record={count}) if .batch followed .to_iter_dataset()."
            )
        if self.key == _ELEMENTS:
            raise StateError(
                f"iterators of Grain on {processes} processes saved this state after {count}"
                " batches each, and the state does not say which records the batches had.\n"
                f"  remedy: call batches.seek(record={processes * count} * b) if each process had"
                f" every {processes}th record of one shuffled order, in batches of b records. Call"
                f" batches.seek(record={count} * b) if each process had all records. Begin with the"
                " next epoch if each process shuffled a part of its own: then no position in the"
                " order of this pipeline separates the records that were read from the rest."
            )
        try:
            position = position_at(step=None, record=count)
        except ShardingError as error:
            raise StateError(
                f"a Grain iterator saved this state after {count} records, but {error}"
            ) from error
        logging.warning(
            "grain_shard: an iterator of Grain saved this state. The run goes on after the first"
            " %d records, which is right only if Grain read the same records in the same order.",
            count,
        )
        return position
