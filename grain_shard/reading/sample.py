"""`Sample`: a few records of a dataset, which one thread or several threads read again."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import os
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import grain
import numpy as np

from grain_shard.errors import describe_error
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import route
from grain_shard.reading.origin import name_in
from grain_shard.reading.row_values import (
    NO_ROW,
    Difference,
    Leaves,
    Row,
    bits_of,
    containers,
    differences,
    is_lost,
    leaves_of_row,
    num_bytes,
)
from grain_shard.reading.transient import is_transient
from grain_shard.threads.world import World
from grain_shard.trees import Batch, flatten

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
# Where the frames of this package are; and those of NumPy, Grain and Python's abc, which it calls.
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_CALLED = os.path.dirname(np.__file__), os.path.dirname(grain.__file__), "<frozen"

THREAD = "grain-shard-reread"  # the name of these threads


def _is_ours(frame: FrameType | None) -> bool:
    """Returns True for a frame of this package, or of NumPy or Grain on its behalf.

    They are safe for threads, so no other thread has to run in between. Pauses in such frames would
    take most of the time: 206 of the 217 events of a read of an `ArrayRecordSource` are in them.
    """
    while frame is not None and _is_in(_CALLED, frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and _is_in(_PACKAGE, frame.f_code.co_filename)


@functools.cache
def _is_in(folders: str | tuple[str, ...], file: str) -> bool:
    return file.startswith(folders)


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
        return name_in(self._records, self.where, record)

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
                kept += num_bytes(row)
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
        row_bytes = max(map(num_bytes, alone.values()))
        num_threads = _THREADS if _THREADS * row_bytes <= _BYTES else 2
        all_started, world = threading.Barrier(num_threads), World()

        def read(record: int, until: float) -> None:
            def pause(frame: FrameType, *event: Any) -> None:
                if not _is_ours(frame) and time.perf_counter() < until:
                    time.sleep(_SWITCH_S)

            way = route(self._records, np.array([record]))
            sys.setprofile(pause)  # of this thread alone
            try:
                (row,) = way.finish(way.read())
                is_same = type(row) is Unreadable or bits_of(row) == alone[record].bits
                leaves = {} if is_same else leaves_of_row(row)
            except Exception:  # the loop raises this error when it comes to the record
                return
            finally:
                sys.setprofile(None)
            if not is_same:
                found.extend(self.differences(record, leaves, alone[record]))

        def read_some(rank: int) -> None:
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
            threading.Thread(target=world.run, args=(read_some, rank), name=THREAD, daemon=True)
            for rank in range(num_threads)
        ]
        with contextlib.suppress(RuntimeError):  # raised if the system allows no more threads
            for thread in threads:
                thread.start()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
        return (found[0] if found else None), sum(counts)
