"""Finds the host that delays the other hosts, while they train.

All hosts wait for each other in the collectives of every training step. So the slow host is the one
whose training loop waits longest for its *data*. The loops of the other hosts wait for this host in
the training step. Every 15 seconds each host posts in the key-value store of JAX's distributed
runtime for how long its loop has waited for data. The first host compares the waits, and every host
reads the result.

The exchange takes two keys per host, which are overwritten each time. No host waits for another.
The thread that listens for failures (`alarm.py`) makes the exchange.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from absl import logging

from grain_shard.hosts.rounds import Store

# Topics: the waits that each host posts, and the verdicts that the first host of an iterator posts.
_WAITS, _SLOWEST = "waits", "slowest"
# A host delays the other hosts if its loop waits for data in a larger share of the time than their
# loops do, by at least this difference. A smaller difference may be chance, and a remedy would gain
# little.
_MUCH = 0.1


class Waits(NamedTuple):
    """The recent waits of one host's training loop.

    Attributes:
        share: Share of the time, 0 to 1, in which the loop waited for this host's data.
        wait_s: Seconds per batch in which the loop waited for this host's data.
        stage: The busiest stage of the host; None if it is not measured.
    """

    share: float
    wait_s: float
    stage: str | None


@dataclass(frozen=True)
class SlowestHost:
    """The host whose training loop recently waited longest for its data.

    Example:
        >>> print(SlowestHost(host=37, stage="read", wait_s=0.012, others_wait_s=0.001, share=0.4))
        host 37 holds the other hosts up by 11.0 ms a batch (40 % of the time), mostly in read

    Attributes:
        host: Process index of the host.
        stage: The busiest stage of the host: "read", "batch", "pad" or "place". None if it is not
            measured, as in worker processes.
        wait_s: Seconds per batch in which the host's loop waited for its data.
        others_wait_s: Median, over the other hosts, of the seconds per batch in which their loops
            waited for their own data.
        share: Share of the time, 0 to 1, in which the host's loop waited, minus the median share of
            the other hosts.
    """

    host: int
    stage: str | None
    wait_s: float
    others_wait_s: float
    share: float

    @property
    def behind_s(self) -> float:
        """Seconds per batch that the host waited longer than the median of the other hosts."""
        return self.wait_s - self.others_wait_s

    @property
    def holds_others_up(self) -> bool:
        """True if `share` is at least 0.1. The other hosts then certainly wait for this host."""
        return self.share >= _MUCH

    def __str__(self) -> str:
        stage = "" if self.stage is None else f", mostly in {self.stage}"
        behind = f"{self.behind_s * 1e3:.1f} ms a batch ({self.share:.0%} of the time){stage}"
        behind = behind.replace("%", " %")
        if self.holds_others_up:
            return f"host {self.host} holds the other hosts up by {behind}"
        return f"no host holds the others up; host {self.host} waits longest, by {behind}"


def slowest(waits: Mapping[int, Waits]) -> SlowestHost | None:
    """Returns the host whose loop waits longest for its data; None for a single host.

    Args:
        waits: The waits of each host, by host.

    Example:
        >>> found = slowest({0: Waits(0.01, 1e-4, "read"), 1: Waits(0.5, 5e-3, "read")})
        >>> (found.host, found.share, found.holds_others_up)
        (1, 0.49, True)
    """
    if len(waits) < 2:
        return None
    host = max(waits, key=lambda host: waits[host].share)
    own, others = waits[host], [w for other, w in waits.items() if other != host]
    share = own.share - statistics.median(w.share for w in others)
    others_wait_s = statistics.median(w.wait_s for w in others)
    return SlowestHost(host, own.stage, own.wait_s, others_wait_s, share)


class SlowestOf:
    """Keeps and logs the slowest of the hosts that run an iterator.

    Args:
        hosts: All hosts that run the iterator. The first one compares their waits.
        waits: Returns the waits of the iterator's loop since the last call. Its argument is
            the least length of this time in seconds: a shorter time counts as this length. A
            background thread calls the function, which must not refer to the iterator.

    Attributes:
        hosts: The argument `hosts`, as a list.
        waits: The argument `waits`.
        found: The slowest host by the last comparison; None before the first comparison.
    """

    def __init__(self, hosts: Sequence[int], waits: Callable[[float], Waits]):
        self.hosts: list[int] = list(hosts)
        self.waits: Callable[[float], Waits] = waits
        self.found: SlowestHost | None = None
        self._last: int | None = None  # the host that delayed the others, by the last comparison
        self._told: int | None = None  # the host that the log named last

    def hear(self, found: SlowestHost, this_host: int) -> None:
        """Keeps the slowest host of a new comparison; logs it if it delays the others.

        A host is logged once, after two comparisons in a row have found it. If each comparison
        finds a different host, no host has a lasting problem. Only the first host and the slowest
        host log.

        Args:
            found: The slowest host.
            this_host: Number of this host.
        """
        name, last = found.host if found.holds_others_up else None, self._last
        self.found, self._last = found, name
        if name != last:
            return
        if name not in (None, self._told) and this_host in (self.hosts[0], name):
            logging.warning("grain_shard: %s.", found)
        self._told = name


def compare_waits(store: Store, iterators: Mapping[str, SlowestOf], least_s: float) -> None:
    """Posts the waits of this host, compares the waits of all hosts, and reads the results.

    This host compares only the iterators of which it is the first host.

    Args:
        store: The key-value store.
        iterators: The `SlowestOf` of each iterator of this process, by the iterator's name.
        least_s: Least length of the compared time, in seconds. A shorter time since the last call
            counts as this length.
    """
    store.put(_WAITS, {series: one.waits(least_s) for series, one in iterators.items()})
    led = {series: one.hosts for series, one in iterators.items() if one.hosts[0] == store.host}
    if led:
        of_all, verdicts = store.get_all(_WAITS), {}
        for series, hosts in led.items():
            waits = {h: Waits(*of_all[h][series]) for h in hosts if series in of_all.get(h, {})}
            # If a host has not posted its waits yet, the hosts of this iterator are compared at the
            # next call of this function.
            if len(waits) == len(hosts) and (found := slowest(waits)) is not None:
                verdicts[series] = asdict(found)
        store.put(_SLOWEST, verdicts)
    for of_first_host in store.get_all(_SLOWEST).values():
        for series in iterators.keys() & of_first_host.keys():
            iterators[series].hear(SlowestHost(**of_first_host[series]), store.host)
