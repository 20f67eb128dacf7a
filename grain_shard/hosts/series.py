"""The iterators of several hosts that belong together.

All hosts run the same program, so iterators belong together that come from the same dataset, as the
first, second, third one opened of it. A dataset is known by the place in the program where it was
made, and of several made there, by the order in which they were opened first. So a host that makes
a dataset more, or opens an iterator more, to look at a batch, disturbs no other dataset.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import os
from collections.abc import Sequence
from typing import ClassVar

from grain_shard.digest import digest

_OWN = ("grain_shard", "grain")


class Series:
    """Names the iterators of one dataset. It is made in the line that makes the dataset.

    Attributes:
        place: That line of the user's program: ``train.py:40``.
    """

    # The number of datasets opened so far, by their hosts and the place where they were made.
    _datasets: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self):
        self.place: str = _caller()
        self._dataset: int | None = None
        self._iterators = itertools.count()

    def open(self, hosts: Sequence[int]) -> tuple[str, int]:
        """Returns the name of the next iterator, the same on all hosts, and its number.

        Args:
            hosts: The hosts that have a part of its batches.
        """
        key = f"{digest(list(hosts))}/{digest(self.place)}"
        if self._dataset is None:
            self._dataset = self._datasets[key]
            self._datasets[key] += 1
        number = next(self._iterators)
        return f"{key}/{self._dataset}/{number}", number


def _caller() -> str:
    """Returns the innermost place on the stack outside of this package and of Grain."""
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").split(".")[0] in _OWN:
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "?"
