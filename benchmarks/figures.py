"""Formats figures: three digits, and a unit of a readable size."""

from __future__ import annotations

_SMALLER = {"s": "ms", "ms": "us"}
_ONE_OF = {
    "batches": "batch",
    "calls": "call",
    "files": "file",
    "objects": "object",
    "processes": "process",
    "rows": "row",
    "threads": "thread",
}


def number(value: float) -> str:
    """Returns a number as text, with at least three digits: 0.0123, 4.56, 78,901."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figure(value: float, unit: str) -> str:
    """Returns a number with a readable unit: 4.56x, 1 file, and 9.91 ms in place of 0.00991 s."""
    value, unit = _in_readable_unit(value, unit)
    written = number(value)
    if unit == "x":
        return written + unit
    return f"{written} {_ONE_OF.get(unit, unit) if written == '1' else unit}"


def with_quartiles(low: float, middle: float, high: float, unit: str) -> str:
    """Returns a median and its quartiles in one unit: 27.7 ms (25.8 to 32.2)."""
    readable, _ = _in_readable_unit(middle, unit)
    factor = readable / middle if middle else 1.0
    return f"{figure(middle, unit)} ({number(low * factor)} to {number(high * factor)})"


def _in_readable_unit(value: float, unit: str) -> tuple[float, str]:
    while 0 < abs(value) < 0.1 and unit in _SMALLER:
        value, unit = value * 1e3, _SMALLER[unit]
    return value, unit
