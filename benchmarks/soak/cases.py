"""Draws a case from a seed and a number. Every process draws the same case."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Protocol

from benchmarks.soak import failing_hosts, faults, feeds, kills, pipelines


class Case(Protocol):
    """A case: a frozen dataclass whose ``repr`` is a literal, from which it can be built again."""

    @property
    def limit_s(self) -> float:
        """Seconds that the case may take. A case that takes longer counts as hanging."""
        ...

    def run(self, folder: Path) -> Counter[str]:
        """Runs the case, and returns counts of the things that it checked, by name.

        An exception means that the case failed.

        Args:
            folder: An empty folder for the case's files.
        """
        ...


# The kinds of cases, each with the function that draws a case and its number in a hundred cases.
KINDS = {
    "pipelines": (pipelines.draw, 52),
    "feeds": (feeds.draw, 22),
    "faults": (faults.draw, 14),
    "kill chains": (kills.draw, 8),
    "failing hosts": (failing_hosts.draw, 4),
}


def draw(seed: int, number: int) -> tuple[str, Case]:
    """Returns the name of the kind of a case, and the case."""
    rng = random.Random(f"seed {seed}, case {number}")
    weights = [weight for _, weight in KINDS.values()]
    (kind,) = rng.choices(list(KINDS), weights)
    draw_case, _ = KINDS[kind]
    return kind, draw_case(rng)
