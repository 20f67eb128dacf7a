"""`Place`: how far the training loop of a host has come; finds hosts that left while others go on.

Each host posts its place beside the loop. The first host compares the places of all hosts. Hosts
that all leave at the same batch have stopped early, which is no failure. They need not leave at the
same time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from grain_shard.hosts.compare import hosts_text

# The most likely places of a loop that has stood still for long.
IN_STEP, IN_SAVE = "most likely in the step of that batch", "in a save"
_REMEDY = (
    "  remedy: leave the loop at the same batch on all hosts, and call next and save equally often"
    " on all of them. If the loop was over, and a host worked on alone, close the iterator before"
    " that work."
)
_REMEDY_APART = (
    "  remedy: unless a step takes longer, they wait for each other for ever. Call each step,"
    " evaluation and save on all hosts: look for a call under `if jax.process_index() == 0:`."
)


class Place(NamedTuple):
    """The progress of the training loop of a host.

    Attributes:
        batches: Number of batches of the iterator that the loop has got or asks for.
        left: None while the loop goes on. Otherwise the reason for which it left, which is "" at
            the end of the data.
        still: `IN_STEP` or `IN_SAVE` if the loop goes on, but has stood still for long there, and
            then the line of the program at which it stands; "" if it has not.
        has_ended: True if the loop was left, and the program has ended since.
        has_failed: True if the loop was left by a `sys.exit` that asks for a status other than 0.
    """

    batches: int
    left: str | None
    still: str = ""
    has_ended: bool = False
    has_failed: bool = False


def left_early(
    places: Mapping[int, Place], num_hosts: int, first: int, of: str, *, is_long: bool = False
) -> str | None:
    """Returns an error if a host has left the loop, and another host has gone on.

    A host may also leave after it has got a batch, and before the step of that batch, as
    ``zip(batches, range(n))`` does. Or it called ``next`` once too often, and so reaches the end of
    the data before the last step. Then the other hosts stand still in that step.

    Args:
        places: The place of each host that has posted one, by host.
        num_hosts: Number of all hosts.
        first: Number of batches before the first batch of the iterator.
        of: The number of all batches, for the error, such as " of 1,000"; "" if it is not known.
        is_long: True if the places have been the same for so long that a loop that is still most
            likely waits for a host that has left.

    Returns:
        The error; "" if all hosts have left at the same batch; None if this is not known yet.

    Example:
        >>> print(left_early({0: Place(6, None), 1: Place(5, "sys.exit(3)")}, 2, 0, " of 1,000"))
        host 1 left the loop after batch 5 of 1,000 (sys.exit(3)), and host 0 went on.
    """
    at_end = sum(place.left == "" for place in places.values())
    gone = {host: place for host, place in places.items() if place.left}
    num_left, least = len(gone) + at_end, _least(gone)
    ahead = [host for host, place in places.items() if place.batches > least]
    did = "went on."
    if not ahead and is_long and len(places) == num_hosts:
        gone = {host: place for host, place in places.items() if place.left or place.has_ended}
        going = {host: place.still for host, place in places.items() if place.left is None}
        ahead = list(going) if gone and all(going.values()) else []
        did = f"stood still after that, {next(iter(going.values()), '')}.\n{_REMEDY}"
    if not ahead:
        return "" if num_left == num_hosts else None
    behind = [host for host, place in gone.items() if place.batches == _least(gone)]
    left = gone[behind[0]]
    return (
        f"{hosts_text(behind)} left the loop after batch {first + left.batches:,}{of}"
        f" ({left.left or 'the end of the data'}), and {hosts_text(ahead)} {did}"
    )


def _least(places: Mapping[int, Place]) -> float:
    return min((place.batches for place in places.values()), default=math.inf)


def may_work_alone(places: Mapping[int, Place]) -> bool:
    """Returns True if a loop that stands still may do so without waiting for a host that left.

    It does wait if that host left with an error, or if it waits in a save and that host has ended.

    Args:
        places: The place of each host.
    """
    saves = any(place.still.startswith(IN_SAVE) for place in places.values())
    return not any(place.has_failed or (saves and place.has_ended) for place in places.values())


def stand_apart(
    places: Mapping[int, Place], num_hosts: int, first: int, timeout_s: float
) -> str | None:
    """Returns a warning if all loops stand still, and not all at the same batch and line.

    A host that saves, or runs a step, which the other hosts leave out, waits for them. The other
    hosts wait for this host in their next step.

    Args:
        places: The place of each host that has posted one, by host.
        num_hosts: Number of all hosts.
        first: Number of batches before the first batch of the iterator.
        timeout_s: Seconds for which all loops have stood still, at least.

    Returns:
        The warning; None if a loop goes on or was left, or if all stand at the same place.

    Example:
        >>> still = {0: Place(6, None, f"{IN_STEP}, train.py:9"), 1: Place(7, None, IN_STEP)}
        >>> print(stand_apart(still, 2, first=0, timeout_s=60.0).splitlines()[1])
          host 0 at batch 6, most likely in the step of that batch, train.py:9
    """
    still: dict[tuple[int, str], list[int]] = {}
    for host, place in places.items():
        if place.left is None and place.still:
            still.setdefault((place.batches, place.still), []).append(host)
    if sum(map(len, still.values())) < num_hosts or len(still) < 2:
        return None
    lines = [
        f"{hosts_text(hosts)} at batch {first + batches:,}, {where}"
        for (batches, where), hosts in sorted(still.items())
    ]
    stood = f"all hosts have stood still for {timeout_s:g} s:"
    return "\n  ".join([stood, *lines]) + f"\n{_REMEDY_APART}"
