"""`Series`: gives an iterator the same name on all hosts, so that the hosts can find each other.

All hosts run the same program. So the n-th iterator of a dataset on one host belongs to the n-th
iterator of the same dataset on another host. A dataset is identified by the line of the program
that made it. If one line makes several datasets, they are numbered in the order in which they were
first iterated over. So one host alone may make one more dataset at a line of its own, for example
to look at a batch. The names for other datasets stay the same.
"""

from __future__ import annotations

import collections
import itertools
import os
from collections.abc import Sequence
from typing import ClassVar

from grain_shard.callers import user_frame
from grain_shard.digest import digest


class Series:
    """Names the iterators of one dataset, the same on all hosts.

    It has to be made by the call that makes the dataset, because it looks at the call stack.

    Attributes:
        made_at: The line of the user's program that made the dataset, such as ``train.py:40``.
    """

    # Counts the datasets that were iterated over so far. The key stands for the hosts of a dataset,
    # and for the line of the user's program that made it.
    _datasets: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self):
        self.made_at: str = _caller()
        self._dataset: int | None = None
        self._iterators = itertools.count()

    def open(self, hosts: Sequence[int]) -> tuple[str, int]:
        """Names the dataset's next iterator; returns its name, and its number from 0.

        Each call is for another iterator.

        Args:
            hosts: The hosts that hold rows of the iterator's batches.
        """
        key = f"{digest(list(hosts))}/{digest(self.made_at)}"
        if self._dataset is None:
            self._dataset = self._datasets[key]
            self._datasets[key] += 1
        number = next(self._iterators)
        return f"{key}/{self._dataset}/{number}", number


def _caller() -> str:
    """Returns file and line of the innermost caller that is not in this package or in Grain.

    The result is a text such as ``train.py:40``. It is "?" if there is no such caller.
    """
    frame = user_frame()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "?"
