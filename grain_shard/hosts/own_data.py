"""`OwnData`: finds a training loop that waits for too long for the data of its own host."""

from __future__ import annotations

import time
from collections.abc import Callable


class OwnData:
    """The wait of a training loop for this host's own batches.

    The other hosts wait for this host in a collective meanwhile, and cannot tell why. In streams
    and feeds, the votes find such a host.

    Args:
        host: The number of this host.
        timeout_s: The longest wait in seconds, as long as no read is tried again.
        retries: Returns the number of reads that were tried again so far.
    """

    def __init__(self, host: int, timeout_s: float, retries: Callable[[], int]):
        self._host, self._timeout_s, self._retries = host, timeout_s, retries
        self._wait: tuple[int, int] | None = None  # the batch and the retries of the present wait
        self._since = 0.0

    def error(self, waits_for: int | None) -> str | None:
        """Returns the error of a loop that has waited for too long; None if there is none.

        Args:
            waits_for: The number of the batch that the loop waits for; None if it does not wait.
        """
        wait = None if waits_for is None else (waits_for, self._retries())
        if wait is None or wait != self._wait:
            self._wait, self._since = wait, time.monotonic()
            return None
        waited_s = time.monotonic() - self._since
        if waited_s <= self._timeout_s:
            return None
        return (
            f"host {self._host} has waited {waited_s:.0f} s for the data of its next batch"
            f" (timeout_s={self._timeout_s:g}), and the other hosts wait for host {self._host}.\n"
            f"  remedy: find out what the source of host {self._host} waits for. If it is only"
            " slow, raise timeout_s of .shard_to."
        )
