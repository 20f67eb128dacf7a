"""A few hex digits in the place of a long value, for states and for what hosts compare."""

from __future__ import annotations

import hashlib
from typing import Any


def digest(value: Any) -> str:
    """Eight hex digits of a value's repr.

    Example:
        >>> digest([0, 1]) == digest([0, 1]), digest([0, 1]) == digest([1, 0])
        (True, False)
    """
    return hashlib.sha256(repr(value).encode()).hexdigest()[:8]
