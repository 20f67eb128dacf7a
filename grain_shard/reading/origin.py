"""Finds the origin of a record: its index in the source and, if it is known, its file.

This happens only after a record has failed, to name the record in messages.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any, NamedTuple

import grain

from grain_shard.grain_inside.routes import source_of

# The dataset that is batched, in messages.
BEFORE_BATCH = "the dataset before .batch"


class Origin(NamedTuple):
    """The location of a record in a source.

    Attributes:
        record: Index of the record in the source.
        source: Name of the source's class.
        path: File of the record; None if the source has no method ``where(index)`` that gives it.
        position: Position of the record in the file; None if `path` is None.
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
        """Returns the origin of a dataset's record; None if its index in the source is unknown."""
        # An error here must not replace the error of the record, which is about to be reported.
        with contextlib.suppress(Exception):
            found = source_of(records, record)
            if found is not None:
                source, index = found
                return cls(index, type(source).__name__, *_location(source, index))
        return None


def _location(source: Any, index: int) -> tuple[str | None, int | None]:
    """Returns the file of a record and the position in it; (None, None) if they are unknown.

    A source may tell them by a method ``where``, as `ArrayRecordSource` does.
    """
    with contextlib.suppress(Exception):  # another library's `where` may be anything
        path, position = source.where(index)
        if isinstance(path, str | os.PathLike) and isinstance(position, int):
            return os.fspath(path), position
    return None, None


def name_in(records: grain.MapDataset, where: str, record: int) -> str:
    """Returns the name of a record of the dataset `records`, whose own name is `where`.

    The name is for messages. It includes the origin of the record, if that can be found.
    """
    return record_name(record, where, Origin.of(records, record))


def record_name(record: int, where: str, origin: Origin | None) -> str:
    """Returns a name of a record for messages; it begins with the origin if that is known.

    Args:
        record: Index of the record in a dataset.
        where: Name of that dataset.
        origin: The record's location in the source; None if unknown.

    Example:
        >>> record_name(441, "feed 2", Origin(17, "Files", "train-1", 3))
        'record 17 of the source Files (record 3 of train-1), which is record 441 of feed 2'
    """
    name = f"record {record} of {where}"
    return name if origin is None else f"{origin}, which is {name}"
