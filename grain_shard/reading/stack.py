"""Stacks rows into a batch, and checks that each row has the structure of the first row."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import grain
import jax
import numpy as np

from grain_shard.errors import BadRecordsError, ShardingError, describe_error, describe_leaf
from grain_shard.grain_inside.array_rows import ArrayRows, Columns
from grain_shard.grain_inside.recovery import Unreadable
from grain_shard.grain_inside.routes import route
from grain_shard.host_arrays import empty
from grain_shard.reading.faults import Faults
from grain_shard.reading.origin import BEFORE_BATCH, name_in
from grain_shard.reading.row_arrays import read_arrays
from grain_shard.trees import (
    FlatBatch,
    are_arrays,
    as_arrays,
    check_lists,
    flatten,
    is_text,
    leaves_of,
)

# About this many bytes of rows are made before they are written to the batch. With more, they would
# need much memory besides the batch. With fewer, small rows would take many writes.
_BYTES_AT_A_TIME = 2**20
# At most this many records are tried to find a readable one, whose structure all rows must have.
_MOST_LOOKED_AT = 1000

# The types of masked arrays and of masked scalars.
_MASKED = {np.ma.MaskedArray, type(np.ma.masked)}

# A row that was read already, and the index of its record.
KnownRow = tuple[Any, int]


class RowStacker:
    """Checks that rows can be stacked: all must have the structure, shapes and dtypes of one row.

    Args:
        row: The row with which all rows are compared.
        name: Returns the name of a row in messages. It takes the row's origin.
        origin: The origin of `row`: the number of its record or of its feed.

    Attributes:
        likes: A copy of each leaf of `row`, as an array.
        rows_at_a_time: Number of rows to make before they are written to a batch.

    Raises:
        ShardingError: A leaf of `row` cannot be stacked, such as a list of numbers.
    """

    def __init__(self, row: Any, name: Callable[[Any], str], origin: Any):
        paths, leaves, structure = flatten(row)
        self.paths: list[str] = paths
        self.structure: Any = structure
        self._name = name
        self._first = origin
        check_lists(row)
        if not leaves:
            raise ShardingError(
                f"no array and no number is in {name(origin)}, so its batch would be empty.",
                remedy="return a dict of arrays and numbers for each record from .map.",
            )
        # Copies, because a row may be a view, which would keep a much larger array in memory.
        self.likes: list[np.ndarray] = [np.array(like) for like in as_arrays(self.paths, leaves)]
        # The shape and dtype of each leaf.
        self._kinds = [(like.shape, like.dtype) for like in self.likes]
        self._is_text = [is_text(like) for like in self.likes]
        row_bytes = sum(like.nbytes for like in self.likes)
        self.rows_at_a_time: int = max(1, _BYTES_AT_A_TIME // max(1, row_bytes))
        self._of_many: dict[int, Any] = {}  # maps n to the structure of a tuple of n rows

    @functools.cached_property
    def placeholder(self) -> Any:
        """A row to write in the place of a missing one, which `pad_batch` overwrites."""
        return self.structure.unflatten([np.zeros_like(like) for like in self.likes])

    def empty(self, num_rows: int) -> list[np.ndarray]:
        """Returns uninitialized arrays ``[num_rows, ...]``, one for each leaf of the rows."""
        return [
            empty((num_rows, *like.shape), np.dtype(object) if text else like.dtype)
            for like, text in zip(self.likes, self._is_text, strict=True)
        ]

    def write(
        self,
        arrays: Sequence[np.ndarray],
        rows: Sequence[Any],
        start: int,
        origins: Iterable[Any],
        read_leaves: Callable[[Any], list[Any]] = list,
    ) -> None:
        """Writes some rows into arrays.

        Several threads may call this at the same time, for different rows.

        Args:
            arrays: The arrays that `empty` returned.
            rows: Trees of arrays and scalars; each must have the same structure.
            start: Position in the arrays of the first row to write.
            origins: The origin of each row, for messages.
            read_leaves: Returns the rows with arrays in place of leaves of other libraries. It is
                called only if the rows have leaves that are not arrays.

        Raises:
            ShardingError: A row has another structure, shape or dtype.
        """
        stop = start + len(rows)
        # Rows of arrays in memory are copied straight into the batch. No row becomes an object.
        if isinstance(rows, ArrayRows) and not any(self._is_text) and self._fits(rows.columns):
            for i, array in enumerate(arrays):
                rows.gather(i, array[start:stop])
            return
        leaves = self._leaves_of(rows, origins)
        if not are_arrays(leaves):
            leaves = self._leaves_of(read_leaves(rows), origins)
        for i, array in enumerate(arrays):
            column = leaves[i :: len(arrays)]  # leaf i of each row
            self._check(i, column, origins)
            if array.ndim > 1 and not self._is_text[i]:
                # np.stack would first make a view of each row, which takes longer.
                part = array[start:stop]
                joined = part.reshape(len(part) * part.shape[1], *part.shape[2:])
                np.concatenate(column, out=joined)
            else:
                array[start:stop] = column

    def batch(self, arrays: Sequence[np.ndarray]) -> FlatBatch:
        """Returns the batch of arrays into which all rows were written."""
        columns = zip(arrays, self._is_text, self.likes, strict=True)
        return FlatBatch(
            [_as_text(array, like.dtype) if text else array for array, text, like in columns],
            self.structure,
            len(arrays[0]),
        )

    def _leaves_of(self, rows: Sequence[Any], origins: Iterable[Any]) -> list[Any]:
        """Returns the leaves of all rows in one list: first the leaves of the first row, etc.

        Args:
            rows: The rows.
            origins: The origin of each row, for messages.

        Raises:
            ShardingError: A row has another structure.
        """
        # All rows are flattened in one call. One by one, that would cost more than copying them.
        try:
            leaves, structure = jax.tree.flatten(tuple(rows))
        except ValueError:  # a row has keys that JAX cannot sort: the error must name the row
            for row, origin in zip(rows, origins, strict=True):
                leaves_of(row, name=functools.partial(self._name_of, "keys", origin))
            raise
        if len(rows) not in self._of_many:
            of_many = jax.tree_util.treedef_tuple([self.structure] * len(rows))
            self._of_many[len(rows)] = of_many
        if structure != self._of_many[len(rows)]:
            for row, origin in zip(rows, origins, strict=True):
                if jax.tree.structure(row) != self.structure:
                    self._refuse_structure(row, origin)
        return leaves

    def _check(self, i: int, column: Sequence[Any], origins: Iterable[Any]) -> None:
        """Checks that one leaf has the same shape and dtype in many rows.

        Args:
            i: The number of the leaf.
            column: The value of this leaf in each row.
            origins: The origin of each row, for messages.

        Raises:
            ShardingError: The leaf has another shape or dtype in one of the rows.
        """
        # First all rows at once, which is fast. Only if a row may differ, row by row: that finds
        # the row to name in the error, or finds that all rows fit after all.
        like, text, types = self.likes[i], self._is_text[i], set(map(type, column))
        if text:
            fits = not like.ndim and types == {type(like.item())}
        else:
            kinds = {(np.shape(value), getattr(value, "dtype", None)) for value in column}
            # A masked array is refused below, because its mask would be lost.
            fits = kinds == {self._kinds[i]} and not types & _MASKED
        if fits:
            return
        for value, origin in zip(column, origins, strict=True):
            leaf = functools.partial(self._name_of, "leaf", origin)
            (array,) = as_arrays([self.paths[i]], [value], leaf)
            # The dtype of text has a width, which may differ between rows.
            same_text = is_text(array) and _is_bytes(array) == _is_bytes(like)
            same_dtype = same_text if text else array.dtype == like.dtype
            if array.shape != like.shape or not same_dtype:
                others = f"{like.dtype}[{', '.join(map(str, like.shape))}]"
                raise ShardingError(
                    f"in {self._name(origin)}, the leaf is {describe_leaf(array)}, but {others} in"
                    " other rows.",
                    path=self.paths[i],
                    leaf=describe_leaf(array),
                    remedy="pad or cast the leaf in .map before .batch, so that all rows have one"
                    " shape and dtype. In feeds, texts of different lengths can be packed.",
                )

    def _name_of(self, part: str, origin: Any) -> str:
        return f"in {self._name(origin)}, the {part}"

    def _fits(self, columns: Iterable[Columns]) -> bool:
        """Returns True if the rows of all sources' arrays can be rows of this batch."""
        return all(
            structure == self.structure
            and [(array.shape[1:], array.dtype) for array in arrays] == self._kinds
            for arrays, structure in columns
        )

    def _refuse_structure(self, row: Any, origin: Any) -> None:
        """Raises the error for a row of another structure, with the leaves that one row lacks."""
        found, first = set(flatten(row)[0]), set(self.paths)
        name, first_name = self._name(origin), self._name(self._first)
        differences = list[str]()
        if more := sorted(found - first):
            differences.append(f"{', '.join(more)} only in {name}, not in {first_name}")
        if fewer := sorted(first - found):
            differences.append(f"{', '.join(fewer)} only in {first_name}, not in {name}")
        if not differences:
            differences.append(f"the types of containers differ in {name} and in {first_name}")
        raise ShardingError(
            f"two rows have different structures: {'; '.join(differences)}.",
            path=min(found ^ first, default=None),
            remedy="return the same tree for every row from .map. A leaf that is None in one row"
            " must be None in all rows.",
        )


def check_rows(rows: Sequence[Any]) -> None:
    """Finds out why Grain's own ``.batch`` could not stack some rows.

    Raises:
        ShardingError: The rows cannot be stacked. The message names a row and a leaf.
    """
    stacker = RowStacker(rows[0], "row {} of the batch".format, 0)
    stacker.write(stacker.empty(len(rows)), rows, 0, range(len(rows)))


class RowTemplate:
    """The records of a pipeline and, once one record was read, the structure of all rows.

    Args:
        records: The dataset of the records, which is batched.

    Attributes:
        rows_at_a_time: Number of rows to make before they are written to a batch; 1 before the
            structure is known.
    """

    def __init__(self, records: grain.MapDataset):
        self.records: grain.MapDataset = records
        self.rows_at_a_time: int = 1
        self._stacker: RowStacker | None = None
        self._learning = threading.Lock()  # held while a record is read to learn the structure

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_learning": None}  # a lock cannot be pickled for a worker process

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = {**state, "_learning": threading.Lock()}

    @property
    def is_known(self) -> bool:
        """True if the structure of all rows is known."""
        return self._stacker is not None

    def stacker(self, faults: Faults, known: Callable[[], KnownRow] | None = None) -> RowStacker:
        """Returns the `RowStacker` of this pipeline. The first call makes it, from one row.

        Args:
            faults: The rules for failed reads.
            known: Returns the row to make it from, which was read already, and the index of its
                record. Without `known`, the first readable record is read.

        Raises:
            BadRecordsError: None of the first records can be read.
            Exception: A record cannot be read, and the rules do not let it be left out.
            ShardingError: The row cannot be stacked.
        """
        if self._stacker is None:
            with self._learning:
                if self._stacker is None:
                    row, record = known() if known else self._first(faults)
                    # Not a method of self: that reference cycle would keep the records in memory.
                    name = functools.partial(name_in, self.records, BEFORE_BATCH)
                    stacker = RowStacker(row, name, record)
                    self._stacker, self.rows_at_a_time = stacker, stacker.rows_at_a_time
        return self._stacker

    def _first(self, faults: Faults) -> KnownRow:
        """Returns the row of the first readable record, and the index of the record.

        Raises:
            BadRecordsError: None of the first records can be read.
            Exception: A record cannot be read, and the rules do not let it be left out.
        """
        error: BaseException = LookupError("the dataset has no record")
        for record in range(min(len(self.records), _MOST_LOOKED_AT)):
            way = route(self.records, np.array([record]))
            (element,) = way.finish(way.read(faults), faults)
            row = read_arrays(element, faults)
            if type(row) is not Unreadable:
                return row, record
            error = row.error
            if not faults.may_leave_out(error):
                raise error
        raise BadRecordsError(
            f"none of the first {min(len(self.records), _MOST_LOOKED_AT):,} records can be read, so"
            f" the shapes of a row are unknown. The last error: {describe_error(error)}.\n"
            "  remedy: check the source and the functions of .map for the cause of that error."
        ) from error


def _is_bytes(text: np.ndarray) -> bool:
    return isinstance(next(text.flat, None), bytes)


def _as_text(objects: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Converts an object array of strings or bytes to NumPy's string dtype, as wide as the longest.

    Args:
        objects: The array. It stays an object array if a string ends in a NUL character, which
            NumPy's string dtypes would drop.
        dtype: The string dtype of a row. Its width is not used.
    """
    texts = [text.item() if isinstance(text, np.ndarray) else text for text in objects.flat]
    # NumPy would call `str` on a string, which gives another text for an enum of strings.
    texts = [str.__str__(text) if isinstance(text, str) else text for text in texts]
    ends_in_nul = any(text[-1:] in ("\0", b"\0") for text in texts)
    return np.array(texts, object if ends_in_nul else dtype.type).reshape(objects.shape)
