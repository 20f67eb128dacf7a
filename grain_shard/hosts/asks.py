"""`Asks`: the times at which a loop asked for its batches; finds a host that is one batch ahead.

A host that calls ``next`` once too often is ahead of the others from then on. The loops cannot be
stopped to compare them, so the first host compares the times of their calls. If each step has a
collective, a host asks for batch n + 1 only after every other host has asked for batch n, because
all hosts have to take part in step n. Next to a host that is one batch behind, it asks for batch
n + 1 at about the same time as the other host for batch n, and now and then before it.

This needs clocks that agree within a step. Two kinds of loops are not noticed: loops whose steps
have no collective, and an ahead host that also does more work in each step than the other hosts.
"""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Mapping, Sequence

from grain_shard.hosts.compare import hosts_text

# In each window of `_WINDOW_S` seconds the times of the first `_KEPT` calls are kept. So all hosts
# keep the times of about the same batches.
_WINDOW_S, _KEPT = 4.0, 64
# The fewest batches, and calls in the wrong order among them, from which a host is named. Further,
# the calls of most batches must be nearer to each other than half a step.
_FEWEST, _EARLY, _MOST, _PART = 12, 2, 0.6, 0.5


class Asks:
    """The times at which the training loop of this host asked for its latest batches.

    Attributes:
        latest: Pairs (number of the batch in the run, time in seconds since 1970).
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


def is_ahead(host: Sequence[tuple[int, float]], other: Sequence[tuple[int, float]]) -> bool:
    """Returns True if a host is most likely one batch ahead of another host.

    Args:
        host: The times of the calls of the host; see `Asks.latest`.
        other: The times of the calls of the other host.

    Example:
        >>> steps = [(n, 0.1 * n) for n in range(20)]
        >>> ahead = [(n + 1, t + (0.001, -0.001)[n % 2]) for n, t in steps]
        >>> is_ahead(ahead, steps), is_ahead(steps, ahead), is_ahead(steps, steps)
        (True, False, False)
    """
    of_host, of_other = dict(host), dict(other)
    steps = [t - of_other[n - 1] for n, t in other if n - 1 in of_other]
    later = [of_host[n + 1] - t for n, t in other if n + 1 in of_host]
    if len(later) < _FEWEST or len(steps) < _FEWEST:
        return False
    step_s = statistics.median(steps)
    near = sum(abs(s) <= _PART * step_s for s in later)
    return near >= _MOST * len(later) and sum(s < 0 for s in later) >= _EARLY


def one_ahead(asks: Mapping[int, Sequence[tuple[int, float]]]) -> tuple[list[int], list[int]]:
    """Compares the calls of each host with the calls of the first host.

    Args:
        asks: The times of the calls, by host.

    Returns:
        The hosts that are one batch ahead, and the hosts that are one batch behind them.
    """
    (first, of_first), *others = asks.items()
    if behind := [host for host, of_host in others if is_ahead(of_first, of_host)]:
        return [first], behind
    ahead = [host for host, of_host in others if is_ahead(of_host, of_first)]
    return ahead, [first] if ahead else []


def describe(ahead: Sequence[int], behind: Sequence[int]) -> str:
    """Returns the text of a warning, or of an error, about hosts that are one batch ahead."""
    is_are = "is" if len(ahead) == 1 else "are"
    return (
        f"{hosts_text(ahead)} {is_are} one batch ahead of {hosts_text(behind)}, by the times of"
        " their calls of next. So global batches have rows of two batches.\n"
        f"  remedy: look for a next(...) that only {hosts_text(ahead)} called. To look at a batch"
        " on one host alone, iterate over the dataset before .shard_to."
    )
