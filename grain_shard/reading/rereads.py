"""Finds sources that give other records to a thread or a worker than to a reader that reads alone.

Several threads, worker processes or an executor read the records of a batch. A source that moves
the one position of an open file gives wrong records to threads that read at the same time, and no
error. A worker process may have other flags or another working directory than the main process. So
a few records of the first batch are read again, and compared:

1. One thread reads the records alone. They must be the rows that the first batch has.
2. Four threads read some of the records at the same time. They must get the same.

Only if a record differs, the record is read many more times, by one thread and by four in turn,
while nothing else of the pipeline reads. A record that differs even when one thread reads it alone
is random, so the difference says nothing about threads.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.reading.row_values import Difference, Leaves, Row, is_lost, shown_apart
from grain_shard.reading.sample import Sample

# To tell a record that is random, if only rarely, from a raced one, the records are read alone this
# many times as often as the threads read them, and for this time in seconds. That is repeated.
_MORE_ALONE, _ALONE_AGAIN_S, _ROUNDS = 5, 0.3, 6
# A value that changes with time, such as a number of seconds, changes while one thread reads for
# this long, in seconds.
_DOUBT_S = 1.3
# For streams and feeds, other threads may still read ahead. So a search that another read may have
# disturbed is made again after this pause, in seconds.
_TRIES, _PAUSE_S = 4, 0.2

_SEVERAL = "one of several threads that read at the same time"
# The remedies for a record that several threads read wrongly, or that another process does.
REMEDY_OF_RACES = (
    "the source, or a function of .map, is not safe for several threads: hold a"
    " threading.Lock() around its reads, read with os.pread, or keep a file for each thread in"
    " a threading.local(). Return a new array for each record. Or pass num_threads=1, or"
    " num_workers=n if the source opens its files in each worker process."
)
REMEDY_OF_WORLDS = (
    "find what differs there: a flag, an environment variable, the working directory, a file"
    " that was replaced, a global variable that the main script sets, or hash() of a str."
    " Give it to the source or the function as an argument."
)


class Maker(NamedTuple):
    """The threads, workers or executor that make the batches of a pipeline.

    Attributes:
        name: The name in messages.
        has_threads: True if several threads of this process read the source at the same time.
    """

    name: str
    has_threads: bool


def compare(
    sample: Sample,
    given: Mapping[int, Leaves],
    maker: Maker,
    wait_until_idle: Callable[[], object],
) -> Difference | None:
    """Raises an error if the pipeline's way to read gives other records than one thread alone.

    Args:
        sample: The records to read again.
        given: The rows that the pipeline gave, by the index of their record; empty if unknown.
        maker: The maker of the rows.
        wait_until_idle: Waits until no other thread of the pipeline reads.

    Returns:
        A difference of a record that is random or changes with time, which is no fault; None if
        there is no difference.

    Raises:
        ShardingError: A record differs. The message names it, the leaf, and both values.
    """

    def read_alone() -> dict[int, Row]:
        alone = sample.all_alone()
        if maker.has_threads:  # in one process, a read that fails only once is no sign of a race
            lost = {record for record, leaves in given.items() if is_lost(leaves)}
            lost |= {record for record, row in alone.items() if is_lost(row.leaves)}
            alone = {record: row for record, row in alone.items() if record not in lost}
        return alone

    alone = read_alone()
    suspect = _other_than_given(sample, given, alone)
    if suspect is None and alone and maker.has_threads:
        suspect, _ = sample.together(alone)
    if suspect is None:
        return None
    for _ in range(_TRIES):
        wait_until_idle()  # from here on, a read by this thread is most likely alone
        alone = read_alone()
        if differs := _other_than_given(sample, given, alone):
            if sample.is_steady(alone, 0, _DOUBT_S) and not sample.is_stopped:
                raise _error(sample, differs, maker.name, maker)
        elif not maker.has_threads:
            break  # without random leaves, no difference is left
        elif not alone:
            pass  # no record can be read now
        elif sample.unsteady and sample.together(alone)[0] is None:
            break
        elif differs := _raced(sample, alone):
            raise _error(sample, differs, _SEVERAL, maker)
        if sample.is_stopped:
            break
        time.sleep(_PAUSE_S)
    return suspect


def _other_than_given(
    sample: Sample, given: Mapping[int, Leaves], alone: Mapping[int, Row]
) -> Difference | None:
    of_all = (
        sample.differences(record, given[record], row)
        for record, row in alone.items()
        if record in given
    )
    return next(itertools.chain.from_iterable(of_all), None)


def _raced(sample: Sample, alone: Mapping[int, Row]) -> Difference | None:
    """Returns a difference that threads find again and again, but one thread never.

    Args:
        sample: The records. Nothing else reads them now.
        alone: The rows that one thread read.

    Returns:
        The difference; None if a record is random, or threads find no second difference.
    """
    differences = list[Difference]()
    for _ in range(_ROUNDS):
        found, reads = sample.together(alone)
        if sample.is_stopped or not sample.is_steady(alone, _MORE_ALONE * reads, _ALONE_AGAIN_S):
            return None
        differences += [found] if found else []
        if len(differences) > 1:
            return found
    return None


def _error(sample: Sample, found: Difference, reader: str, maker: Maker) -> ShardingError:
    got, alone = shown_apart(found.got, found.alone)
    return ShardingError(
        f"{reader} got {got} from {sample.name(found.record)}, and one thread that reads alone gets"
        f" {alone}, each time.",
        path=found.path,
        leaf=next((describe_leaf(x) for x in found[2:] if isinstance(x, np.ndarray)), None),
        remedy=REMEDY_OF_RACES if maker.has_threads else REMEDY_OF_WORLDS,
    )
