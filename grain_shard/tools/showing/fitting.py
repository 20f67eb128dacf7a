"""`FittingTable`: a table that breaks no word and no number, however narrow the screen is."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text


class FittingTable:
    """Makes each line a small table of its own if there is no room for all columns.

    (rich by itself narrows the widest column, and breaks the words in it.)

    Attributes:
        row_styles: The lines' styles, in turn.

    Args:
        columns: The heads.
        lines: A cell for each column.
        left: The number of first columns that hold words; lines break between two words. The
            others hold numbers, and their cells stay in one piece.
    """

    def __init__(self, columns: Sequence[str], lines: Iterable[Sequence[str]], left: int):
        self._columns, self._lines, self._left = columns, list(lines), left
        self.row_styles: Sequence[str] = ()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        widths = self._widths(options.max_width - self._around(console, options))
        if widths is not None:
            yield self._table(widths)
            return
        for number, line in enumerate(self._lines):
            small = Table(box=None, show_header=False, padding=(0, 2))
            if self.row_styles:
                small.style = self.row_styles[number % len(self.row_styles)]
            for column, cell in zip(self._columns, line, strict=True):
                if cell:
                    small.add_row(Text(column), Text(cell))
            yield small
            yield ""

    def _widths(self, room: int) -> list[int] | None:
        """The width of each column, in characters; None if there is no room for them."""
        least, wanted = [], []
        for i, head in enumerate(self._columns):
            cells = [line[i] for line in self._lines]
            whole = cells if i >= self._left else _words(*cells)
            least.append(max(map(cell_len, [*_words(head), *whole]), default=0))
            wanted.append(max(map(cell_len, [head, *cells])))
        room -= sum(least)
        if room < 0:
            return None
        # Columns that want little get all of it; the rest of the room is for the long ones.
        widths = list(least)
        for i in sorted(range(len(least)), key=lambda i: wanted[i] - least[i]):
            more = min(wanted[i] - least[i], room)
            widths[i] += more
            room -= more
        return widths

    def _table(self, widths: Sequence[int]) -> Table:
        made = Table(box=box.SIMPLE_HEAD, row_styles=self.row_styles)
        for i, (column, width) in enumerate(zip(self._columns, widths, strict=True)):
            made.add_column(
                column, justify="left" if i < self._left else "right", width=width, overflow="fold"
            )
        for line in self._lines:
            made.add_row(
                *map(Text, line)
            )  # as Text, since rich takes words in brackets for a style
        return made

    def _around(self, console: Any, options: Any) -> int:
        """The characters that rich puts between and around the columns."""
        ones = self._table([1] * len(self._columns))
        wide = options.update(width=4 * len(self._columns) + 100)
        return Measurement.get(console, wide, ones).maximum - len(self._columns)


def _words(*texts: str) -> list[str]:
    return [word for text in texts for word in text.split()]
