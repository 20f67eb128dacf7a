"""Digests: a few hex digits that stand for a long value, in states and in comparisons of hosts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

# Arrays of fewer bytes than this are digested as a whole. From a larger array, the digest takes
# samples at even distances.
_MOST_BYTES = 2**20
# Python's own values that NumPy makes an array of. Bytes and text are not among them: NumPy would
# make text of both.
_ARRAYS = bool | int | float | complex | bytearray | memoryview


def digest(value: Any) -> str:
    """Returns eight hex digits that stand for the repr of a value.

    Example:
        >>> digest([0, 1]) == digest([0, 1]), digest([0, 1]) == digest([1, 0])
        (True, False)
    """
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def element_digest(element: Any) -> str:
    """Returns 16 hex digits that stand for the values of an element, the same in every process.

    The digest depends on bits, shapes, dtypes and keys, but not on the kind of container: a number
    and an array without axes, a memory map and an array, a dict and another mapping, a list and a
    tuple have the same digest. It takes a sample of an array of 1 MiB or more, and only the file
    name of an absolute path.

    Example:
        >>> element_digest({"x": np.zeros(2), "y": [b"a"]})
        '5200e5359750920f'

    Args:
        element: Bytes, text, numbers, arrays, images, dataclasses, or a tree of them.

    Raises:
        TypeError: The element has an object of another type.
    """
    found = hashlib.sha256()
    for part in _parts(element):
        found.update(part)
    return found.hexdigest()[:16]


def _parts(value: Any) -> Iterator[bytes]:
    """Yields the bytes of a value. No value's bytes are the beginning of another value's bytes."""
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, str):
        # Only the file name of an absolute path counts, because hosts and runs may keep the same
        # files in different folders.
        text = os.path.basename(value) if os.path.isabs(value) else value
        yield from _sized("text", text.encode(errors="surrogatepass"))
    elif isinstance(value, bytes):
        yield from _sized("bytes", value)
    elif value is None:
        yield b"<none>"
    elif isinstance(value, Mapping):
        # Sorted, so that the order of the keys does not count.
        yield f"<mapping {len(value)}>".encode()
        yield from sorted(b"".join(_parts((key, item))) for key, item in value.items())
    elif isinstance(value, list | tuple):
        yield f"<list {len(value)}>".encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, AbstractSet):
        yield f"<set {len(value)}>".encode()
        yield from sorted(b"".join(_parts(item)) for item in value)
    elif isinstance(value, _ARRAYS) or _is_array(value):
        array = np.asarray(value)
        if isinstance(value, int) and array.dtype.hasobject:  # an int of more than 64 bits
            yield f"<int {value:x}>".encode()
        else:
            yield from _array_parts(array)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from _parts({f.name: getattr(value, f.name) for f in dataclasses.fields(value)})
    else:
        raise TypeError(f"cannot compute a digest of a {type(value).__name__}")


def _is_array(value: Any) -> bool:
    return hasattr(value, "__array__") or hasattr(value, "__array_interface__")


def _sized(kind: str, value: bytes) -> Iterator[bytes]:
    yield f"<{kind} {len(value)}>".encode()
    yield value[:: 1 + len(value) // _MOST_BYTES]


def _array_parts(array: np.ndarray) -> Iterator[bytes]:
    if array.dtype.kind in "SU" and not array.shape:
        yield from _parts(array.item())
        return
    yield f"<{array.dtype}{array.shape}>".encode()
    if array.dtype.hasobject:
        yield from _parts(array.tolist())
    elif array.dtype.names:  # the bytes between two fields have no value
        for name in array.dtype.names:
            yield from _array_parts(array[name])
    else:
        yield array.reshape(-1)[:: 1 + array.nbytes // _MOST_BYTES].tobytes()
