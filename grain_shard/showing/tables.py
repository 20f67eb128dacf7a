"""Tables in a terminal, as plain text and as HTML, and what to write in their cells."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

_HTML_WIDTH = 92  # characters
_HTML_STYLE = "font-family:monospace; line-height:1.3; overflow-x:auto"
_TEXT_WIDTH = 100
_MAX_RANGES = 4


def table(columns: Sequence[str], lines: Iterable[Sequence[str]], *, left: int) -> Any:
    """A table whose first `left` columns are words, and whose others are numbers."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD)
    for i, column in enumerate(columns):
        made.add_column(column, justify="left" if i < left else "right", overflow="fold")
    for line in lines:
        made.add_row(*map(Text, line))  # as Text, since rich takes words in brackets for a style
    return made


def to_terminal(renderable: Any) -> None:
    """Prints it, in colors where stdout is a terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:  # a log has no width to keep to
        console = Console(width=max(_TEXT_WIDTH, console.width))
    console.print(renderable, highlight=False)


def to_text(renderable: Any) -> str:
    """It as plain text, without a newline at its end."""
    from rich.console import Console

    file = io.StringIO()
    # In a notebook rich would show it at once, whatever the file.
    console = Console(file=file, width=_TEXT_WIDTH, color_system=None, force_jupyter=False)
    console.print(renderable, highlight=False)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()).rstrip()


def to_html(renderable: Any) -> str:
    """It as a piece of HTML, for ``_repr_html_``."""
    from rich.console import Console

    console = Console(file=io.StringIO(), width=_HTML_WIDTH, record=True, force_jupyter=False)
    console.print(renderable, highlight=False)
    return console.export_html(
        inline_styles=True,
        code_format=f'<pre style="{_HTML_STYLE}">{{code}}</pre>',
    )


def describe_bytes(count: int | None) -> str:
    """Bytes in the largest decimal unit: ``1.6 MB``; a dash if they are not known."""
    from rich.filesize import decimal

    return "-" if count is None else decimal(count)


def describe_ranges(ranges: Sequence[tuple[int, int]]) -> str:
    """Rows as slices, the first few of them: ``0:8, 16:24``."""
    shown = [f"{start}:{stop}" for start, stop in ranges[:_MAX_RANGES]]
    more = len(ranges) - len(shown)
    return ", ".join([*shown, f"{more} more"] if more else shown)
