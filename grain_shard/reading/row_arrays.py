"""The last step of a read: leaves of other libraries become arrays.

A leaf may be an image that is decoded, or a tensor that is fetched, only when NumPy asks for its
array. A failure there is a failed read of its record, like an error of the source.
"""

from __future__ import annotations

import functools
from typing import Any

from grain_shard.grain_inside.recovery import Recovery, Unreadable
from grain_shard.trees import array_of, has_only_arrays, leaves_of


def read_arrays(row: Any, recovery: Recovery) -> Any:
    """Returns a row in which the leaves of other libraries are arrays.

    Args:
        row: The row, or its `Unreadable`.
        recovery: The rules for failed reads.

    Returns:
        The row; the same object if it has no such leaf. An `Unreadable` if a leaf does not
        become an array.
    """
    if has_only_arrays(row) or type(row) is Unreadable:
        return row
    failures: list[Exception] = []
    try:
        return with_arrays(row)
    except Exception as error:
        failures.append(error)
    # The error gets no name here, because its traceback refers to this frame. With a name, frame
    # and error would keep each other in memory.
    return recovery.recovered(failures.pop(), functools.partial(with_arrays, row))


def with_arrays(row: Any) -> Any:
    """Returns a row in which the leaves of other libraries are arrays.

    Raises:
        Exception: A leaf does not become an array.
        ShardingError: A dict has keys that cannot be sorted.
    """
    leaves, structure = leaves_of(row)
    return structure.unflatten([array_of(leaf) for leaf in leaves])
