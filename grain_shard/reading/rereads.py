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

import collections
import contextlib
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import jax
import numpy as np

from grain_shard.errors import ShardingError, describe_error, describe_leaf
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import route
from grain_shard.reading.origin import Origin, record_name
from grain_shard.reading.transient import is_transient
from grain_shard.threads.world import World
from grain_shard.trees import ROOT, Batch, as_arrays, flatten, is_text, path_of

# The most records to read again. For a stream or feeds, whose records are not known to be rows of
# this host, fewer are read.
_RECORDS, _RECORDS_OF_STREAM = 16, 4
# The most bytes of rows to keep, unless this is less than a few rows.
_BYTES, _FEWEST = 2**21, 4
# The seed of the order in which records are read again.
_ORDER = 3
# After this time, in seconds, no further record is read alone.
_ALONE_S = 0.1
# Number of threads that read at the same time, the share of the records that each of them reads,
# and the time in seconds after which no thread reads a further record, or pauses.
_THREADS, _SHARE, _TOGETHER_S = 4, 0.25, 0.1
# Most seconds that a thread waits until the other threads have started.
_STARTED_S = 1.0
# Seconds of a pause after each function that a thread has called, so that other threads run. With
# four threads and four records each, a source that seeks and reads in one file gave a wrong record
# in 40 of 40 runs, after 6 ms; a tarfile in 39, after 23 ms.
_SWITCH_S = 1e-6
# To tell a record that is random, if only rarely, from a raced one, the records are read alone this
# many times as often as the threads read them, and for this time in seconds. That is repeated.
_MORE_ALONE, _ALONE_AGAIN_S, _ROUNDS = 5, 0.3, 6
# A value that changes with time, such as a number of seconds, changes while one thread reads for
# this long, in seconds.
_DOUBT_S = 1.3
# For streams and feeds, other threads may still read ahead. So a search that another read may have
# disturbed is made again after this pause, in seconds.
_TRIES, _PAUSE_S = 4, 0.2

THREAD = "grain-shard-reread"  # the name of these threads
_SEVERAL = "one of several threads that read at the same time"
# Most characters of a value in a message, and of a text in place of it, such as an error.
_SHOWN, _SHOWN_WORDS = 60, 200

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


class Lost(str):
    """The reason why there is no row: the record cannot be read, or is masked."""

    __slots__ = ()


# The leaves of one row, by path. A path to a tuple or a list has its class as text. If there is no
# row, the only entry is the reason, as `Lost`.
Leaves = dict[str, np.ndarray | str]


class Row(NamedTuple):
    """A row that one thread read alone.

    Attributes:
        leaves: Copies of its leaves, by path.
        bits: What `_bits` returns for the row, to compare other readings of it fast.
    """

    leaves: Leaves
    bits: list[Any]

    @classmethod
    def of(cls, row: Any) -> Row:
        return cls(leaves_of_row(row), _bits(row))

    @classmethod
    def lost(cls, why: str) -> Row:
        return cls({ROOT: Lost(why)}, [])


NO_ROW = Row.lost("no row")


class Maker(NamedTuple):
    """The threads, workers or executor that make the batches of a pipeline.

    Attributes:
        name: The name in messages.
        has_threads: True if several threads of this process read the source at the same time.
    """

    name: str
    has_threads: bool


class Difference(NamedTuple):
    """A leaf that two readings of one record gave with different values.

    Attributes:
        record: Index of the record in the dataset of the sample.
        path: Path of the leaf.
        got: The value that the pipeline's threads, worker or executor gave, as in `Leaves`; None if
            it has no such leaf.
        alone: The value that one thread got that read alone; None if it has no such leaf.
    """

    record: int
    path: str
    got: np.ndarray | str | None
    alone: np.ndarray | str | None


def leaves_of_row(row: Any) -> Leaves:
    """Returns copies of the leaves of a row, and the names of its containers, by path."""
    paths, leaves, _ = flatten(row)
    # A subclass of str may have another `__str__`, which NumPy would take.
    texts = [str.__str__(leaf) if isinstance(leaf, str) else leaf for leaf in leaves]
    arrays = as_arrays(paths, texts)
    values = {path: np.array(array) for path, array in zip(paths, arrays, strict=True)}
    return {**values, **containers(row)}


def containers(tree: Any, path: str = ROOT) -> dict[str, str]:
    """Returns the class of each container in a tree, by path. Any mapping at the root is a dict."""
    below = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if below and not below[0][0]:  # the tree is a leaf
        return {}
    is_batch = path == ROOT and isinstance(tree, Mapping)  # the mask makes a dict of it
    found = {path: f"a {dict.__name__ if is_batch else type(tree).__name__}"}
    for keys, node in below:
        found |= containers(node, path_of(keys, path))
    return found


def is_lost(leaves: Leaves) -> bool:
    """Returns True if a record has no row, because it cannot be read or is masked."""
    return isinstance(leaves.get(ROOT), Lost)


def differences(record: int, got: Leaves, alone: Leaves) -> Iterator[Difference]:
    """Yields the leaves that only one of two readings has, or that have other bits."""
    if is_lost(got) and is_lost(alone):
        return
    for path in sorted(alone | got):  # a container comes before its leaves
        other, value = got.get(path), alone.get(path)
        if isinstance(other, np.ndarray) and isinstance(value, np.ndarray):
            is_same = same_values(other, value)
        else:
            is_same = isinstance(other, str) and other == value
        if not is_same:
            yield Difference(record, path, other, value)


def same_values(a: np.ndarray, b: np.ndarray) -> bool:
    """Returns True if two arrays have the same dtype, shape and bits, or the same text."""
    if is_text(a) or is_text(b):  # NumPy's text has a width, which is no part of the value
        return a.tolist() == b.tolist()
    return (a.dtype, a.shape) == (b.dtype, b.shape) and a.tobytes() == b.tobytes()


def _bits(row: Any) -> list[Any]:
    leaves, structure = jax.tree.flatten(row)
    arrays = np.ndarray | np.generic
    return [structure, *(x.tobytes() if isinstance(x, arrays) else x for x in leaves)]


class Sample:
    """A few records of a dataset, which are read again.

    Args:
        records: The dataset.
        indices: int64[n], indices of records. Some of them, at even distances, become the sample.
        rows: int64[n], the row of each record in the first batch; None if a row of the batch
            depends on several records.
        mask_key: The key of the mask in the batch, which is no leaf of a record.

    Attributes:
        indices: The indices of the sample. They are in no order, so that the first few of them,
            which are all if reads are slow, are from several places of the batch.
        unsteady: The paths of leaves that differed when one thread read them alone, and how often.
            Once may be the fault of a thread that still read. After twice a leaf is random, and
            compared no more, so that it hides no difference of another leaf.
        is_stopped: True after `stop`.
    """

    where = "the dataset before .batch"

    def __init__(
        self,
        records: grain.MapDataset,
        indices: Sequence[int] | np.ndarray,
        rows: Sequence[int] | np.ndarray | None = None,
        mask_key: str | None = None,
    ):
        chosen = np.unique(np.linspace(0, max(0, len(indices) - 1), _RECORDS).astype(np.int64))
        chosen = np.random.default_rng(_ORDER).permutation(chosen[: len(indices)])
        self._records = records
        self.indices: list[int] = np.asarray(indices)[chosen].tolist()
        self._rows = None if rows is None else np.asarray(rows)[chosen].tolist()
        self._mask_key = mask_key
        self.unsteady = collections.Counter[str]()
        self.is_stopped: bool = False

    @classmethod
    def of_first(cls, records: grain.MapDataset) -> Sample:
        """Returns the first records of a dataset, without their rows in a batch."""
        return cls(records, range(min(_RECORDS_OF_STREAM, len(records))))

    def given(self, batch: Batch) -> dict[int, Leaves]:
        """Returns copies of the records' rows in the first batch of this host, by index."""
        if self._rows is None:
            return {}
        mask = None
        if self._mask_key is not None:
            mask = batch[self._mask_key]
            batch = {key: leaf for key, leaf in batch.items() if key != self._mask_key}
        paths, leaves, _ = flatten(batch)
        row_bytes, others = sum(leaf[:1].nbytes for leaf in leaves) or 1, containers(batch)
        found: dict[int, Leaves] = {}
        most = max(_FEWEST, _BYTES // row_bytes)
        for record, row in itertools.islice(zip(self.indices, self._rows, strict=True), most):
            values = {path: np.array(leaf[row]) for path, leaf in zip(paths, leaves, strict=True)}
            has_row = mask is None or mask[row]
            found[record] = {**values, **others} if has_row else NO_ROW.leaves
        return found

    def read(self, record: int) -> Any:
        """Reads a record by Grain alone, without the fast paths of the pipeline's threads."""
        return self._records[record]

    def alone(self, records: Iterable[int]) -> Iterator[tuple[int, Row | None]]:
        """Reads records in the calling thread, one after the other.

        Yields:
            Each record and its row; None in place of the row if another try may read it.
        """
        for record in records:
            try:
                row = Row.of(self.read(record))
            except Exception as error:
                row = None if is_transient(error) else Row.lost(describe_error(error))
            yield record, row

    def stop(self) -> None:
        """Ends the reads soon, without waiting. Any thread may call this."""
        self.is_stopped = True

    def name(self, record: int) -> str:
        """Returns the name of a record in messages."""
        return record_name(record, self.where, Origin.of(self._records, record))

    def is_steady(self, alone: Mapping[int, Row], reads: int, least_s: float) -> bool:
        """Reads records again, one after the other; returns False once one of them differs.

        The leaves that differ are counted in `unsteady`.

        Args:
            alone: The records to read, at least one, with the rows that they had.
            reads: The least number of reads.
            least_s: The least time in seconds in which the reads take place.
        """
        until = time.perf_counter() + least_s
        endless = itertools.chain.from_iterable(map(self.alone, itertools.repeat(alone)))
        for record, again in endless:
            if again is None or is_lost(again.leaves) != is_lost(alone[record].leaves):
                return False
            found = list(self.differences(record, again.leaves, alone[record]))
            self.unsteady.update({one.path for one in found})
            if found:
                return False
            reads -= 1
            if self.is_stopped or (reads <= 0 and time.perf_counter() > until):
                break
        return True

    def differences(self, record: int, got: Leaves, alone: Row) -> Iterator[Difference]:
        """Yields the leaves of a record that differ between two readings, without random leaves."""
        found = differences(record, got, alone.leaves)
        return (one for one in found if self.unsteady[one.path] < 2)

    def all_alone(self) -> dict[int, Row]:
        """Reads the records one after the other, for a tenth of a second; returns the rows."""
        read: dict[int, Row] = {}
        until, kept = time.perf_counter() + _ALONE_S, 0
        for record, row in self.alone(self.indices):
            if row is not None:
                read[record] = row
                kept += _num_bytes(row)
            is_full = kept > _BYTES and len(read) >= _FEWEST
            if self.is_stopped or is_full or time.perf_counter() > until:
                break
        return dict(sorted(read.items()))

    def together(self, alone: Mapping[int, Row]) -> tuple[Difference | None, int]:
        """Lets four threads read records at the same time, each in an order of its own.

        Two threads read records that are large, to keep fewer records in memory.

        A thread that has called a function pauses, so that another thread runs in between. So a few
        reads find a race that some thousand reads without pauses may miss.

        Args:
            alone: The records to read, with the rows that one thread got.

        Returns:
            The first difference, None if there is none; and the number of records read.
        """
        found, counts = list[Difference](), [0] * _THREADS
        each = max(2, int(_SHARE * len(alone)))
        row_bytes = max(map(_num_bytes, alone.values()))
        num_threads = _THREADS if _THREADS * row_bytes <= _BYTES else 2
        all_started, world = threading.Barrier(num_threads), World()

        def read(record: int, until: float) -> None:
            def pause(*event: Any) -> None:
                if time.perf_counter() < until:
                    time.sleep(_SWITCH_S)

            way = route(self._records, np.array([record]))
            sys.setprofile(pause)  # of this thread alone
            try:
                (row,) = way.finish(way.read())
                is_same = type(row) is Unreadable or _bits(row) == alone[record].bits
                leaves = {} if is_same else leaves_of_row(row)
            except Exception:  # the loop raises this error when it comes to the record
                return
            finally:
                sys.setprofile(None)
            if not is_same:
                found.extend(self.differences(record, leaves, alone[record]))

        def read_some(rank: int) -> None:
            world.enter()
            order = np.random.default_rng(rank).permutation(list(alone))[:each].tolist()
            with contextlib.suppress(threading.BrokenBarrierError):
                all_started.wait(_STARTED_S)
            until = time.perf_counter() + _TOGETHER_S
            for record in order:
                is_late = counts[rank] and time.perf_counter() > until
                if not (found or self.is_stopped or is_late):
                    read(record, until)
                    counts[rank] += 1

        # Daemon threads, because a read that hangs must not keep the program from ending.
        threads = [
            threading.Thread(target=read_some, args=(rank,), name=THREAD, daemon=True)
            for rank in range(num_threads)
        ]
        with contextlib.suppress(RuntimeError):  # raised if the system allows no more threads
            for thread in threads:
                thread.start()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        return (found[0] if found else None), sum(counts)


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
    return ShardingError(
        f"{reader} got {shown(found.got)} from {sample.name(found.record)}, and one thread that"
        f" reads alone gets {shown(found.alone)}, each time.",
        path=found.path,
        leaf=next((describe_leaf(x) for x in found[2:] if isinstance(x, np.ndarray)), None),
        remedy=REMEDY_OF_RACES if maker.has_threads else REMEDY_OF_WORLDS,
    )


def _num_bytes(row: Row) -> int:
    return sum(leaf.nbytes for leaf in row.leaves.values() if isinstance(leaf, np.ndarray))


def shown(value: np.ndarray | str | None) -> str:
    """Returns the first numbers of an array as text of at most 60 characters."""
    if value is None:
        return "no such leaf"
    if isinstance(value, str):
        return value[:_SHOWN_WORDS]
    text = np.array2string(value, threshold=8, edgeitems=2, separator=", ")
    return " ".join(text.split())[:_SHOWN]
