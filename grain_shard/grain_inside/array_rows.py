"""Rows of arrays by index, gathered straight into a batch, without Python for each record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Columns(NamedTuple):
    """A tree of arrays that count the records along their leading axis.

    Attributes:
        arrays: The leaves, in the order of the tree.
        structure: The tree.
    """

    arrays: Sequence[np.ndarray]
    structure: Any


class ArrayRows(Sequence[Any]):
    """Records, each of which is a row of some columns. A record is copied where it is used.

    Args:
        columns: The columns of each source of records.
        sources: int64[n], the number in `columns` of each record.
        indices: int64[n], the row of each record there.
    """

    def __init__(self, columns: Sequence[Columns], sources: np.ndarray, indices: np.ndarray):
        self.columns: Sequence[Columns] = columns
        self._sources, self._indices = sources, indices

    @classmethod
    def of(cls, columns: Columns, indices: np.ndarray) -> ArrayRows:
        """Returns rows of one source."""
        return cls([columns], np.zeros(len(indices), np.int64), indices)

    @classmethod
    def merged(cls, parts: Sequence[ArrayRows], part_of: np.ndarray) -> ArrayRows:
        """Returns the records of several sequences in one order.

        Args:
            parts: The sequences, each in its own order.
            part_of: int64[n], the number in `parts` of each record.
        """
        columns: list[Columns] = []
        sources, indices = np.empty_like(part_of), np.empty_like(part_of)
        for number, part in enumerate(parts):
            here = part_of == number
            sources[here], indices[here] = part._sources + len(columns), part._indices
            columns += part.columns
        return cls(columns, sources, indices)

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return ArrayRows(self.columns, self._sources[index], self._indices[index])
        arrays, structure = self.columns[self._sources.item(index)]
        # Copies, because a function of the user may change a record in place.
        return structure.unflatten([array[self._indices.item(index)].copy() for array in arrays])

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(len(self)))

    def gather(self, leaf: int, out: np.ndarray) -> None:
        """Writes one leaf of all records to ``out``, ``[n, ...]``."""
        if len(self.columns) == 1:
            _gather(self.columns[0].arrays[leaf], self._indices, out)
            return
        for number, columns in enumerate(self.columns):
            here = np.flatnonzero(self._sources == number)
            out[here] = columns.arrays[leaf][self._indices[here]]


def _gather(array: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
    if array.flags.c_contiguous:
        # Without "clip", numpy would first gather into memory of its own.
        np.take(array, indices, axis=0, out=out, mode="clip")
    else:  # np.take would first copy the whole array, for example all windows of a token file
        out[...] = array[indices]
