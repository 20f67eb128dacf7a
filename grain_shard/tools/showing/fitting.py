"""`FittingTable`: a table that breaks no word and no number, however narrow the screen is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.segment import Segment
from rich.table import Table
from rich.text import Text


class FittingTable:
    """Makes each line a small table of its own if there is no room for all columns.

    (rich by itself narrows the widest column, and breaks the words in it.)

    Args:
        columns: The heads.
        lines: A cell for each column.
        left: The number of first columns that hold words; lines break between two words. The
            others hold numbers, and their cells stay in one piece.
        row_styles: The lines' styles, in turn.
    """

    def __init__(
        self,
        columns: Sequence[str],
        lines: Iterable[Sequence[str]],
        *,
        left: int,
        row_styles: Sequence[str] = (),
    ):
        self._columns, self._lines, self._left = columns, list(lines), left
        self._row_styles = row_styles

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        segments = list(console.render(self._table(), options))
        widths = map(Segment.get_line_length, Segment.split_lines(segments))
        if max(widths, default=0) <= options.max_width:
            yield from segments
            return
        for number, line in enumerate(self._lines):
            small = Table(box=None, show_header=False, padding=(0, 2))
            if self._row_styles:
                small.style = self._row_styles[number % len(self._row_styles)]
            for column, cell in zip(self._columns, line, strict=True):
                if cell:
                    small.add_row(Text(column), Text(cell))
            yield small
            yield ""

    def _table(self) -> Table:
        """One table, whose columns are not narrower than what must stay in one piece."""
        table = Table(box=box.SIMPLE_HEAD, row_styles=self._row_styles)
        for i, head in enumerate(self._columns):
            cells = [line[i] for line in self._lines]
            words = " ".join([head, *cells]).split()
            is_left = i < self._left
            table.add_column(
                head,
                justify="left" if is_left else "right",
                min_width=max(map(cell_len, words if is_left else [*head.split(), *cells])),
            )
        for line in self._lines:
            table.add_row(*map(Text, line))  # rich takes words in brackets for a style
        return table
