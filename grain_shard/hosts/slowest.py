"""The host that holds the others up, as all of them learn while they run.

All hosts wait for each other in the collectives of every step. So the one whose loop waits longest
for its *data* is the slow one, and the others wait for it in the step. Every host says now and then
in the distributed runtime's key-value store for how long its loop has waited, the first host
compares them, and every host reads what came of it.

That takes two keys a host, which are overwritten, and no host waits for another. It is done by the
thread that listens for failures, in three turns: one to post, one to compare, one to read.
"""

from __future__ import annotations

import functools
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
from absl import logging

from grain_shard.hosts import alarm
from grain_shard.hosts.alarm import Listener, listener_of
from grain_shard.hosts.rounds import runtime_client

_WAITS = "grain_shard/waits/"  # and a host
_SLOWEST = "grain_shard/slowest/{}/"  # the host that has compared
_VERDICTS = "verdicts"
# A host holds the others up if it waits for data for at least this larger share of the time. A
# smaller difference may be chance, and a remedy would gain little.
_MUCH = 0.1


class Waits(NamedTuple):
    """The waits of one host's loop of late.

    Attributes:
        share: For which part of the time it has waited for this host's data, 0 to 1.
        wait_s: The same in seconds a batch.
        stage: Which stage of the host has been busiest; None if that is not seen.
    """

    share: float
    wait_s: float
    stage: str | None


@dataclass(frozen=True)
class SlowestHost:
    """The host whose training loop waited longest for its data, of late.

    Example:
        >>> print(SlowestHost(host=37, stage="read", wait_s=0.012, others_wait_s=0.001, share=0.4))
        host 37 holds the others up by 11.0 ms a batch (40 % of the time), mostly in read

    Attributes:
        host: Its process index.
        stage: Which of its stages was busiest ("read", "batch", "pad", "place"); None if that is
            not seen from its process, as with worker processes.
        wait_s: For how long its loop waited for its data, in seconds a batch.
        others_wait_s: The same of the other hosts, the median.
        share: By how much more of the time it waited than the others (the median), 0 to 1.
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
            return f"host {self.host} holds the others up by {behind}"
        return f"none holds the others up; host {self.host} waits longest, by {behind}"


def slowest(waits: Mapping[int, Waits]) -> SlowestHost | None:
    """The host that waits longest for its data, and by how much; None if there is but one.

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
        series: The name of the iterator's rounds, the same on all hosts.
        hosts: These hosts. The first one compares.
        waits: How the iterator's loop has waited since the last call, which is so many seconds ago
            at least. Called by another thread; must not refer to the iterator.

    Attributes:
        hosts: As given.
        waits: As given.
        found: The last verdict of the hosts; None before the first.
    """

    def __init__(self, series: str, hosts: Sequence[int], waits: Callable[[float], Waits]):
        self.hosts, self.waits = list(hosts), waits
        self.found: SlowestHost | None = None
        self._told: int | None = None  # which host the log has last named
        self._series, self._exchange = series, _exchange_of(listener_of(runtime_client()))
        self._exchange.iterators[series] = self

    def close(self) -> None:
        """The iterator is closed."""
        self._exchange.iterators.pop(self._series, None)

    def hear(self, found: SlowestHost, this_host: int) -> None:
        """Takes the verdict of the hosts; logs a line if one holds the others up anew.

        A host is named there once it was found twice in a row: where each time it is another one,
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


class _Exchange:
    """The messages between this process's iterators and the iterators of other processes.

    Attributes:
        iterators: The iterators, by the names of their series.
    """

    def __init__(self, client: Any):
        self._client, self._host = client, jax.process_index()
        self.iterators: dict[str, SlowestOf] = {}
        self._things = self._post, self._compare, self._read
        self._turns = itertools.cycle(self._things)

    def take_turn(self) -> None:
        """Does one of the things that there are to be done."""
        next(self._turns)()

    def _post(self) -> None:
        period_s = len(self._things) * alarm.TURN_S
        waits = {series: one.waits(period_s) for series, one in self._alive()}
        self._client.key_value_set(f"{_WAITS}{self._host}", json.dumps(waits), allow_overwrite=True)

    def _compare(self) -> None:
        own = [(series, one) for series, one in self._alive() if one.hosts[0] == self._host]
        if not own:
            return
        of_all = {
            int(key.rsplit("/", 1)[1]): json.loads(value)
            for key, value in self._client.key_value_dir_get(_WAITS)
        }
        verdicts = {}
        for series, one in own:
            waits = {
                host: Waits(*of_all[host][series])
                for host in one.hosts
                if series in of_all.get(host, ())
            }
            # The other hosts answer with their next turn.
            if len(waits) == len(one.hosts) and (found := slowest(waits)) is not None:
                verdicts[series] = asdict(found)
        key = _SLOWEST.format(self._host) + _VERDICTS
        self._client.key_value_set(key, json.dumps(verdicts), allow_overwrite=True)

    def _read(self) -> None:
        for first in {one.hosts[0] for _, one in self._alive()}:
            for _, text in self._client.key_value_dir_get(_SLOWEST.format(first)):
                for series, found in json.loads(text).items():
                    if (one := self.iterators.get(series)) is not None:
                        one.hear(SlowestHost(**found), self._host)

    def _alive(self) -> list[tuple[str, SlowestOf]]:
        return list(self.iterators.items())


@functools.lru_cache(maxsize=1)
def _exchange_of(listener: Listener) -> _Exchange:
    exchange = _Exchange(listener.client)
    listener.take_turn = exchange.take_turn
    return exchange
