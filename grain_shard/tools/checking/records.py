"""Reads records of each source and function by one thread alone, and by many at the same time."""

from __future__ import annotations

import copy
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar, cast

import grain
import jax
import numpy as np

from grain_shard.digest import element_digest
from grain_shard.grain_inside import nodes
from grain_shard.hosts.state_files import FEEDS, RANDOM_ACCESS
from grain_shard.iteration.sharded_dataset import ShardedDataset
from grain_shard.reading.transient import is_transient
from grain_shard.threads.mapped import mapped
from grain_shard.threads.producer import Items

S = TypeVar("S")
T = TypeVar("T")

# Number of threads that read at the same time, and the seconds after which Python lets another
# thread run. With Python's own 5 ms, a source that seeks and reads in one file gives 10 wrong
# records of 20,000. In each round the threads are new, because they may fall into step.
THREADS, _SWITCH_S, _ROUNDS = 16, 1e-6, 4
# The number of records to keep, at even distances, and the bytes above which no more are kept.
_RECORDS, _BYTES = 64, 2**28
# A record that differs between threads may be random. To find out, one thread reads alone, this
# many times as often as the threads did.
_MORE_ALONE = 4

# The kinds of a `WrongRecord`.
RANDOM, UNSAFE, REUSED = "random", "unsafe", "reused"


class Level(NamedTuple):
    """A dataset that ends with a source or a function of the user.

    Attributes:
        ds: The dataset.
        by_several: True if the pipeline reads it with several threads of one process.
    """

    ds: grain.MapDataset
    by_several: bool


def levels(ds: ShardedDataset) -> list[Level]:
    """Returns the sources and functions of a pipeline that can be read by index, sources first.

    If several look the same as text, such as the files of an interleave, one of them is returned.
    """
    by_text = dict[tuple[str, ...], Level]()
    for part, by_several in _parts(ds):
        for node in reversed([*nodes.walk(part)]):
            is_ours = type(node).__module__.startswith("grain_shard.")
            # A node that only moves or stacks elements runs no code of the user.
            if not is_ours and not nodes.only_moves(node) and len(node):
                text = tuple(map(nodes.text, nodes.walk(node)))
                if by_several or text not in by_text:
                    by_text[text] = Level(node, by_several)
    return list(by_text.values())


def _parts(ds: ShardedDataset) -> Iterator[tuple[grain.MapDataset, bool]]:
    """Yields each part that can be read by index, and True if several threads read it.

    With random access the whole pipeline is one part. A stream has a part below each place where
    Grain reads ahead.
    """
    settings, (end,) = ds.settings, cast(Any, ds.parents)
    several = settings.num_threads != 1
    if ds.host.kind == RANDOM_ACCESS:
        in_threads = settings.executor is None or isinstance(settings.executor, ThreadPoolExecutor)
        yield end, in_threads and not settings.num_workers and several
        return
    stream = end.host_rows.streams.make(0)
    several = several and not nodes.is_run_by_workers(stream)
    for node in nodes.walk(stream):
        if (found := nodes.read_ahead(node)) is not None:
            records, options = found
            shared = ds.host.kind == FEEDS or options.num_threads != 1
            yield records, several and shared and nodes.has_threads(options)


class WrongRecord(NamedTuple):
    """A record that is not the same in two readings.

    Attributes:
        kind: `RANDOM` if it also differs for one thread that reads alone; `UNSAFE` if it differs
            only for several threads; `REUSED` if a later read changes its arrays.
        record: The index of the record.
        got: The record as it differs; an error if it could not be read.
        alone: The record that one thread read alone.
    """

    kind: str
    record: int
    got: Any
    alone: Any


class Records:
    """Some records of a dataset that ends with a source or a function.

    Args:
        ds: The dataset.
        seconds: Seconds for each reading, after which no further record is read.

    Attributes:
        count: Number of records that are compared.
    """

    def __init__(self, ds: grain.MapDataset, seconds: float):
        self._ds, self._seconds = ds, seconds
        self._reads = self._bytes = 0
        self._alone = dict(self._read_first())
        self.count: int = len(self._alone)

    def _read_first(self) -> Iterator[tuple[int, tuple[Any, str]]]:
        """Yields records by index, each with its digest as it was before any later read."""

        def read(index: int) -> tuple[int, Any, str]:
            record = self._read(index)
            return index, record, _digest(record)

        length = min(len(self._ds), sys.maxsize >> 12)
        indices = np.linspace(0, length - 1, min(length, _RECORDS)).astype(int).tolist()
        until = time.monotonic() + self._seconds
        for index, record, digest in _by_threads(read, indices, 1):
            if isinstance(record, Exception):
                continue
            yield index, (record, digest)
            self._bytes += _num_bytes(record)
            if time.monotonic() > until or self._bytes > _BYTES:
                break

    def _read(self, index: int) -> Any:
        try:
            return self._ds[index]
        except Exception as error:  # compared like a record
            return error

    def wrong_record(self, *, by_several: bool) -> WrongRecord | None:
        """Returns the first wrong record that is found; None if there is none.

        Args:
            by_several: True to read with several threads, too.
        """
        if not self._alone:
            return None
        for index, (record, digest) in self._alone.items():
            if _digest(record) != digest:
                return WrongRecord(REUSED, index, copy.deepcopy(record), self._read(index))
        backwards = [*self._alone][::-1]
        if wrong := self._first_wrong([backwards], self._seconds):
            return wrong
        return self._wrong_in_threads() if by_several else None

    def _wrong_in_threads(self) -> WrongRecord | None:
        """Returns the first record that many threads read wrong; None if there is none.

        Each thread reads the records in a random order of its own. If a record differs, one thread
        alone reads all of them again: the source is random if a record differs then, too, and
        unsafe for threads if not.
        """
        switch_interval_s = sys.getswitchinterval()
        reads_before = self._reads
        wrong: WrongRecord | None = None
        rng = np.random.default_rng(0)
        # `shuffled` yields orders without an end. An order is a list of indices for one thread,
        # which keeps the records of the order. So an order of large records has few of them.
        most = max(1, self.count * _BYTES // (THREADS * max(1, self._bytes)))
        shuffled = (rng.permutation([*self._alone])[:most].tolist() for _ in itertools.count())
        sys.setswitchinterval(_SWITCH_S)
        try:
            for _ in range(_ROUNDS):
                wrong = wrong or self._first_wrong(shuffled, self._seconds / _ROUNDS, THREADS)
        finally:
            sys.setswitchinterval(switch_interval_s)
        if wrong is None:
            return None
        # A random source or function also differs for one thread alone, if it reads often enough.
        passes = 1 + _MORE_ALONE * (self._reads - reads_before) // self.count
        again = itertools.repeat([*self._alone], passes)
        return self._first_wrong(again, self._seconds) or wrong._replace(kind=UNSAFE)

    def _first_wrong(
        self, orders: Iterable[Iterable[int]], seconds: float, threads: int = 1
    ) -> WrongRecord | None:
        """Reads records again, and returns the first one that differs; None if none does.

        Args:
            orders: Lists of indices. One thread reads the records of one list, in its order.
            seconds: Seconds after which no further record is read.
            threads: Number of threads.
        """
        found = list[WrongRecord]()  # by all threads
        until = time.monotonic() + seconds

        def read(order: Iterable[int]) -> int:
            records = dict[int, Any]()
            for index in order:
                records[index] = self._read(index)
                if found or time.monotonic() > until:
                    break
            # Compared only now, so that threads spend most of the time inside the user's code.
            for index, got in records.items():
                alone, digest = self._alone[index]
                # A read that may succeed next time says nothing about the record.
                is_transient_error = isinstance(got, Exception) and is_transient(got)
                if not is_transient_error and _digest(got) != digest:
                    # `_wrong_in_threads` changes the kind if one thread alone gets no difference.
                    found.append(WrongRecord(RANDOM, index, got, alone))
            return len(records)

        for count in _by_threads(read, orders, threads):
            self._reads += count
            if found or time.monotonic() > until:
                break
        return found[0] if found else None


def _by_threads(work: Callable[[S], T], items: Iterable[S], threads: int) -> Iterator[T]:
    """Yields `work(item)` for each item, in order. Threads compute it in this thread's context."""
    source = Items(iter(items))
    made = mapped(work, source, size=threads, num_threads=threads, name="grain-shard-check")
    try:
        yield from made
    finally:
        made.close()


def _digest(record: Any) -> str:
    try:
        return element_digest(record)
    except Exception:  # a class that has no digest; the functions above it may make arrays of it
        return type(record).__name__


def _num_bytes(record: Any) -> int:
    try:
        leaves = jax.tree.leaves(record)
    except Exception:  # keys that have no order, before a function makes a tree of the record
        leaves = [record]
    return sum(getattr(leaf, "nbytes", None) or sys.getsizeof(leaf) for leaf in leaves)
