"""Sends the arrays of an `ArraySource` to another process: by their files, or as copies."""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np

from grain_shard.errors import ShardingError, describe_leaf
from grain_shard.sources.opened_file import OpenedFile

# The driver of HDF5 for a file on a disk. With any other one, the path need not lead to the data.
_ON_DISK = "sec2"
# Linux lists here what this process has mapped.
_MAPS = "/proc/self/maps"


class Sendable(ABC):
    """A stand-in for an array, which is pickled in its place."""

    @abstractmethod
    def check(self) -> None:
        """Checks that `open` returns the same array, in the process that calls this.

        Raises:
            ShardingError: The file cannot be opened again, or is another one by now.
        """

    @abstractmethod
    def open(self) -> Any:
        """Returns the array."""


def sendable(leaf: str, array: Any) -> Sendable:
    """Returns the stand-in for an array, which is pickled in its place.

    Args:
        leaf: The path of the array in its tree, for messages.
        array: An array of numpy, or a dataset of h5py or zarr.
    """
    h5py = sys.modules.get("h5py")  # not imported, because an array of h5py has imported it
    if h5py is not None and isinstance(array, h5py.Dataset):
        return _Hdf5.of(leaf, array)
    return _Mapped.of(leaf, array) or _Held(array)


def pinned(leaf: str, array: Any) -> Any:
    """Returns an array of zarr opened by an absolute path, and any other array unchanged.

    A store that was opened by a relative path looks for each chunk in the current folder. In
    another folder it finds none, and zarr then returns fill values.

    Args:
        leaf: The path of the array in its tree, for messages.
        array: The array.

    Raises:
        ShardingError: The array cannot be opened by an absolute path.
    """
    store = getattr(array, "store", None)
    kind, _, path = str(store).rpartition("://")  # kind is "zip", "file" or "logging-file"
    if not kind.endswith(("file", "zip")) or os.path.isabs(path):
        return array
    again = None
    if hasattr(store, "root") and os.path.exists(path):
        import zarr  # imported here, because only users of zarr need it

        again = zarr.open_array(os.path.abspath(path), path=array.path, mode="r")
    if again is None or (again.shape, again.dtype) != (array.shape, array.dtype):
        raise ShardingError(
            f"the array is in {store}, a relative path. In another folder, or in a worker process"
            " of another folder, zarr would return fill values.",
            path=leaf,
            leaf=describe_leaf(array),
            remedy="open the store by an absolute path, such as os.path.abspath(path).",
        )
    return again


@dataclass(frozen=True)
class _Held(Sendable):
    """An array that is sent whole."""

    array: Any

    def check(self) -> None:
        pass

    def open(self) -> Any:
        return self.array


@dataclass(frozen=True)
class _Mapped(Sendable):
    """A view of a memory map.

    Attributes:
        file: The mapped file.
        dtype: Dtype of the view.
        offset: Bytes in the file before the first item of the view.
        shape: Shape of the view.
        strides: Strides of the view, in bytes.
    """

    file: OpenedFile
    dtype: np.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, leaf: str, array: Any) -> _Mapped | None:
        """Returns the view that an array is; None if the array has to be copied.

        It has to be copied if it is no view of a file, if it can have changes that are not in the
        file (copy on write), if it is not known where in the file it begins, or if another file has
        the path by now.
        """
        # The array itself may be of any type, and may have the offset of another view. So its
        # place is measured from the beginning of the map, which all views share.
        owner, memmap = array, None
        while owner is not None and not isinstance(owner, mmap.mmap):
            memmap = owner if isinstance(owner, np.memmap) else memmap
            owner = owner.obj if isinstance(owner, memoryview) else getattr(owner, "base", None)
        if owner is None or memmap is None or not memmap.filename or memmap.mode == "c":
            return None
        path = os.path.abspath(memmap.filename)
        start = _start(owner)
        place = _address(array) - start
        try:
            np.ndarray(array.shape, array.dtype, owner, place, array.strides)
            if memmap.mode != "r":
                owner.flush()  # which may change the time of the file
            with (
                open(path, "rb") as opened,
                mmap.mmap(opened.fileno(), 1, access=mmap.ACCESS_READ) as again,
            ):
                file = OpenedFile.of(path, os.fstat(opened.fileno()), leaf)
                is_same = _file_mapped_at(start) == _file_mapped_at(_start(again))
        except (ValueError, TypeError, OSError):  # the view leaves the map, or the file is gone
            return None
        if not is_same:
            return None
        offset = memmap.offset - memmap.offset % mmap.ALLOCATIONGRANULARITY + place
        return cls(file, array.dtype, offset, array.shape, array.strides)

    def check(self) -> None:
        self.file.check()

    def open(self) -> np.ndarray:
        file = np.memmap(self.file.path, np.uint8, mode="r")
        return np.ndarray(self.shape, self.dtype, file, self.offset, self.strides)


def _address(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def _start(owner: mmap.mmap) -> int:
    return _address(np.frombuffer(owner, np.uint8))


def _file_mapped_at(address: int) -> tuple[str, str] | None:
    """Returns the device and the inode of a mapped file; None if only Linux could tell.

    Both may differ from those that `os.stat` returns, for example in a container.
    """
    if not os.path.exists(_MAPS):
        return None
    with open(_MAPS, errors="surrogateescape") as lines:
        for line in lines:
            addresses, _, _, device, inode, *_ = line.split()
            first, end = (int(number, 16) for number in addresses.split("-"))
            if first <= address < end:
                return device, inode
    return None


@dataclass(frozen=True)
class _Hdf5(Sendable):
    """A dataset of h5py, which cannot be pickled.

    Attributes:
        leaf: The path of the dataset in its tree, for messages.
        files: The file of the dataset, and the other files that hold its values.
        name: Name in the file; None if the dataset has no name.
        refused: Why no other process can open the dataset, and the remedy; None if one can.
    """

    leaf: str
    files: tuple[OpenedFile, ...]
    name: str | None
    refused: tuple[str, str] | None

    @classmethod
    def of(cls, leaf: str, dataset: Any) -> _Hdf5:
        opened, access = dataset.file, dataset.id.get_access_plist()
        path, external = (
            os.path.abspath(opened.filename),
            [one[0] for one in dataset.external or ()],
        )
        # Old versions of h5py cannot set these prefixes.
        prefixes = [getattr(access, f"get_{name}_prefix", bytes)() for name in ("efile", "virtual")]
        refused = None
        if opened.driver != _ON_DISK or dataset.name is None:
            refused = (
                "the dataset is in no file on a disk",
                "read it into memory, dataset[:], or open a file on a disk, h5py.File(path).",
            )
        elif opened.mode != "r":
            refused = (
                f"the file {path} is open for writing, which locks it",
                'open the file for reading, h5py.File(path, "r").',
            )
        elif any(prefixes) or not all(map(os.path.isabs, external)):
            refused = (
                f"the dataset finds files {external or 'of its sources'} by a prefix or in the"
                " current folder",
                "name the files by absolute paths, or read the dataset into memory, dataset[:].",
            )
        if refused is not None:
            return cls(leaf, (), dataset.name, refused)
        files = [OpenedFile.of(path, os.fstat(opened.id.get_vfd_handle()), leaf)]
        sources = dataset.virtual_sources() if dataset.is_virtual else []
        names = {one.file_name for one in sources} - {"."}  # HDF5's name of the file itself
        beside = [os.path.join(os.path.dirname(path), name) for name in sorted(names)]
        for other in (*external, *beside):
            with contextlib.suppress(OSError):  # without a file, the dataset has its fill value
                files.append(OpenedFile.of(other, os.stat(other), leaf))
        return cls(leaf, tuple(files), dataset.name, None)

    def check(self) -> None:
        if self.refused is not None:
            problem, remedy = self.refused
            raise ShardingError(
                f"{problem}, so a worker process or executor cannot open it.",
                path=self.leaf,
                remedy=remedy,
            )
        for file in self.files:
            file.check()

    def open(self) -> Any:
        import h5py  # imported here, because only users of h5py need it

        return h5py.File(self.files[0].path, "r")[self.name]
