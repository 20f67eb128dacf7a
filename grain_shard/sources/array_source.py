"""`ArraySource`: the rows of arrays, in memory or in files, as records of a pipeline."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any, SupportsIndex

import jax
import numpy as np

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.grain_inside.array_rows import ArrayRows, Columns
from grain_shard.grain_inside.source_reads import takes_array
from grain_shard.sources.memory_maps_and_hdf5 import to_pickle
from grain_shard.trees import check_leaf, flatten


class ArraySource:
    """A source whose records are the rows of a tree of arrays.

    If a pipeline only chooses and orders records before it batches them, by ``.shuffle``,
    ``.slice``, ``.repeat``, mixing or concatenating, NumPy gathers the rows straight into the
    batch, and no Python code runs for a single record. With a ``.map`` before the batch, records
    are read one by one, and each record is a copy.

    Example:
        >>> source = ArraySource({"image": np.zeros((6, 2, 2)), "label": np.arange(6)})
        >>> source, len(source), source[4]["label"]
        (ArraySource(6 records: ['image'] float64[2, 2], ['label'] int64[]), 6, np.int64(4))

    Args:
        arrays: A tree of arrays ``[num_records, ...]``: `numpy` arrays, memory maps, or other
            objects with ``shape``, ``dtype`` and indexing, for example a dataset of zarr or h5py.
            The arrays and their files must not change while they are read. Worker processes and
            executors open the files of memory maps and of h5py datasets again, and get copies of
            other arrays.

    Raises:
        ShardingError: A leaf is not an array, is a masked array, a matrix or a table, has no axis,
            or holds Python objects; there is no leaf; or two leaves differ in their number of
            records.
    """

    def __init__(self, arrays: Any):
        self._paths, leaves, self._structure = flatten(arrays, "arrays")
        self._arrays = [_checked(*pair) for pair in zip(self._paths, leaves, strict=True)]
        if not self._arrays:
            remedy = "pass ArraySource an array, or a tree of arrays."
            raise ShardingError("the tree of arrays is empty.", remedy=remedy)
        for path, array in zip(self._paths, self._arrays, strict=True):
            if array.shape[0] != len(self):
                raise ShardingError(
                    f"the leaf has {array.shape[0]:,} records, but {self._paths[0]} has"
                    f" {len(self):,} records.",
                    path=path,
                    leaf=describe_leaf(array),
                    remedy="give all arrays the same number of rows: one row per record.",
                )
        # The arrays from which a batch gathers its rows itself; None if some are not NumPy's.
        in_memory = all(isinstance(array, np.ndarray) for array in self._arrays)
        self._columns = Columns(self._arrays, self._structure) if in_memory else None

    def __init_subclass__(cls) -> None:
        # An overridden method would count only sometimes: a batch may be gathered from the arrays
        # without it, and a worker process makes an `ArraySource` again.
        raise TypeError(
            f"{cls.__name__} cannot be a subclass of ArraySource. remedy: change the records by"
            " .map, or write a source that holds an ArraySource and has __len__ and __getitem__."
        )

    def __len__(self) -> int:
        return self._arrays[0].shape[0]

    def __getitem__(self, index: SupportsIndex) -> Any:
        record = operator.index(index)
        if not 0 <= record < len(self):
            raise IndexError(f"there is no record {record}: the source has {len(self)} records")
        return self._getitems([record])[0]

    @takes_array  # turning a list of 256 indices into an array would take 10 us
    def _getitems(self, indices: Sequence[int] | np.ndarray) -> ArrayRows:
        wanted = np.asarray(indices, np.int64)
        if self._columns is not None:
            return ArrayRows.of(self._columns, wanted)
        # Rows of zarr and h5py are read here, not when the batch is made, because a read may fail,
        # and only reads in this method are tried again. HDF5 takes only ascending indices.
        wanted, positions = np.unique(wanted, return_inverse=True)
        arrays = [np.asarray(array[wanted]) for array in self._arrays]
        return ArrayRows.of(Columns(arrays, self._structure), positions)

    def __reduce__(self) -> Any:
        sent = map(to_pickle, self._paths, self._arrays)
        return _opened, (self._structure.unflatten(sent),)

    def __repr__(self) -> str:
        leaves = [
            f"{path.removeprefix('arrays')} {array.dtype}{list(array.shape[1:])}".strip()
            for path, array in zip(self._paths, self._arrays, strict=True)
        ]
        return f"ArraySource({len(self):,} records: {', '.join(leaves)})"


def _checked(path: str, array: Any) -> Any:
    """Returns an array of the user whose item i is record i, as a plain array if it is NumPy's.

    Raises:
        ShardingError: The leaf is not such an array.
    """
    problem = None
    try:
        if isinstance(array, jax.Array):
            array = np.asarray(array)
        holds_objects = np.dtype(getattr(array, "dtype", None)).hasobject
    except TypeError:  # for typed PRNG keys (JAX), or a dtype of another library
        problem, holds_objects = "the leaf has a dtype that NumPy lacks.", False
    if not (hasattr(array, "shape") and hasattr(array, "dtype")):
        check_leaf(path, array)  # for many classes, raises an error with a remedy of their own
        problem = "the leaf is not an array."
    elif not array.shape:
        problem = "the leaf is a scalar, so it has no axis along which records could lie."
    elif isinstance(array, np.matrix) or hasattr(array, "iloc") or hasattr(array, "tocsr"):
        problem = "the leaf is a matrix or a pandas Series, in which leaf[i] need not be record i."
    elif holds_objects:
        problem = "the leaf holds Python objects."
    elif isinstance(array, np.ma.MaskedArray):
        problem = "the leaf is a masked array, whose mask would be lost on the devices."
    if problem:
        raise ShardingError(
            problem,
            path=path,
            leaf=describe_leaf(array),
            remedy="pass an array of shape [num_records, ...], made by np.asarray for example. Call"
            " .filled(0) on a masked array, and pass its mask as another leaf.",
        )
    # A subclass of `numpy.ndarray` may give other rows, and `numpy.memmap` gives them slowly.
    return array.view(np.ndarray) if isinstance(array, np.ndarray) else array


def _opened(sent: Any) -> ArraySource:
    """Returns an `ArraySource` in another process, from the results of `to_pickle`."""
    return ArraySource(
        jax.tree.map(lambda leaf: leaf() if isinstance(leaf, functools.partial) else leaf, sent)
    )
