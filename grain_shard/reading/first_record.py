"""The digest of a source's first record, which hosts compare with each other and with a state.

Two sources with the same name and the same number of records may hold other records, or the same
records in another order. The record is read from the source itself, before any function of the
user, because the user's functions may be random.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from typing import Any

from grain_shard.digest import digest, element_digest
from grain_shard.grain_inside import nodes
from grain_shard.grain_inside.nodes import SOURCE

# The digest is appended to this field of a state, after this mark. With a separate field, a state
# would exceed 200 bytes.
_SOURCE, _MARK = "source", "-"


class FirstRecord:
    """The digest of record 0 of a dataset's source or, for a mixture, of record 0 of each source.

    This is also a task of the pool whose threads read the batches: `run` reads the record.

    Args:
        ds: The dataset; None for a pipeline whose records are not compared.

    Attributes:
        digest: The digest. It is "" before the record is read, and if it cannot be read.
        is_read: True once the record was read, or if there is none to read.
    """

    # A task of size 0 has no influence on the number of threads that the pool chooses.
    size = 0

    def __init__(self, ds: Any = None):
        sources = [] if ds is None else nodes.sources(ds)
        self._sources = [node for node in sources if type(node) is SOURCE and len(node)]
        self.digest: str = ""
        self.is_read: bool = not self._sources
        # Held during the read. The loop also calls `run` once the pool has ended, and a thread of
        # the pool may still be inside.
        self._reading = threading.Lock()

    def run(self) -> tuple[()]:
        """Reads the record and sets `digest`, unless that was done before. Makes no batch."""
        with self._reading:
            if not self.is_read:
                with contextlib.suppress(Exception):  # the loop raises the error when it reads it
                    self.digest = digest([element_digest(node[0]) for node in self._sources])
                self.is_read = True
        return ()


def with_digest(state: dict[str, Any], digest: str) -> dict[str, Any]:
    """Returns a state whose field ``source`` ends with a digest of records, unless that is "".

    Example:
        >>> with_digest({"step": 3, "source": "aaaa"}, "bbbb")
        {'step': 3, 'source': 'aaaa-bbbb'}
    """
    return {**state, _SOURCE: f"{state[_SOURCE]}{_MARK}{digest}"} if digest else state


def without_digest(state: Mapping[str, Any]) -> tuple[dict[str, Any], str]:
    """Returns a state without its digest of records, and the digest.

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
