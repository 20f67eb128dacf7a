"""Digests of two records of a source, which hosts compare with each other and with a saved state.

Two sources with the same name and the same number of records may hold other records, or the same
records in another order. Two records show the difference, unless they are the same in both sources.
Both records are read from the source itself, before any function of the user, because the user's
functions may be random.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import logging

from grain_shard.digest import DIGITS, element_digest
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.nodes import RANGE, SOURCE
from grain_shard.grain_inside.routes import Route
from grain_shard.threads.tasks import Task

# A random source may by chance give the same two records again. So both are read this many more
# times. If each record has two equally likely values, all reads agree in one of 2**12 (about four
# thousand) cases.
_MORE_READS = 6
# The digest is appended to this field of a state, after this mark. With a separate field, a state
# would exceed 200 bytes.
_SOURCE, _MARK = "source", "-"


class Contents(Task):
    """Digests of two records of a dataset's first source: the first record and the middle one.

    As a task, it reads the records in a thread that also reads batches.

    Args:
        ds: The dataset; None for a pipeline whose contents are not compared.

    Attributes:
        digest: The digests of both records, one after the other. It is "" before the records are
            read, and if they are not compared.
        is_reread: True once threads of this process read some records again; see `rereads.py`.
        unsteady: The leaves that differed when one thread read them alone; see `Sample.unsteady`.
        is_read: True once the records were read, or if there are no records to read.
        why_not: The reason why contents are not compared, for messages. It is "" if contents are
            compared, if `ds` is None, and if every source is a ``MapDataset.range``.
    """

    # With size 0, the time of this task is left out when the number of threads is chosen.
    size = 0

    def __init__(self, ds: Any = None):
        leaves = [] if ds is None else nodes.sources(ds)
        self._node = next((node for node in leaves if type(node) is SOURCE and len(node)), None)
        self.digest: str = ""
        self.why_not: str = ""
        self.is_reread: bool = False
        self.unsteady = collections.Counter[str]()
        self.is_read: bool = self._node is None
        if self.is_read and any(type(node) is not RANGE for node in leaves):
            self.why_not = "the source of the pipeline is unknown"

    def read(self) -> None:
        """Reads the first and the middle record and sets `digest`, unless that was done before.

        If a record cannot be read or has no digest, no error is raised, and `digest` stays "".
        """
        if self.is_read:
            return
        self.digest, self.is_read = self._read(), True
        if not self.digest:
            self.why_not = f"one of the records {self._indices} cannot be read or hashed"

    def run(self) -> None:
        self.read()

    def by_record(self, digest: str) -> dict[str, str]:
        """Splits a digest of contents into the digests of the two records.

        Returns:
            A dict from the name of a record to its digest; empty if the digest is "".
        """
        names = [f"digest of record {index} of {self._node}" for index in self._indices]
        return {name: digest[i * DIGITS :][:DIGITS] for i, name in enumerate(names) if digest}

    def is_steady(self) -> bool:
        """Reads both records several times; returns whether they are the same each time."""
        return all(self._read() == self.digest for _ in range(_MORE_READS))

    def leave_out(self) -> None:
        """Stops the comparison of contents, because the source is random, and logs that."""
        self.digest, self.why_not = "", f"{self._node} returns other records at each read"
        text = (
            "grain_shard: the hosts cannot compare the records of their sources: %s. A run that"
            " starts again gets other records.\n"
            "  remedy: make random changes in .random_map(f), with .seed(s) above it."
        )
        logging.warning(text, self.why_not)

    @property
    def _indices(self) -> list[int]:
        return [] if self._node is None else sorted({0, len(self._node) // 2})

    def _read(self) -> str:
        if self._node is None:
            return ""
        try:
            # The elements get no name here. The traceback of an error among them refers to this
            # frame, and with a name the frame and the error would keep each other in memory.
            read = Route(self._node, np.array(self._indices)).read
            digests = [element_digest(element) for element in read()]
        except Exception:  # the loop raises the error when it reads this record
            return ""
        return "".join(digests) if len(digests) == len(self._indices) else ""


def with_digest(state: dict[str, Any], digest: str) -> dict[str, Any]:
    """Returns a state with a digest of contents at the end of its field ``source``.

    If the digest is "", returns the state unchanged.

    Example:
        >>> with_digest({"step": 3, "source": "aaaa"}, "bbbb")
        {'step': 3, 'source': 'aaaa-bbbb'}
    """
    return {**state, _SOURCE: f"{state[_SOURCE]}{_MARK}{digest}"} if digest else state


def without_digest(state: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns a state without its digest of contents, and the digest.

    The digest is "" if the state has none.

    Example:
        >>> without_digest({"step": 3, "source": "aaaa-bbbb"})
        ({'step': 3, 'source': 'aaaa'}, 'bbbb')
    """
    source = state.get(_SOURCE)
    if not isinstance(source, str):
        return dict(state), ""
    source, _, digest = source.partition(_MARK)
    return {**state, _SOURCE: source}, digest
