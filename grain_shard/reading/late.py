"""Which reads of a source take so long that it is worth asking for them a second time.

Most reads of a bucket take 50 ms, and one in a thousand takes seconds. A second request for the
same record is answered long before the first then ("backup requests", "hedged requests"). Where all
reads are slow, more of them would only make them slower. So a read is late only if one that began
after it has been answered, and few are asked for again.
"""

from __future__ import annotations

# What nineteen reads of twenty stay below is usual. It is followed without keeping any of them: a
# longer read raises it by a tenth, a shorter one lowers it by a 19th of that, so that it rests
# where one read in twenty is longer.
_UP = 1.1
_DOWN = _UP ** (-1 / 19)
# A read that takes so many times what is usual is late.
_MANY_TIMES = 3
# None is late before. So long may a thread wait for a processor, or for the interpreter's lock.
_LEAST_S = 10e-3
# Reads whose threads compute for a larger share of the time are slow by what they compute.
_COMPUTES = 0.1
# So much of all that is read may be asked for again, and no more than so many reads in a row.
_SHARE, _IN_A_ROW = 0.05, 8


class Lateness:
    """Learns from the reads that were answered. Times are in seconds, by `time.perf_counter`.

    Attributes:
        answered: How many reads were.
        asked_again: How many were asked for a second time.
    """

    def __init__(self):
        self.answered = self.asked_again = 0
        self._usual_s = 0.0
        self._computing = 0.0  # the share of a read for which its thread computes, of late
        self._last_start = 0.0  # of those that were answered
        self._allowance = 0.0

    def took(self, start: float, end: float, processor_s: float) -> None:
        """A read was answered, for which its thread used a processor for so long."""
        seconds = max(end - start, 1e-9)  # a clock with large steps may not have moved at all
        if not self.answered:
            self._usual_s = seconds
        self._usual_s *= _UP if seconds > self._usual_s else _DOWN
        self._computing += (processor_s / seconds - self._computing) / (20 if self.answered else 1)
        self._last_start = max(self._last_start, start)
        self._allowance = min(_IN_A_ROW, self._allowance + _SHARE)
        self.answered += 1

    @property
    def patience_s(self) -> float:
        """After how long a read is late."""
        return max(_LEAST_S, _MANY_TIMES * self._usual_s)

    def is_late(self, start: float, now: float) -> bool:
        """Whether to ask again for a read that began at `start`."""
        return (
            now - start >= self.patience_s
            and start < self._last_start
            and self._computing <= _COMPUTES
            and self._allowance >= 1
        )

    def asks_again(self) -> None:
        """A read is asked for again."""
        self._allowance -= 1
        self.asked_again += 1
