"""Digests: a few hex digits that stand for a long value, in states and in comparisons of hosts."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

DIGITS = 4  # default number of hex digits in an element's digest
# Hex digits for a comparison among many hosts or feeds, where four could be equal by chance.
MANY_DIGITS = 16
# Arrays of fewer bytes than this are digested as a whole. From a larger array, the digest takes
# samples at even distances.
_MOST_BYTES = 2**20


def digest(value: Any) -> str:
    """Returns eight hex digits that stand for the repr of a value.

    Example:
        >>> digest([0, 1]) == digest([0, 1]), digest([0, 1]) == digest([1, 0])
        (True, False)
    """
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]


def element_digest(element: Any, digits: int = DIGITS) -> str:
    """Returns a few hex digits that stand for the values of an element, the same in every process.

    An array of 1 MiB or more counts only by a sample of its values. An absolute path counts only by
    its file name.

    Example:
        >>> element_digest({"x": np.zeros(2), "y": [b"a"]})
        'aca2'

    Args:
        element: Bytes, text, numbers, arrays, images, dataclasses, or a tree of them.
        digits: The number of hex digits.

    Raises:
        TypeError: The element has an object of another type.
    """
    found = hashlib.sha256()
    for part in _parts(element):
        found.update(part)
    return found.hexdigest()[:digits]


def _parts(value: Any) -> Iterator[bytes]:
    yield f"<{type(value).__name__}>".encode()
    if hasattr(value, "__array__") or hasattr(value, "__array_interface__"):
        yield from _array_parts(np.asarray(value))
    elif value is None or isinstance(value, bool | int | float | complex):
        yield repr(value).encode()
    elif isinstance(value, str | os.PathLike):
        # Only the file name of an absolute path counts, because hosts and runs may keep the same
        # files in different folders.
        text = os.fspath(value)
        yield (os.path.basename(text) if os.path.isabs(text) else text).encode()
    elif isinstance(value, bytes | bytearray | memoryview):
        yield from _array_parts(np.frombuffer(value, np.uint8))
    elif isinstance(value, Mapping):
        for key in sorted(value, key=repr):
            yield from _parts((key, value[key]))
    elif isinstance(value, list | tuple):
        yield str(len(value)).encode()
        for item in value:
            yield from _parts(item)
    elif isinstance(value, AbstractSet):
        yield from sorted(b"".join(_parts(item)) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _parts(getattr(value, field.name))
    else:
        raise TypeError(f"cannot compute a digest of a {type(value).__name__}")


def _array_parts(array: np.ndarray) -> Iterator[bytes]:
    yield f"{array.dtype}{array.shape}".encode()
    if array.dtype.hasobject:
        yield from _parts(array.tolist())
    else:
        yield array.reshape(-1)[:: 1 + array.nbytes // _MOST_BYTES].tobytes()
