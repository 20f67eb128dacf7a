"""`ArrayRecordSource`: the records of any number of ArrayRecord files, read many at a time."""

from __future__ import annotations

import bisect
import errno
import functools
import itertools
import os
import re
import resource
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from array_record.python.array_record_data_source import FileInstruction

from grain_shard.reading.find_files import find_files, require_openable
from grain_shard.reading.open_file import open_file

PathOrInstruction = str | os.PathLike[str] | FileInstruction

# Threads that open and read files for all sources of this process, apart from the threads that ask
# for records. They must be many: if the first calls take them all, concurrent calls seem to bring
# nothing. With 64 threads, a mount with a latency of 20 ms gave half the records per second.
_FREE_HELPERS = threading.BoundedSemaphore(256)
# Files in the page cache answer in some 10 us each, and a thread costs more than that. So files are
# read side by side only after the first few have taken this long, in seconds.
_PATIENCE_S = 5e-3

# array_record raises a RuntimeError or a ValueError for every failure, with the answer of the
# bucket or of the operating system in its text.
_PASSING = "EIO EAGAIN ETIMEDOUT ESTALE ECONNABORTED ECONNREFUSED ECONNRESET ENOTCONN"
_MAY_HEAL = re.compile(
    r"\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED)\b|"
    + "|".join(re.escape(os.strerror(getattr(errno, name))) for name in _PASSING.split())
)


class RecordPlace(NamedTuple):
    """The file and position of a record.

    Attributes:
        path: The file.
        position: The record's position in the file, from 0.
    """

    path: str
    position: int


class ArrayRecordSource:
    """Records of ArrayRecord files by index, read many at a time.

    One call into the reader of each file reads the rows of a batch. Grain asks a source for several
    records through ``_getitems`` (its protocol for batched reads). Grain's own
    `ArrayRecordDataSource` can read many, too, but only under the name ``__getitems__``.

    Files whose records must be counted are opened side by side when the source is made. They stay
    open for later reads, because opening a file takes several round trips on a mounted bucket. At
    most half as many are open as the process may open (``ulimit -n``). Beyond that, the least
    recently read files are closed, and opened again when needed.

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
        paths: One or several of: a path; a pattern, e.g. ``"data/**/img-*"``; a folder, for the
            files in it with "array_record" in their names; a file and a range of its records, e.g.
            ``"data/img-0[100:200]"``; a `FileInstruction` of TensorFlow Datasets; the URL of one
            object of a Google bucket, e.g. ``"gs://bucket/img-0"``. The files of a pattern or a
            folder are sorted; several paths keep the given order. ``~`` is the home folder.
            array_record itself asks the bucket for a URL's object, with this host's credentials;
            the log warns if that takes long. Any other bucket must be mounted.
        reader_options: Options of each reader, e.g. ``{"index_storage_option": "in_memory"}``.

    Raises:
        FileNotFoundError: A file does not exist, or no file matches a pattern.
        RuntimeError: A file cannot be opened, or is not an ArrayRecord file.
        TypeError: An argument is not a path.
        ValueError: No path is given, a file is given twice, a URL cannot be opened, or a range ends
            before it begins.
    """

    def __init__(
        self,
        paths: PathOrInstruction | Sequence[PathOrInstruction],
        reader_options: dict[str, str] | None = None,
    ):
        if isinstance(paths, str) or not isinstance(paths, Sequence):
            paths = [paths]
        given: list[PathOrInstruction] = list(paths)
        if not given:
            raise ValueError("paths is empty: there is nothing to read")
        options = {"readahead_buffer_size": 0, **(reader_options or {})}
        self._options = ",".join(f"{name}:{value}" for name, value in options.items())
        self._reader = _cached_readers(self._options)
        self._parts = list(itertools.chain(*_side_by_side(_parts_of, given)))
        part, times = Counter(self._parts).most_common(1)[0]
        if times > 1:
            raise ValueError(
                f"{part.path!r} is among the files twice, so each of its records would be, too.\n"
                "  remedy: leave it out of the list, or out of a pattern. To weight records, see"
                " grain_shard.mix."
            )
        counts = _side_by_side(self._count, self._parts)
        self._ends = list(itertools.accumulate(counts))
        # A record's position in its file is its index in the source plus the shift of its part.
        ends = zip(self._parts, self._ends, counts, strict=True)
        self._shifts = [part.start - (end - count) for part, end, count in ends]

    @property
    def paths(self) -> list[str]:
        """Files, in the order of their records."""
        return [part.path for part in self._parts]

    def where(self, index: SupportsIndex) -> RecordPlace:
        """Returns the file of a record, and the record's position in it.

        Example:
            >>> source = ArrayRecordSource(["train-0[10:20]", "train-1[0:5]"])
            >>> source.where(12)
            RecordPlace(path='train-1', position=2)

        Raises:
            IndexError: There is no such record.
        """
        record = index.__index__()
        self._check(record)
        part = bisect.bisect_right(self._ends, record)
        return RecordPlace(self._parts[part].path, record + self._shifts[part])

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: SupportsIndex) -> bytes:
        path, position = self.where(index)
        return self._read(path, [position])[0]

    def _getitems(self, indices: Sequence[int]) -> Sequence[bytes]:
        wanted = np.asarray(indices, np.int64)
        for index in wanted[(wanted < 0) | (wanted >= len(self))]:
            self._check(int(index))
        parts = np.searchsorted(self._ends, wanted, side="right")
        by_part = np.argsort(parts, kind="stable")
        borders = np.flatnonzero(np.diff(parts[by_part])) + 1
        records = [b""] * len(indices)

        def read(places: np.ndarray) -> None:
            part = parts[places[0]]
            positions = (wanted[places] + self._shifts[part]).tolist()
            found = self._read(self._parts[part].path, positions)
            for place, record in zip(places.tolist(), found, strict=True):
                records[place] = record

        _side_by_side(read, np.split(by_part, borders) if len(wanted) else [])
        return records

    def _read(self, path: str, positions: list[int]) -> Sequence[bytes]:
        try:
            return self._reader(path).read(positions)
        except (RuntimeError, ValueError) as error:
            if _MAY_HEAL.search(str(error)):
                raise OSError(f"{path}: {error}") from error
            raise

    def _check(self, index: int) -> None:
        if not 0 <= index < len(self):
            raise IndexError(f"record {index} of {len(self)} does not exist")

    def _count(self, part: _Part) -> int:
        stop = self._reader(part.path).num_records() if part.stop is None else part.stop
        return stop - part.start

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        del state["_reader"]  # another process opens the files itself
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._reader = _cached_readers(self._options)

    def __repr__(self) -> str:
        return f"ArrayRecordSource({len(self._parts)} files, {len(self)} records)"


class _Part(NamedTuple):
    """Records of one file, from `start` up to `stop`; up to the last record if `stop` is None."""

    path: str
    start: int
    stop: int | None


def _parts_of(given: PathOrInstruction) -> list[_Part]:
    if not isinstance(given, str | os.PathLike):
        if not isinstance(given, FileInstruction):
            raise TypeError(f"a path is text, not {given!r}")
        path = os.fspath(given.filename)
        require_openable(path)
        return [_Part(path, given.skip, given.skip + given.take)]
    path = os.path.expanduser(given)
    require_openable(path)
    if records := re.fullmatch(r"(.*)\[(\d+):(\d+)\]", path):
        file, start, stop = records.group(1), int(records.group(2)), int(records.group(3))
        if start > stop:
            raise ValueError(
                f"the records {start} to {stop} of {path!r} end before they begin.\n"
                "  remedy: write the first record, and the one after the last: [0:100]."
            )
        return [_Part(file, start, stop)]
    return [_Part(file, 0, None) for file in find_files(path)]


def _cached_readers(options: str) -> Any:
    """Returns a cache of open readers by path; a reader that it drops may still be in use."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    unlimited = most == resource.RLIM_INFINITY
    # Two threads that ask for the same file at once may both open it, and one reader is dropped. In
    # return, no thread waits while another one opens a file.
    return functools.lru_cache(None if unlimited else most // 2)(
        functools.partial(open_file, options)
    )


def _side_by_side(function: Any, items: Sequence[Any]) -> list[Any]:
    """Returns the results for all items; it uses threads only once the first items took long."""
    until = time.perf_counter() + _PATIENCE_S
    results = []
    for done, item in enumerate(items):
        helpers = 0
        if time.perf_counter() > until:
            while helpers < len(items) - done and _FREE_HELPERS.acquire(blocking=False):
                helpers += 1
        if helpers:
            threads = ThreadPoolExecutor(helpers, thread_name_prefix="grain-shard-files")
            try:
                return results + list(threads.map(function, items[done:]))
            finally:
                # After an error or Ctrl-C, do not wait for reads that a bucket does not answer.
                threads.shutdown(wait=False, cancel_futures=True)
                _FREE_HELPERS.release(helpers)
        results.append(function(item))  # one at a time; helper threads may be free at the next item
    return results
