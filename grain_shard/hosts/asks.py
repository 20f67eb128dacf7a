"""`Asks`: the times at which a loop asked for its batches; finds a host that is one batch ahead.

A host that calls ``next`` once too often is ahead of the others from then on. The loops cannot be
stopped to compare them, so the first host compares the times of their calls. If each step has a
collective, a host asks for batch n + 1 only after every other host has asked for batch n, because
all hosts have to take part in step n. Next to a host that is one batch behind, it asks for batch
n + 1 at about the same time as the other host for batch n, and now and then before it.

This needs clocks that agree within a step. Two kinds of loops are not noticed: loops whose steps
have no collective, and an ahead host that also does more work in each step than the other hosts. In
loops without collectives, a host that is late by about a step is not taken for one batch ahead.
"""

from __future__ import annotations

import collections
import itertools
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from grain_shard.hosts.compare import hosts_text
from grain_shard.hosts.places import Calls, Places

# In each window of `_WINDOW_S` seconds the times of the first `_KEPT` calls are kept. So all hosts
# keep the times of about the same batches.
_WINDOW_S, _KEPT = 4.0, 64
# The fewest batches from which a host is named; and the smallest ratio of the mean squared change
# of the differences between two hosts to their variance (von Neumann's ratio). With a collective in
# each step, the hosts begin each step anew, and the ratio is about 2. Without collectives the
# delays of the steps add up, and the ratio is near 0 if there are many steps.
_FEWEST, _ANEW = 24, 0.8
# When a host has reached the end of the data, the others stand still if they take no batch for so
# many seconds, and for so many steps.
_ENDS_TOGETHER_S, _STEPS_TO_END = 5.0, 3.0


class Evidence(NamedTuple):
    """The calls from which a host is taken to be one batch ahead.

    Attributes:
        early: The fewest calls that came before the call of the other host. With a collective in
            each step, none does if both hosts are at the same batch.
        near: The smallest part of the calls that are nearer to each other than half a step.
    """

    early: int
    near: float


# While the loops run, each window is another chance. At the end there is only the last one. But
# then the hosts that are behind stand still, too.
IN_RUN, AT_END = Evidence(early=2, near=0.6), Evidence(early=1, near=0.4)


class Asks:
    """The times at which the training loop of this host asked for its latest batches.

    Attributes:
        latest: The latest calls, at most 64.
    """

    def __init__(self):
        self.latest = collections.deque[tuple[int, float]](maxlen=_KEPT)
        self._window, self._kept, self._last = 0, 0, -1

    def note(self, number: int) -> None:
        """Notes that the loop asks for a batch.

        Args:
            number: Number of batches that the loop has got before. Only the first call counts.
        """
        now = time.time()
        if (window := int(now // _WINDOW_S)) != self._window:
            self._window, self._kept = window, 0
        if number > self._last and self._kept < _KEPT:
            self._last, self._kept = number, self._kept + 1
            self.latest.append((number, round(now, 5)))


def step_s(host: Calls) -> float:
    """Returns the median time between two calls of a host, in seconds; 0 if there are none."""
    called = dict(host)
    steps = [t - called[n - 1] for n, t in host if n - 1 in called]
    return statistics.median(steps) if steps else 0.0


def is_ahead(host: Calls, other: Calls, enough: Evidence = IN_RUN) -> bool:
    """Returns True if a host is most likely one batch ahead of another host.

    Args:
        host: The times of the calls of the host; see `Asks.latest`.
        other: The times of the calls of the other host.
        enough: The evidence that is enough.

    Example:
        >>> steps = [(n, 0.1 * n) for n in range(30)]
        >>> ahead = [(n + 1, t + (0.001, -0.001)[n % 2]) for n, t in steps]
        >>> is_ahead(ahead, steps), is_ahead(steps, ahead), is_ahead(steps, steps)
        (True, False, False)
        >>> faster = [(n + 1, 0.098 * n) for n, _ in steps]  # and there is no collective
        >>> is_ahead(faster, steps)
        False
    """
    of_host = dict(host)
    later = [of_host[n + 1] - t for n, t in other if n + 1 in of_host]
    if len(later) < _FEWEST:
        return False
    changes = [after - before for before, after in itertools.pairwise(later)]
    if statistics.fmean(c * c for c in changes) < _ANEW * statistics.pvariance(later):
        return False
    near = sum(abs(s) <= step_s(other) / 2 for s in later)
    return near >= enough.near * len(later) and sum(s < 0 for s in later) >= enough.early


def one_ahead(asks: Mapping[int, Calls], enough: Evidence = IN_RUN) -> tuple[list[int], list[int]]:
    """Compares the calls of each host with the calls of the first host.

    Args:
        asks: The times of the calls, by host.
        enough: The evidence that is enough.

    Returns:
        The hosts that are one batch ahead, and the hosts that are one batch behind them.
    """
    if not asks:
        return [], []
    (first, of_first), *others = asks.items()
    if behind := [host for host, of_host in others if is_ahead(of_first, of_host, enough)]:
        return [first], behind
    ahead = [host for host, of_host in others if is_ahead(of_host, of_first, enough)]
    return ahead, [first] if ahead else []


def ahead_in_run(places: Places) -> str | None:
    """Returns a warning if hosts are most likely one batch ahead of others."""
    ahead, behind = one_ahead(places.asks())
    return _describe(ahead, behind) if ahead else None


def ahead_at_end(places: Places) -> str | None:
    """Returns an error if hosts at the end of the data are one batch ahead of the others.

    The others then stand still in a step. The hosts at the end wait for nobody.
    """
    at_end = places.at_end
    if not at_end or places.same_s <= _ENDS_TOGETHER_S:
        return None
    asks = places.asks()
    if places.same_s <= _STEPS_TO_END * max(map(step_s, asks.values()), default=0.0):
        return None
    ahead, behind = one_ahead(asks, AT_END)
    if not ahead or not at_end >= set(ahead) or at_end & set(behind):
        return None
    reached = f"{hosts_text(ahead)} reached the end of the data, and waits for nobody."
    return f"{_describe(ahead, behind)}\n  {reached}"


def _describe(ahead: Sequence[int], behind: Sequence[int]) -> str:
    is_are = "is" if len(ahead) == 1 else "are"
    return (
        f"{hosts_text(ahead)} {is_are} one batch ahead of {hosts_text(behind)}, by the times of"
        " their calls of next. So global batches have rows of two batches.\n"
        f"  remedy: look for a next(...) that only {hosts_text(ahead)} called. To look at a batch"
        " on one host alone, iterate over the dataset before .shard_to."
    )
