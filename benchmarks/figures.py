"""Figures as they are written: three digits, and a unit that suits them."""

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
    """Three digits, or all of them before the point: 0.0123, 4.56, 78,901."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def figure(value: float, unit: str) -> str:
    """With its unit: 4.56x, 9.91 ms and not 0.00991 s, 1 file."""
    value, unit = _in_readable_unit(value, unit)
    return _with_unit(number(value), unit)


def spread(low: float, middle: float, high: float, unit: str) -> str:
    """What lies around a figure, in the unit in which that is written."""
    of_middle, readable = _in_readable_unit(middle, unit)
    factor = 1.0 if readable == unit else of_middle / middle
    return f"{number(low * factor)} to {_with_unit(number(high * factor), readable)}"


def _in_readable_unit(value: float, unit: str) -> tuple[float, str]:
    while 0 < abs(value) < 0.1 and unit in _SMALLER:
        value, unit = value * 1e3, _SMALLER[unit]
    return value, unit


def _with_unit(written: str, unit: str) -> str:
    if unit == "x":
        return written + unit
    return f"{written} {_ONE_OF.get(unit, unit) if written == '1' else unit}"
