"""The host that holds the others up, as all of them learn while they run.

All hosts wait for each other in the collectives of every step. So the one whose loop waits longest
for its *data* is the slow one, and the others wait for it in the step. Every host says now and then
in the distributed runtime's key-value store for how long its loop has waited, the first host
compares them, and every host reads what came of it.

That takes two keys a host, which are overwritten, and no host waits for another. The thread that
listens for failures does it now and then.
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
# A host holds the others up if it waits for data for at least this larger share of the time. A
# smaller difference may be chance, and a remedy would gain little.
_MUCH = 0.1


class Waits(NamedTuple):
    """The waits of one host's loop of late.

    Attributes:
        share: Share of the time, 0 to 1, in which the loop waited for this host's data.
        wait_s: The same wait in seconds a batch.
        stage: The stage of the host that was busiest; None if that is not seen.
    """

    share: float
    wait_s: float
    stage: str | None


@dataclass(frozen=True)
class SlowestHost:
    """The host whose training loop recently waited longest for its data.

    Example:
        >>> print(SlowestHost(host=37, stage="read", wait_s=0.012, others_wait_s=0.001, share=0.4))
        host 37 holds the others up by 11.0 ms a batch (40 % of the time), mostly in read

    Attributes:
        host: Its process index.
        stage: The stage that was busiest ("read", "batch", "pad", "place"); None if that is not
            seen from the host's process, as with worker processes.
        wait_s: Seconds a batch for which its loop waited for its data.
        others_wait_s: The same wait of the other hosts, the median.
        share: Share of the time, 0 to 1, that it waited longer than the others (the median).
    """

    host: int
    stage: str | None
    wait_s: float
    others_wait_s: float
    share: float

    @property
    def behind_s(self) -> float:
        """Seconds per batch that the host waited longer than the others."""
        return self.wait_s - self.others_wait_s

    @property
    def holds_others_up(self) -> bool:
        """True if `share` is at least a tenth, so that the others surely wait for this host."""
        return self.share >= _MUCH

    def __str__(self) -> str:
        stage = "" if self.stage is None else f", mostly in {self.stage}"
        behind = f"{self.behind_s * 1e3:.1f} ms a batch ({self.share:.0%} of the time){stage}"
        behind = behind.replace("%", " %")
        if self.holds_others_up:
            return f"host {self.host} holds the other hosts up by {behind}"
        return f"no host holds the others up; host {self.host} waits longest, by {behind}"


def slowest(waits: Mapping[int, Waits]) -> SlowestHost | None:
    """Returns the host that waits longest for its data, and by how much; None for a single host.

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
    """Learns which of the hosts of an iterator is the slowest.

    Args:
        hosts: These hosts. The first one compares.
        waits: Returns the waits of the iterator's loop since the last call; its argument is the
            least number of seconds since then. Another thread calls it, and it must not refer to
            the iterator.

    Attributes:
        hosts: As given.
        waits: As given.
        found: The last verdict of the hosts; None before the first.
    """

    def __init__(self, hosts: Sequence[int], waits: Callable[[float], Waits]):
        self.hosts: list[int] = list(hosts)
        self.waits: Callable[[float], Waits] = waits
        self.found: SlowestHost | None = None
        self._told: int | None = None  # which host the log has last named

    def hear(self, found: SlowestHost, this_host: int) -> None:
        """Takes the verdict of the hosts; logs a line if one holds the others up anew.

        The log names a host that was found twice in a row. If each verdict finds another host,
        nothing is wrong with any of them.
        """
        before, self.found = self.found, found
        name, last = _to_be_named(found), _to_be_named(before)
        if before is None or name != last:
            return
        if name not in (None, self._told) and this_host in (self.hosts[0], name):
            logging.warning("grain_shard: %s.", found)
        self._told = name


def _to_be_named(found: SlowestHost | None) -> int | None:
    return found.host if found is not None and found.holds_others_up else None


def compare_waits(store: Store, iterators: Mapping[str, SlowestOf], least_s: float) -> None:
    """Puts the waits of this host, compares the waits of all hosts, and reads the verdicts.

    Args:
        store: The store.
        iterators: The iterators of this process, by the names of their series.
        least_s: Seconds since the last call.
    """
    store.put(_WAITS, {series: one.waits(least_s) for series, one in iterators.items()})
    own = {series: one.hosts for series, one in iterators.items() if one.hosts[0] == store.host}
    if own:
        of_all, verdicts = store.get_all(_WAITS), {}
        for series, hosts in own.items():
            of_hosts = {host: of_all.get(host, {}).get(series) for host in hosts}
            waits = {host: Waits(*own) for host, own in of_hosts.items() if own is not None}
            # The other hosts put theirs with their next turn.
            if len(waits) == len(hosts) and (found := slowest(waits)) is not None:
                verdicts[series] = asdict(found)
        store.put(_SLOWEST, verdicts)
    for of_first_host in store.get_all(_SLOWEST).values():
        for series in iterators.keys() & of_first_host.keys():
            iterators[series].hear(SlowestHost(**of_first_host[series]), store.host)
