"""`ArrayRows`: records that are rows of arrays, which NumPy gathers straight into a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np


class Columns(NamedTuple):
    """A tree of arrays ``[num_records, ...]``. Record i is row i of all arrays.

    Attributes:
        arrays: The arrays, in the order of the leaves.
        structure: The structure of the tree, as JAX gives it.
    """

    arrays: Sequence[np.ndarray]
    structure: Any


class ArrayRows(Sequence[Any]):
    """A sequence of records that are rows of arrays. A record is copied only when it is used.

    Args:
        columns: The arrays of each source of records.
        sources: int64[n], the source of each record, as a position in `columns`.
        indices: int64[n], the row of each record in the arrays of its source.
    """

    def __init__(self, columns: Sequence[Columns], sources: np.ndarray, indices: np.ndarray):
        self.columns: Sequence[Columns] = columns
        self._sources, self._indices = sources, indices

    @classmethod
    def of(cls, columns: Columns, indices: np.ndarray) -> ArrayRows:
        """Returns the rows int64[n] of one source."""
        return cls([columns], np.zeros(len(indices), np.int64), indices)

    @classmethod
    def merged(cls, parts: Sequence[ArrayRows], part_of: np.ndarray) -> ArrayRows:
        """Merges several sequences of records into one, in which the records of each stay in order.

        Args:
            parts: The sequences.
            part_of: int64[n], the sequence of each record of the result, as a position in `parts`.
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
        """Writes one leaf of all records into an array.

        Args:
            leaf: The number of the leaf.
            out: The array to write to, ``[n, ...]``.
        """
        array = self.columns[0].arrays[leaf]
        if len(self.columns) > 1:
            for number, columns in enumerate(self.columns):
                here = np.flatnonzero(self._sources == number)
                out[here] = columns.arrays[leaf][self._indices[here]]
        elif array.flags.c_contiguous:
            # With its default mode, np.take would first gather into a temporary buffer.
            np.take(array, self._indices, axis=0, out=out, mode="clip")
        else:
            # np.take would first copy the whole array if it is not contiguous, as are the
            # overlapping windows of a token file.
            out[...] = array[self._indices]
