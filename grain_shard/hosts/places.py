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

_STOOD_STILL = (
    "stood still after that, most likely in the step of that batch.\n"
    "  remedy: leave the loop at the same batch on all hosts. If the loop was over, and a host"
    " worked on alone, close the iterator before that work."
)


class Place(NamedTuple):
    """The progress of the training loop of a host.

    Attributes:
        batches: Number of batches of the iterator that the loop has got or asks for.
        left: None while the loop goes on. Otherwise the reason for which it left, which is "" at
            the end of the data.
        is_still: True if the loop goes on, but has stood still for long, as in a collective.
        has_failed: True if the loop was left by a `sys.exit` that asks for a status other than 0.
    """

    batches: int
    left: str | None
    is_still: bool = False
    has_failed: bool = False


def left_early(
    places: Mapping[int, Place], num_hosts: int, first: int, of: str, *, is_long: bool = False
) -> str | None:
    """Returns an error if a host has left the loop, and another host has gone on.

    A host may also leave after it has got a batch, and before the step of that batch, as
    ``zip(batches, range(n))`` does. Then the other hosts stand still in that step.

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
    left = {host: place for host, place in places.items() if place.left}
    least = min((place.batches for place in left.values()), default=math.inf)
    ahead = [host for host, place in places.items() if place.batches > least]
    did = "went on."
    if not ahead and left and is_long and len(places) == num_hosts:
        going = {host: place for host, place in places.items() if place.left is None}
        ahead = list(going) if all(place.is_still for place in going.values()) else []
        did = _STOOD_STILL
    if not ahead:
        return "" if len(left) + at_end == num_hosts else None
    behind = [host for host, place in left.items() if place.batches == least]
    return (
        f"{hosts_text(behind)} left the loop after batch {first + left[behind[0]].batches:,}{of}"
        f" ({left[behind[0]].left}), and {hosts_text(ahead)} {did}"
    )
