"""`Checked`: the result of `check`, one line for each proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grain_shard.errors import ShardingError
from grain_shard.tools.showing.tables import FittingTable, InNotebooks


@dataclass(frozen=True)
class Line:
    """One proof about a pipeline.

    Attributes:
        name: The way in which batches were read, or the proof.
        compared: The number of compared batches or records, such as "3 batches, 24 rows"; "" if
            nothing was compared.
        why_not: The reason why the proof does not apply or was not made; "" if it was made.
        error: The first difference, with its remedy; None if none was found.
    """

    name: str
    compared: str = ""
    why_not: str = ""
    error: ShardingError | None = None

    @property
    def found(self) -> str:
        """The result in words: "ok", "failed", or `why_not`."""
        return "failed" if self.error is not None else self.why_not or "ok"


@dataclass(frozen=True, repr=False)
class Checked(InNotebooks):
    """The result of `check`, which a terminal or a notebook shows as a table.

    Attributes:
        lines: The proofs, in the order in which they were made. Only the last one may have failed.
    """

    lines: tuple[Line, ...]

    @property
    def error(self) -> ShardingError | None:
        """The error of the proof that failed; None if none failed."""
        return next((line.error for line in self.lines if line.error is not None), None)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        cells = [(line.name, line.compared, line.found) for line in self.lines]
        yield FittingTable(["the same batches", "compared", "result"], cells, left=3)
