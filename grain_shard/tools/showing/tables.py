"""Tables in a terminal, in a notebook and as plain text, and what to write in their cells."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.filesize import decimal

_TEXT_WIDTH = 100

# A table that is wider than the page is scrolled, not folded.
_HTML = (
    '<pre style="white-space:pre;overflow-x:auto;line-height:normal;'
    "font-family:Menlo,'DejaVu Sans Mono',Consolas,'Courier New',monospace\">{code}</pre>"
)


class InNotebooks:
    """For what rich can render: HTML in a notebook, and text where none is shown.

    Text is shown by a terminal, by a page of GitHub that has not loaded the notebook's HTML, and a
    comparison of two versions of a notebook.
    """

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/html": to_html(self), "text/plain": to_text(self)}


class _Page(InNotebooks, Group):
    """Several renderables, one below the other."""


def to_screen(renderable: Any) -> None:
    """Prints it: in colors where stdout is a terminal, and as HTML in a notebook."""
    console = Console()
    if console.is_jupyter:
        from IPython.display import display  # pyright: ignore[reportMissingImports]

        display(_Page(renderable))
        return
    if not console.is_terminal:  # a log has no width to keep to
        console = Console(width=max(_TEXT_WIDTH, console.width))
    console.print(renderable, highlight=False)


def to_text(renderable: Any) -> str:
    """It as plain text, without a newline at its end."""
    text = _rendered(renderable).export_text()
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip()


def to_html(renderable: Any) -> str:
    """It as one element of HTML, with its colors."""
    return _rendered(renderable).export_html(code_format=_HTML, inline_styles=True)


def _rendered(renderable: Any) -> Console:
    # In a notebook rich would show it at once, whatever the file.
    console = Console(file=io.StringIO(), width=_TEXT_WIDTH, force_jupyter=False, record=True)
    console.print(renderable, highlight=False)
    return console


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
