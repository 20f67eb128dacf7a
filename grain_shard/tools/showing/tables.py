"""Tables in a terminal, in a notebook and as plain text, and the texts of their cells."""

from __future__ import annotations

import io
import itertools
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.filesize import decimal
from rich.jupyter import JUPYTER_HTML_FORMAT
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

_TEXT_WIDTH = 100


class InNotebooks:
    """Base class of objects that `rich` can render: their text, and their HTML in a notebook.

    The notebook also gets plain text, for terminals, for GitHub, and for the comparison of two
    versions of a notebook. Unlike rich's own text, it has no color codes.
    """

    def __str__(self) -> str:
        text = _rendered(self).export_text()
        return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()

    __repr__ = __str__

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        html = _rendered(self).export_html(code_format=JUPYTER_HTML_FORMAT, inline_styles=True)
        return {"text/html": html, "text/plain": str(self)}


class FittingTable(InNotebooks):
    """A table for `rich` that stays readable on a narrow screen.

    If there is no room for all columns, each line becomes a small table of its own. (A table of
    rich would narrow the widest column, and break the words in it.)

    Args:
        columns: The heads of the columns.
        lines: The lines, each with a cell for every column.
        left: Number of columns, from the left, that hold words. Their cells may break between
            words. All other columns hold numbers, and their cells do not break.
        row_styles: The styles of the lines, used in turn.
    """

    def __init__(
        self,
        columns: Sequence[str],
        lines: Iterable[Sequence[str]],
        *,
        left: int,
        row_styles: Sequence[str] = (),
    ):
        self._lines = list(lines)
        self._table = Table(box=box.SIMPLE_HEAD, row_styles=row_styles)
        for i, head in enumerate(columns):
            cells = [line[i] for line in self._lines]
            words = " ".join([head, *cells]).split()
            is_left = i < left
            # No column is narrower than its longest unbreakable text.
            min_width = max(map(cell_len, words if is_left else [*head.split(), *cells]))
            justify = "left" if is_left else "right"
            self._table.add_column(Text(head), justify=justify, min_width=min_width)
        for line in self._lines:
            self._table.add_row(*map(Text, line))  # rich would read words in brackets as a style

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        segments = list(console.render(self._table, options))
        widths = map(Segment.get_line_length, Segment.split_lines(segments))
        if max(widths, default=0) <= options.max_width:
            yield from segments
            return
        for number, line in enumerate(self._lines):
            style = self._table.get_row_style(console, number)
            small = Table(box=None, show_header=False, padding=(0, 2), style=style)
            for column, cell in zip(self._table.columns, line, strict=True):
                if cell:
                    small.add_row(column.header, Text(cell))
            yield small
            yield ""


class FirstLines(InNotebooks):
    """Tables and texts one below the other, cut off after a number of lines.

    Args:
        parts: The tables and texts.
        most: The maximum number of lines to print. If there are more, the last line that is printed
            is "and more".
    """

    def __init__(self, parts: Sequence[Any], most: int):
        self._parts, self._most = parts, most

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        rendered = (console.render_lines(part, options, pad=False) for part in self._parts)
        lines = itertools.chain.from_iterable(rendered)
        for line in itertools.islice(lines, self._most - 1):
            yield from line
            yield Segment.line()
        if next(lines, None) is not None:
            yield Text("  and more")


def to_screen(renderable: InNotebooks) -> None:
    """Prints a table: in colors if stdout is a terminal, and as HTML in a notebook."""
    # The variable COLUMNS, else the width of the terminal, else 100.
    console = Console(width=shutil.get_terminal_size((_TEXT_WIDTH, 0)).columns)
    if console.is_jupyter:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        display(renderable)
    else:
        console.print(renderable, highlight=False)


def _rendered(renderable: Any) -> Console:
    # Without `force_jupyter`, rich would display the table in a notebook, although `file` is given.
    console = Console(file=io.StringIO(), width=_TEXT_WIDTH, force_jupyter=False, record=True)
    console.print(renderable, highlight=False)
    return console


def broken(sentence: str, width: int) -> str:
    """Breaks a sentence into lines. The lines after the first are indented by two more spaces."""
    indent = " " * (2 + len(sentence) - len(sentence.lstrip()))
    return textwrap.fill(
        sentence,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def describe_bytes(count: int | None) -> str:
    """Returns a number of bytes in a decimal unit, such as ``1.6 MB``; a dash for None."""
    return "-" if count is None else decimal(count)


def describe_ranges(ranges: Sequence[tuple[int, int]]) -> str:
    """Returns ranges of rows as text: at most four, such as ``0:8, 16:24``, and how many more."""
    return describe_few([f"{start}:{stop}" for start, stop in ranges], at_most=4)


def describe_few(values: Sequence[Any], at_most: int = 8) -> str:
    """Returns the first values as text, and how many more: ``0, 1, 2, 3, 4, 5, 6, 7, 3 more``."""
    shown = [str(value) for value in values[:at_most]]
    more = len(values) - len(shown)
    return ", ".join([*shown, f"{more} more"] if more else shown)
