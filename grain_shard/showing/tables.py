"""Tables in a terminal, in a notebook and as plain text, and what to write in their cells."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.filesize import decimal

from grain_shard.showing.fitting import FittingTable

# Okabe and Ito's palette, which people with any kind of color vision can tell apart, mixed half and
# half with white, so that black text can be read on it. For the shards of a batch's rows.
ROW_COLORS = "#F3CF80", "#ABDAF4", "#80CFB9", "#F8F2A1", "#80B9D9", "#EBAF80", "#E6BCD3"

_TEXT_WIDTH = 100


def table(columns: Sequence[str], lines: Iterable[Sequence[str]], *, left: int) -> FittingTable:
    """A table whose first `left` columns are words, and whose others are numbers."""
    return FittingTable(columns, lines, left)


def to_screen(renderable: Any) -> None:
    """Prints it: in colors where stdout is a terminal, and as HTML in a notebook."""
    console = Console()
    if not console.is_terminal:  # a log has no width to keep to
        console = Console(width=max(_TEXT_WIDTH, console.width))
    console.print(renderable, highlight=False)


def to_text(renderable: Any) -> str:
    """It as plain text, without a newline at its end."""
    file = io.StringIO()
    # In a notebook rich would show it at once, whatever the file.
    console = Console(file=file, width=_TEXT_WIDTH, color_system=None, force_jupyter=False)
    console.print(renderable, highlight=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


def describe_bytes(count: int | None) -> str:
    """Bytes in the largest decimal unit: ``1.6 MB``; a dash if they are not known."""
    return "-" if count is None else decimal(count)


def describe_ranges(ranges: Sequence[tuple[int, int]]) -> str:
    """Rows as slices, the first few of them: ``0:8, 16:24``."""
    return describe_few([f"{start}:{stop}" for start, stop in ranges], at_most=4)


def describe_few(values: Sequence[Any], at_most: int = 8) -> str:
    """The first of the values, and how many more there are: ``0, 1, 2, 3, 4, 5, 6, 7, 3 more``."""
    shown = [str(value) for value in values[:at_most]]
    more = len(values) - len(shown)
    return ", ".join([*shown, f"{more} more"] if more else shown)
