"""Sends the arrays of an `ArraySource` to another process: by their files, or as copies."""

from __future__ import annotations

import functools
import mmap
import os
import sys
from typing import Any

import numpy as np

from grain_shard.errors import ShardingError

# HDF5's driver for a file on a disk. With any other driver, the path may not lead to the data.
_ON_DISK = "sec2"


def to_pickle(leaf: str, array: Any) -> Any:
    """Returns the object that is pickled in place of an array.

    Args:
        leaf: The path of the array in its tree, for messages.
        array: An array of numpy, or a dataset of h5py or zarr.

    Returns:
        A `functools.partial` that opens the array from its file; or the array itself, which is then
        sent whole.

    Raises:
        ShardingError: No other process can open the dataset of h5py.
    """
    h5py = sys.modules.get("h5py")  # not imported, because an array of h5py has imported it
    if h5py is not None and isinstance(array, h5py.Dataset):
        return _of_hdf5(leaf, array)
    return _of_map(array) if isinstance(array, np.ndarray) else array


def _of_map(array: np.ndarray) -> Any:
    """Returns a function that maps the array's file again, or the array itself to send it whole.

    An array is sent whole if it is not a view of a file, if it can have changes that are not in the
    file (copy on write), or if its place in the file is unknown.
    """
    # Follows the bases of the view to the `mmap` that owns the memory. The last `np.memmap` on the
    # way knows the file. A view's own offset may be the offset of another view, so the array's
    # place is measured from the beginning of the `mmap`.
    owner, memmap = array, None
    while owner is not None and not isinstance(owner, mmap.mmap):
        memmap = owner if isinstance(owner, np.memmap) else memmap
        owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
    if owner is None or memmap is None or not memmap.filename or memmap.mode == "c":
        return array
    start = _address(array) - _address(np.frombuffer(owner, np.uint8))
    try:  # this only checks that the array lies inside the map
        np.ndarray(array.shape, array.dtype, owner, start, array.strides)
    except (ValueError, TypeError):  # the view leaves the map
        return array
    if memmap.mode != "r":  # changes must be in the file before another process opens it
        owner.flush()
    # A `mmap` begins in the file at a multiple of the granularity, at or before `memmap.offset`.
    offset = memmap.offset - memmap.offset % mmap.ALLOCATIONGRANULARITY + start
    return functools.partial(
        _map, str(memmap.filename), array.dtype, offset, array.shape, array.strides
    )


def _map(
    path: str, dtype: np.dtype, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    return np.ndarray(shape, dtype, np.memmap(path, np.uint8, mode="r"), offset, strides)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _of_hdf5(leaf: str, dataset: Any) -> functools.partial[Any]:
    file = dataset.file
    if file.driver != _ON_DISK or file.mode != "r" or dataset.name is None:
        raise ShardingError(
            "a worker process or executor cannot open the dataset, because its file is in memory or"
            " is open for writing.",
            path=leaf,
            remedy='open a file on a disk for reading, h5py.File(path, "r"), or read the dataset'
            " into memory, dataset[:].",
        )
    return functools.partial(_open_hdf5, os.path.abspath(file.filename), dataset.name)


def _open_hdf5(path: str, name: str) -> Any:
    import h5py  # imported here, because only users of h5py need it

    return h5py.File(path, "r")[name]
