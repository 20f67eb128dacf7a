"""A case follows from a seed and its number, in every process alike."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Protocol

from benchmarks.soak import failing_hosts, faults, feeds, kills, pipelines


class Case(Protocol):
    """What is drawn: a frozen dataclass, whose text is a literal."""

    @property
    def limit_s(self) -> float:
        """Seconds after which it hangs."""
        ...

    def run(self, folder: Path) -> Counter[str]:
        """Checks what it is about, and counts it; raises where something is not as it should be.

        Args:
            folder: An empty one.
        """
        ...


# In a hundred cases, so many of each.
KINDS = {
    "pipelines": (pipelines.draw, 52),
    "feeds": (feeds.draw, 22),
    "faults": (faults.draw, 14),
    "kill chains": (kills.draw, 8),
    "failing hosts": (failing_hosts.draw, 4),
}


def draw(seed: int, number: int) -> tuple[str, Case]:
    """The kind of a case, and the case."""
    rng = random.Random(f"seed {seed}, case {number}")
    weights = [weight for _, weight in KINDS.values()]
    (kind,) = rng.choices(list(KINDS), weights)
    draw_case, _ = KINDS[kind]
    return kind, draw_case(rng)
