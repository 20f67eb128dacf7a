"""All groups of measurements, in the order of RESULTS.md."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import (
    agreement,
    arrays,
    clients,
    counting,
    hosts,
    images,
    many_feeds,
    memory,
    overlap,
    placing,
    reading,
    restoring_feeds,
    starting,
    two_processes,
    waiting,
)
from benchmarks.measure import Group

MODULES = (
    reading,
    two_processes,
    hosts,
    overlap,
    placing,
    memory,
    starting,
    images,
    waiting,
    many_feeds,
    restoring_feeds,
    agreement,
    arrays,
    counting,
    clients,
)
GROUPS: list[Group] = [group for module in MODULES for group in module.GROUPS]


def names() -> list[str]:
    """Returns the names of the groups, and then the numbers of the goals, such as P1."""
    numbers = {c.number for group in GROUPS for c in group.comparisons if c.number}
    return [group.name for group in GROUPS] + sorted(numbers, key=lambda number: int(number[1:]))


def named(chosen: Sequence[str]) -> list[Group]:
    """Returns the groups that have one of the names or a goal with one of the numbers.

    Args:
        chosen: Names of groups and numbers of goals; all groups if it is empty.
    """
    return [
        group
        for group in GROUPS
        if not chosen or {group.name, *(c.number for c in group.comparisons)} & set(chosen)
    ]
