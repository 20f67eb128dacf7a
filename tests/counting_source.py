"""A source that counts how often each record was asked for, and fails or waits as a test says."""

import collections
import threading


def nothing(index, number):
    """Lets a read succeed."""


class Source:
    """Records that are their own indices; `on_read` gets an index, and which request it is."""

    def __init__(self, num_records, on_read):
        self._num_records, self._on_read = num_records, on_read
        self.requests = collections.Counter()
        self._lock = threading.Lock()

    def __getstate__(self):
        return {**self.__dict__, "_lock": None}

    def __setstate__(self, state):
        self.__dict__ = {**state, "_lock": threading.Lock()}

    def __len__(self):
        return self._num_records

    def __getitem__(self, index):
        with self._lock:
            self.requests[index] += 1
            number = self.requests[index]
        self._on_read(index, number)
        return index


class BatchedSource(Source):
    """Reads many records in one call, which fails if one of them does; `calls` has the indices."""

    def __init__(self, num_records, on_read):
        super().__init__(num_records, on_read)
        self.calls = []

    def __getitems__(self, indices):
        self.calls.append(list(indices))
        return [self[index] for index in indices]


SOURCES = {"one by one": Source, "many in a call": BatchedSource}


class InFiles(Source):
    """Ten records a file."""

    paths = ("file-0", "file-1")

    def where(self, index):
        return f"file-{index // 10}", index % 10
