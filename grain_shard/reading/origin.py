"""The origin of a record: its index in the source, and the file that holds it, if that is known.

It is searched only after a record has failed.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

import grain

from grain_shard.grain_inside.routes import source_of


class Origin(NamedTuple):
    """The place of a record in a source.

    Attributes:
        record: Its index in the source.
        source: The class of the source.
        path: The record's file; None if the source has no ``where(index)`` that gives it.
        position: The record's position in the file; None as for `path`.
    """

    record: int
    source: str
    path: str | None = None
    position: int | None = None

    def __str__(self) -> str:
        text = f"record {self.record} of the source {self.source}"
        return text if self.path is None else f"{text} (record {self.position} of {self.path})"

    @classmethod
    def of(cls, records: grain.MapDataset, record: int) -> Origin | None:
        """Finds the origin of a dataset's record; None if the route to its source is unknown."""
        with contextlib.suppress(Exception):  # it explains another error, and must not replace it
            found = source_of(records, record)
            if found is not None:
                source, index = found
                return cls(index, source.__class__.__name__, *_place(source, index))
        return None


def _place(source: Any, index: int) -> tuple[str | None, int | None]:
    """Returns the file and the position in it, as `ArrayRecordSource.where` gives them."""
    with contextlib.suppress(Exception):  # another library's `where` may be anything
        path, position = source.where(index)
        if isinstance(path, str | os.PathLike) and isinstance(position, int):
            return os.fspath(path), position
    return None, None


def record_name(record: int, where: str, origin: Origin | None) -> str:
    """Names a record in a message, from its source on if that is known.

    Example:
        >>> record_name(441, "feed 2", Origin(17, "ArrayRecordSource", "train-1", 3))
        'record 17 of the source ArrayRecordSource (record 3 of train-1), record 441 of feed 2'
    """
    name = f"record {record} of {where}"
    return name if origin is None else f"{origin}, {name}"
