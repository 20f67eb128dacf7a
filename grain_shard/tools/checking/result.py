"""`Checked`: the result of `check`, one line for each proof."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from grain_shard.errors import ShardingError
from grain_shard.tools.showing.tables import FittingTable, InNotebooks, to_text

OK, FAILED = "ok", "failed"


@dataclass(frozen=True)
class Line:
    """One proof about a pipeline.

    Attributes:
        name: The way in which batches were read, or the proof.
        compared: What was compared, such as "3 batches, 24 rows"; "" if nothing was.
        found: "ok", "failed", or the reason why the proof does not apply or was not made.
        error: The first difference, with its remedy; None if none was found.
    """

    name: str
    compared: str
    found: str = OK
    error: ShardingError | None = None


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

    def __str__(self) -> str:
        return to_text(self)

    __repr__ = __str__

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        cells = [(line.name, line.compared, line.found) for line in self.lines]
        yield FittingTable(["the same batches", "compared", "result"], cells, left=3)
