"""`Place`: how far the training loop of a host has come; finds hosts that hold up the others.

Each host posts its place beside the loop. The first host calls the functions of this file with the
places of all hosts (`all_places.py`). Hosts that all leave at the same batch have stopped early,
which is no failure. They need not leave at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from grain_shard.hosts.compare import hosts_text

# The calls of a loop: pairs (number of the batch in the run, time in seconds since 1970).
Calls = Sequence[tuple[int, float]]
# The most likely places of a loop that has stood still for long.
IN_STEP, IN_SAVE = "most likely in the step of that batch", "in a save"
# After a clean end of one host, another host may work on alone, as to export a model, for so many
# seconds. In plain JAX, the exit of a process waits 300 seconds for the other processes.
_MAY_WORK_ALONE_S = 240.0
_REMEDY = (
    "  remedy: leave the loop at the same batch on all hosts, and call next and save equally often"
    " on all of them. If the loop was over, and a host worked on alone, close the iterator before"
    " that work."
)
_REMEDY_APART = (
    "  remedy: unless a step takes longer, they wait for each other for ever. Call next, each step,"
    " evaluation and save on all hosts: look for a call under `if jax.process_index() == 0:`."
)


class Place(NamedTuple):
    """The progress of the training loop of a host.

    Attributes:
        batches: Number of batches of the iterator that the loop has got or asks for.
        left: None while the loop goes on. Otherwise the reason for which it left, which is "" at
            the end of the data.
        still: `IN_STEP` or `IN_SAVE` if the loop's thread has stood still for long there, in the
            loop or after the end of the data, and then the line of the program at which it stands;
            "" if it has not.
        has_ended: True if the loop was left, and the program has ended since.
        has_failed: True if the loop was left by a `sys.exit` that asks for a status other than 0.
    """

    batches: int
    left: str | None
    still: str = ""
    has_ended: bool = False
    has_failed: bool = False


class Places(NamedTuple):
    """The places of all hosts, as the first host sees them.

    Attributes:
        of: The place of each host that has posted one, by host.
        num_hosts: Number of all hosts.
        first: Number of batches before the first batch of the iterator.
        total: Number of all batches, with those before `first`; None if it is not known.
        timeout_s: Longest time, in seconds, that one host waits for another.
        same_s: Seconds for which no place has changed.
        asks: Returns the times of the latest calls of each host's loop; see `Asks.latest`.
    """

    of: Mapping[int, Place]
    num_hosts: int
    first: int = 0
    total: int | None = None
    timeout_s: float = 60.0
    same_s: float = 0.0
    asks: Callable[[], Mapping[int, Calls]] = dict

    @property
    def are_still(self) -> bool:
        """True if loops that stand still have done so for `timeout_s`.

        A host posts that its loop stands still after half of `timeout_s`.
        """
        return self.same_s > self.timeout_s / 2

    @property
    def at_end(self) -> set[int]:
        """The hosts that have reached the end of the data."""
        return {host for host, place in self.of.items() if place.left == ""}


def all_left(places: Places) -> bool:
    """Returns True if all hosts have left the loop at the same batch."""
    num_left = sum(place.left is not None for place in places.of.values())
    return num_left == places.num_hosts and left_early(places) is None


def left_early(places: Places) -> str | None:
    """Returns an error if a host has left the loop, and another host has gone on.

    Example:
        >>> places = Places({0: Place(6, None), 1: Place(5, "sys.exit(3)")}, 2, total=1000)
        >>> print(left_early(places))
        host 1 left the loop after batch 5 of 1,000 (sys.exit(3)), and host 0 went on.
    """
    gone = {host: place for host, place in places.of.items() if place.left}
    ahead = [host for host, place in places.of.items() if place.batches > _least(gone.values())]
    return _left(places, gone, f"{hosts_text(ahead)} went on.") if ahead else None


def left_in_last_step(places: Places) -> str | None:
    """Returns an error if loops have long stood still, most likely for a host that has left.

    A host may leave after it has got a batch, and before the step of that batch, as
    ``zip(batches, range(n))`` does. Or it called ``next`` once too often, and so reaches the end of
    the data before the last step. Then the other hosts stand still in that step.
    """
    may_wait = _may_work_alone(places) and places.same_s < _MAY_WORK_ALONE_S
    return None if may_wait else _stand_still(places)


def still_after_a_leave(places: Places) -> str | None:
    """Returns a warning if `left_in_last_step`, which is no error yet, will be one in time."""
    text = _stand_still(places)
    after = f"Otherwise all hosts end {_MAY_WORK_ALONE_S:.0f} s after they stood still."
    return text and f"{text}\n  {after}"


def stand_apart(places: Places) -> str | None:
    """Returns a warning if loops stand still, and not all loops at the same batch and line.

    A host that saves, or runs a step, which the other hosts leave out, waits for them. The other
    hosts wait for this host in their next step, or wherever they read a loss after the last batch.

    Example:
        >>> still = {0: Place(6, None, f"{IN_STEP}, train.py:9"), 1: Place(7, None, IN_STEP)}
        >>> print(stand_apart(Places(still, 2, same_s=60.0)).splitlines()[1])
          host 0 at batch 6, most likely in the step of that batch, train.py:9
    """
    still: dict[tuple[int, str], list[int]] = {}
    for host, place in places.of.items():
        if place.still and not place.has_ended:
            where = place.still if place.left is None else _at_end(place)
            still.setdefault((place.batches, where), []).append(host)
    is_known = places.are_still and sum(map(len, still.values())) == places.num_hosts
    if not is_known or len(still) < 2 or places.at_end == set(places.of):
        return None
    lines = [
        f"{hosts_text(hosts)} at batch {places.first + batches:,}, {where}"
        for (batches, where), hosts in sorted(still.items())
    ]
    stood = f"all hosts have stood still for {places.timeout_s:g} s:"
    return "\n  ".join([stood, *lines]) + f"\n{_REMEDY_APART}"


def _at_end(place: Place) -> str:
    _, comma, line = place.still.partition(", ")
    return f"at the end of the data{comma}{line}"


def _stand_still(places: Places) -> str | None:
    """Returns an error if some hosts have left or ended, and all others have long stood still."""
    gone = {h: place for h, place in places.of.items() if place.left or place.has_ended}
    going = {h: place.still for h, place in places.of.items() if place.left is None}
    is_known = places.are_still and len(places.of) == places.num_hosts
    if not (is_known and gone and going and all(going.values())):
        return None
    where = next(iter(going.values()))
    return _left(places, gone, f"{hosts_text(going)} stood still after that, {where}.\n{_REMEDY}")


def _may_work_alone(places: Places) -> bool:
    """Returns True if a loop that stands still may do so without waiting for a host that left.

    It does wait if that host left with an error, or if it waits in a save and that host has ended.
    """
    of = places.of.values()
    saves = any(place.still.startswith(IN_SAVE) for place in of)
    return not any(place.has_failed or (saves and place.has_ended) for place in of)


def _left(places: Places, gone: Mapping[int, Place], others: str) -> str:
    behind = [host for host, place in gone.items() if place.batches == _least(gone.values())]
    left, of = gone[behind[0]], "" if places.total is None else f" of {places.total:,}"
    return (
        f"{hosts_text(behind)} left the loop after batch {places.first + left.batches:,}{of}"
        f" ({left.left or 'the end of the data'}), and {others}"
    )


def _least(places: Iterable[Place]) -> float:
    return min((place.batches for place in places), default=math.inf)
