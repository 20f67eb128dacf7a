"""Sources that count the reads of each record, and fail or wait in a read if a test says so."""

import collections
import threading


def nothing(index, number):
    """Does nothing, so that the read succeeds: an `on_read` for `Source`."""


def bad(*indices, error=ValueError):
    """Returns an `on_read` that fails for these indices, each time."""

    def fail(index, number):
        if index in indices:
            raise error(f"record {index} is corrupt")

    return fail


class Source:
    """A source whose records are their own indices.

    Args:
        num_records: Number of records.
        on_read: Function that each read calls. It gets the index of the record and the number of
            the read (1 for the first read of this record). It may raise or wait.

    Attributes:
        requests: Number of reads so far, by index.
    """

    def __init__(self, num_records, on_read=nothing):
        self._num_records, self._on_read = num_records, on_read
        self.requests = collections.Counter()
        self._lock = threading.Lock()

    def __getstate__(self):
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state):
        self.__dict__ = {**state, "_lock": threading.Lock()}

    def __len__(self):
        return self._num_records

    def __repr__(self):  # the same on every host
        return f"Source({self._num_records})"

    def read_for_batches(self):
        """Returns the indices of the reads that a host makes for its batches, in any order.

        To compare sources, a host reads the first record once more.
        """
        return list((self.requests - collections.Counter({0})).elements())

    def __getitem__(self, index):
        with self._lock:
            self.requests[index] += 1
            number = self.requests[index]
        self._on_read(index, number)
        return index


class BatchedSource(Source):
    """A `Source` that can read many records in one call, which fails if one of them fails.

    Attributes:
        calls: The list of indices of each such call.
    """

    def __init__(self, num_records, on_read=nothing):
        super().__init__(num_records, on_read)
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [self[index] for index in indices]


SOURCES = {"one by one": Source, "many in a call": BatchedSource}


class InFiles(Source):
    """A `Source` whose records are in two files of ten records each."""

    def where(self, index):
        return f"file-{index // 10}", index % 10
