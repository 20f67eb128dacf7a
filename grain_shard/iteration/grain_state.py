"""Restores the states that Grain's own iterators over random access have saved.

A state of Grain 0.2.18 counts the elements that ``.to_iter_dataset()`` has given; with
``.mp_prefetch`` it counts the elements of each worker. The elements are batches if ``.batch``
stands before ``.to_iter_dataset()``, and records if ``.batch`` follows it. The state does not say
whether its elements are batches or records. A state of `grain.experimental.ElasticIterator` counts
records. Neither kind of state holds the batch size or the order of the records.
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
    """The count in the state of a Grain iterator.

    Attributes:
        key: The key of the count in the state: "next_index" counts the elements of one process,
            "global_next_index" counts records.
        given: Number of elements or records that the iterator has given.
        processes: Number of processes that saved a state.
    """

    key: str
    given: int
    processes: int

    @classmethod
    def of(cls, state: Any) -> GrainState | None:
        """Reads the count in a state.

        Args:
            state: The state, of any origin.

        Returns:
            The count; None if no Grain iterator over random access saved the state.

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
        """Returns the position after the counted records.

        This logs a warning, because the position is right only if Grain read the records of this
        pipeline in the same order.

        Args:
            position_at: `HostBatches.position_at` of the pipeline.

        Raises:
            StateError: The state counts elements, which may be batches or records (the message has
                the `seek` for each case); or this pipeline has fewer records than the state
                counts, or a position that does not count records.
        """
        count, processes = self.given, self.processes
        if self.key == _ELEMENTS and processes == 1:
            raise StateError(
                f"an iterator of Grain saved this state after {count} elements, and the state does"
                " not say whether the elements were batches or records.\n"
                f"  remedy: if .batch stood before .to_iter_dataset(), call batches.seek({count})."
                f" If .batch stood after .to_iter_dataset(), call batches.seek(record={count})."
            )
        if self.key == _ELEMENTS:
            raise StateError(
                f"iterators of Grain on {processes} processes saved this state after {count}"
                " batches each, and the state does not say which records the batches had.\n"
                "  remedy: let b be the number of records in a batch of one process. If each"
                f" process had every {processes}th record of one shuffled order, call"
                f" batches.seek(record={processes * count} * b). If each process had all records,"
                f" call batches.seek(record={count} * b). If each process shuffled a part of its"
                " own, begin with the next epoch: in this pipeline's order, records that were read"
                " lie among records that were not."
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
