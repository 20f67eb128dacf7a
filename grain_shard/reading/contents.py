"""The contents of a source: digests of two of its records, for hosts and states to compare.

Names of files and counts of records are equal if a source lists its files in another order. Two
records tell the difference, unless both lie in files that have kept their places. They are read
from the source itself, below the user's functions, which may be random.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from absl import logging

from grain_shard.digest import DIGITS, element_digest
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.routes import Route
from grain_shard.grain_inside.source_reads import RANGE, SOURCE
from grain_shard.tasks import Task

# A random source may give the same records again. If it tosses a coin for each of the two records,
# all these reads are equal in one of four thousand cases.
_MORE_READS = 6
# The field of a state that ends in the digest, after this mark. A field of its own would not leave
# a state under 200 bytes.
_SOURCE, _MARK = "source", "-"


class Contents:
    """Digests of two records of a dataset's first source: the first record and the middle one.

    Args:
        ds: The dataset; None for a pipeline whose contents are not compared.

    Attributes:
        digest: The digests of both records; "" before they are read, and if they are not compared.
        is_read: True once the records were read.
        why_not: The reason why contents are not compared; "" if there is none.
    """

    def __init__(self, ds: Any = None):
        leaves = [] if ds is None else nodes.sources(ds)
        self._node = next((node for node in leaves if type(node) is SOURCE and len(node)), None)
        self.digest: str = ""
        self.why_not: str = ""
        self.is_read: bool = self._node is None
        if self.is_read and any(type(node) is not RANGE for node in leaves):
            self.why_not = "no source is known below the pipeline"

    def read(self) -> None:
        """Reads both records, once. A record that cannot be read or digested raises nothing."""
        if self.is_read:
            return
        self.digest, self.is_read = self._read(), True
        if not self.digest:
            self.why_not = f"one of the records {self._indices} cannot be read, or has no digest"

    def by_record(self, digest: str) -> dict[str, str]:
        """Returns the two parts of a digest, each by the name of its record."""
        names = [f"record {index} of {self._node}" for index in self._indices]
        return {name: digest[i * DIGITS :][:DIGITS] for i, name in enumerate(names) if digest}

    def is_steady(self) -> bool:
        """Returns whether the source gives the same records again; reads them for that."""
        return all(self._read() == self.digest for _ in range(_MORE_READS))

    def leave_out(self) -> None:
        """Stops the comparison of contents, and logs that."""
        self.digest, self.why_not = "", f"{self._node} gives other records at each read"
        logging.warning("grain_shard: contents are not compared: %s.", self.why_not)

    @property
    def _indices(self) -> list[int]:
        return [] if self._node is None else sorted({0, len(self._node) // 2})

    def _read(self) -> str:
        if self._node is None:
            return ""
        try:
            # No name for the elements: an error among them would keep this frame, and its own.
            read = Route(self._node, np.array(self._indices)).read
            digests = [element_digest(element) for element in read()]
        except Exception:  # the batch that has this record raises the error
            return ""
        return "".join(digests) if len(digests) == len(self._indices) else ""


class ContentsRead(Task[Any]):
    """The reads of `Contents`, as a task of a thread that reads batches."""

    begins, size = 0, 0  # size 0 keeps its time out of the pace of batches

    def __init__(self, contents: Contents):
        self._contents = contents

    def run(self) -> Iterable[tuple[int, Any]]:
        self._contents.read()
        return ()


def with_digest(state: dict[str, Any], digest: str) -> dict[str, Any]:
    """Returns a state with a digest of contents.

    Example:
        >>> with_digest({"step": 3, "source": "aaaa"}, "bbbb")
        {'step': 3, 'source': 'aaaa-bbbb'}
    """
    return {**state, _SOURCE: f"{state[_SOURCE]}{_MARK}{digest}"} if digest else state


def without_digest(state: Any) -> tuple[Any, str]:
    """Takes a state and its digest of contents apart; "" if it has none.

    Example:
        >>> without_digest({"step": 3, "source": "aaaa-bbbb"})
        ({'step': 3, 'source': 'aaaa'}, 'bbbb')
    """
    source = state.get(_SOURCE) if isinstance(state, Mapping) else None
    if not isinstance(source, str):
        return state, ""
    source, _, digest = source.partition(_MARK)
    return {**state, _SOURCE: source}, digest
