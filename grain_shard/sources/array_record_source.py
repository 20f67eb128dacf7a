"""`ArrayRecordSource`: the records of any number of ArrayRecord files, read many at a time."""

from __future__ import annotations

import bisect
import errno
import functools
import glob
import itertools
import math
import operator
import os
import re
import resource
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, SupportsIndex, TypeVar

import numpy as np
from array_record.python.array_record_data_source import FileInstruction

from grain_shard.sources.record_files import BUCKET, find_files, open_file

_T = TypeVar("_T")
PathOrInstruction = str | os.PathLike[str] | FileInstruction


def _most_open() -> int:
    """Returns half of the files that the process may open. The other half is for other uses."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if most == resource.RLIM_INFINITY else most // 2


# The caches of open readers, one for each source of this process. A weak reference leaves the list
# when its source is gone.
_open_files: list[weakref.ref[Any]] = []
# In seconds. Threads read files only once the first few files have taken this long together. A file
# in the page cache answers in about 10 us, which is less than a thread costs.
_PATIENCE_S = 5e-3

# array_record raises a RuntimeError or a ValueError for every failure. Only the text of the error
# shows that it is transient: by the status from a bucket, or by the operating system's text for one
# of these error codes.
_PASSING = "EIO EAGAIN ETIMEDOUT ESTALE ECONNABORTED ECONNREFUSED ECONNRESET ENOTCONN"
_MAY_HEAL = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED)\b|"
    + "|".join(re.escape(os.strerror(getattr(errno, name))) for name in _PASSING.split())
)


class RecordLocation(NamedTuple):
    """The file and position of a record.

    Attributes:
        path: The file.
        position: The record's position in the file, from 0.
    """

    path: str
    position: int


class ArrayRecordSource:
    """The records of ArrayRecord files by index, read many at a time.

    The records of a batch are read with one call per file, because this source has the method
    ``_getitems``, by which Grain asks for several records. Grain's own `ArrayRecordDataSource` has
    only ``__getitems__``, which Grain does not call.

    Slow files, such as files of a mounted bucket, are read in threads. Files stay open for later
    reads, because opening a file takes several round trips on a mounted bucket. All sources
    together keep open at most about half as many files as the process may open (``ulimit -n``).
    Beyond that, files are closed, and opened again when they are needed. Fork before you make a
    source: array_record may crash in a process that is forked later.

    Example:
        >>> import tempfile
        >>> from array_record.python.array_record_module import ArrayRecordWriter
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for number, records in enumerate([[b"a", b"b"], [b"c"]]):
        ...         writer = ArrayRecordWriter(f"{folder}/train-{number}", "group_size:1")
        ...         for record in records:
        ...             _ = writer.write(record)
        ...         writer.close()
        ...     source = ArrayRecordSource(f"{folder}/train-*")
        ...     print(list(source))
        [b'a', b'b', b'c']

    Args:
        paths: A path, or several paths in a list. A path is a file; a pattern, e.g.
            ``"data/**/img-*"``; a folder, for the files in it with "array_record" or "arrayrecord"
            in their names; one of these with a range of records of each file, e.g.
            ``"data/img-0[100:200]"``; a `FileInstruction` of TensorFlow Datasets; or the URL of one
            object of a Google bucket, e.g. ``"gs://bucket/img-0"``. The files of a pattern or a
            folder are sorted. Several paths keep the given order. ``~`` is the home folder. A
            relative path starts from the folder that is current when the source is made.
            array_record itself reads the object of a URL, with this host's credentials. Any other
            bucket must be mounted.
        reader_options: Options of each reader, e.g. ``{"index_storage_option": "in_memory"}``.

    Raises:
        FileNotFoundError: A file does not exist, or no file matches a pattern.
        RuntimeError: A file cannot be opened, or is not an ArrayRecord file.
        TypeError: An argument is not a path.
        ValueError: No path is given, a record is given twice, a URL cannot be opened, or a range
            ends before it begins.
    """

    def __init__(
        self,
        paths: PathOrInstruction | Sequence[PathOrInstruction],
        reader_options: dict[str, str] | None = None,
    ):
        if isinstance(paths, str | bytes) or not isinstance(paths, Sequence):
            paths = [paths]
        given: list[PathOrInstruction] = list(paths)
        if not given:
            raise ValueError("paths is empty: there is nothing to read")
        # Without reading ahead, because records are read in random order.
        options = {"readahead_buffer_size": 0, **(reader_options or {})}
        self._options = ",".join(f"{name}:{value}" for name, value in options.items())
        self._ranges = list(itertools.chain(*_in_threads(_ranges_of, given)))
        # Sorted, so that ranges of one file that overlap are neighbours.
        ranges = sorted(
            (os.path.normpath(path), start, math.inf if stop is None else stop, path)
            for path, start, stop in self._ranges
        )
        for (file, _, stop, _), (next_file, start, _, path) in itertools.pairwise(ranges):
            if file == next_file and start < stop:
                raise ValueError(
                    f"{path!r} is among the files twice, so its records would be read twice.\n"
                    "  remedy: remove one of the two entries of paths (a path, a pattern, a folder"
                    " or a range) that name the records. To give records a larger weight, use"
                    " grain_shard.mix."
                )
        counts = _in_threads(self._count, self._ranges)
        self._ends = list(itertools.accumulate(counts))
        # A record's position in its file is its index in the source plus the shift of its range.
        # The first record of a range has the index `end - count` and the position `range_.start`.
        ends = zip(self._ranges, self._ends, counts, strict=True)
        self._shifts = [range_.start - (end - count) for range_, end, count in ends]

    @property
    def paths(self) -> list[str]:
        """Absolute paths, in the order of the records. A file with two ranges is listed twice."""
        return [range_.path for range_ in self._ranges]

    def where(self, index: SupportsIndex) -> RecordLocation:
        """Returns the file of a record, and the record's position in it.

        Example:
            >>> source = ArrayRecordSource(["/data/train-0[10:20]", "/data/train-1[0:5]"])
            >>> source.where(12)
            RecordLocation(path='/data/train-1', position=2)

        Raises:
            IndexError: There is no such record.
        """
        record = operator.index(index)
        if not 0 <= record < len(self):
            raise IndexError(f"there is no record {record}: the source has {len(self)} records")
        number = bisect.bisect_right(self._ends, record)
        return RecordLocation(self._ranges[number].path, record + self._shifts[number])

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: SupportsIndex) -> bytes:
        path, position = self.where(index)
        return self._read(path, [position])[0]

    def _getitems(self, indices: Sequence[int]) -> Sequence[bytes]:
        """Returns the records at the given indices, in their order. Grain calls this method.

        The indices are grouped by the range that has the record. Each group is read in one call.
        """
        wanted = np.asarray(indices, np.int64)
        for index in wanted[(wanted < 0) | (wanted >= len(self))]:
            self.where(index)  # the index is out of range, so this raises the IndexError
        range_of = np.searchsorted(self._ends, wanted, side="right")
        by_range = np.argsort(range_of, kind="stable")
        borders = np.flatnonzero(np.diff(range_of[by_range])) + 1
        # A group has the slots of its records: their places in `indices` and among the results.
        groups = np.split(by_range, borders) if len(wanted) else []
        paths, positions = [], []
        for slots in groups:
            number = range_of[slots[0]]
            paths.append(self._ranges[number].path)
            positions.append((wanted[slots] + self._shifts[number]).tolist())
        records = [b""] * len(indices)
        for slots, found in zip(groups, _in_threads(self._read, paths, positions), strict=True):
            for slot, record in zip(slots.tolist(), found, strict=True):
                records[slot] = record
        return records

    def _read(self, path: str, positions: list[int]) -> Sequence[bytes]:
        """Reads records of one file in one call. A transient error becomes an `OSError`."""
        try:
            return self._reader(path).read(positions)
        except (RuntimeError, ValueError) as error:
            if _MAY_HEAL.search(str(error).replace(path, "")):
                raise OSError(f"{path}: {error}") from error
            if "out of bound" in str(error):
                raise ValueError(
                    f"{path!r} has {self._reader(path).num_records()} records, so it has no record"
                    f" {max(positions)}.\n  remedy: correct the range of the file's records."
                ) from error
            raise

    @functools.cached_property
    def _reader(self) -> Any:
        """A function that returns the open reader of a path, from a cache.

        A reader that the cache drops may still be in use.
        """
        # No lock is held while a file is opened, so that no thread waits for another one. If two
        # threads open the same file at once, the cache drops one of the readers.
        readers = functools.lru_cache(_most_open())(functools.partial(_opened, self._options))
        _open_files.append(weakref.ref(readers, _open_files.remove))
        return readers

    def __getstate__(self) -> dict[str, Any]:
        # Open readers are not pickled: another process opens the files itself.
        return {name: value for name, value in vars(self).items() if name != "_reader"}

    def _count(self, range_: _FileRange) -> int:
        stop = self._reader(range_.path).num_records() if range_.stop is None else range_.stop
        return stop - range_.start

    def __repr__(self) -> str:
        return f"ArrayRecordSource({len(self._ranges)} files, {len(self)} records)"


class _FileRange(NamedTuple):
    """Records of one file, from `start` up to `stop`; up to the last record if `stop` is None."""

    path: str
    start: int
    stop: int | None


def _ranges_of(given: PathOrInstruction) -> list[_FileRange]:
    """Returns the files of one entry of `paths`, with the range of records to read from each."""
    start, stop = 0, None  # all records of the file
    if isinstance(given, FileInstruction):
        files, start, stop = [os.fspath(given.filename)], given.skip, given.skip + given.take
    elif not isinstance(given, str | os.PathLike):
        raise TypeError(f"{given!r} is not a path: pass a str or a pathlib.Path")
    elif records := re.fullmatch(r"(.*)\[(\d+):(\d+)\]", path := os.path.expanduser(given)):
        files, start, stop = find_files(records[1]), int(records[2]), int(records[3])
    else:
        files = find_files(path)
    if stop is not None and start > stop:
        raise ValueError(
            f"the range [{start}:{stop}] of {files[0]!r} ends before it begins.\n"
            "  remedy: give [start:stop] with start <= stop. [0:100] has the records 0 to 99."
        )
    for file in files:
        if "://" in file and (glob.has_magic(file) or not file.startswith(BUCKET)):
            raise ValueError(
                f"{file!r} cannot be opened: a URL must begin with {BUCKET} and name one object,"
                " without a pattern.\n"
                "  remedy: mount the bucket and give the path or pattern below the mount's folder,"
                " or write a source of your own (docs/buckets.md)."
            )
    # Files are also opened later, and in other processes, where the current folder may be another.
    absolute = [file if file.startswith(BUCKET) else str(Path(file).absolute()) for file in files]
    return [_FileRange(file, start, stop) for file in absolute]


def _opened(options: str, path: str) -> Any:
    """Returns the reader of a file. If too many files are open, all caches close theirs first."""
    caches = [cache for ref in _open_files.copy() if (cache := ref())]
    # A cache by itself closes its least recently read file, but knows nothing of other caches.
    if sum(cache.cache_info().currsize for cache in caches) > _most_open():
        for cache in caches:
            cache.cache_clear()
    return open_file(options, path)


@functools.cache
def _threads() -> ThreadPoolExecutor:
    """Returns the threads that open and read files, for all sources of this process."""
    # On a mount with a latency of 20 ms, 64 threads read fewer records per second than 128, and 256
    # threads no more. A thread may still read a file that the cache has dropped, so there are fewer
    # threads than files that may stay open.
    return ThreadPoolExecutor(min(128, _most_open() // 2), "array-record-files")


# A forked process has none of the threads, so it makes its own.
os.register_at_fork(after_in_child=_threads.cache_clear)


def _in_threads(function: Callable[..., _T], *arguments: Iterable[Any]) -> list[_T]:
    """Returns the results of ``map(function, *arguments)``; threads help if the first are slow.

    `function` must not call `_in_threads`: threads that wait for free threads could wait for each
    other.
    """
    until = time.perf_counter() + _PATIENCE_S
    remaining = zip(*arguments, strict=True)
    results: list[_T] = []
    for call in remaining:
        results.append(function(*call))
        if time.perf_counter() > until:
            break
    calls = list(remaining)  # the calls that the loop above has not made
    if not calls:
        return results
    try:
        others = _threads().map(lambda call: function(*call), calls)
    except RuntimeError:  # the program is ending, or the system allows no more threads
        others = itertools.starmap(function, calls)
    return [*results, *others]
