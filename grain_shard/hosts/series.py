"""`Series`: gives an iterator the same name on all hosts, so that the hosts can find each other.

All hosts run the same program. So the n-th iterator of a dataset on one host belongs to the n-th
iterator of the same dataset on another host. A dataset is identified by the line of the program
that made it. If one line makes several datasets, they are numbered in the order in which they were
first iterated over. So one host alone may make a dataset at another line, for example to look at a
batch, and the names of all other datasets stay the same.
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

    The call that makes the dataset must make this object, because it looks at the call stack.

    Attributes:
        made_at: The line of the user's program that made the dataset, such as ``train.py:40``.
    """

    # Number of datasets that were iterated over so far. A key stands for the hosts of a dataset and
    # for the line of the user's program that made it.
    _datasets: ClassVar[collections.Counter[str]] = collections.Counter()

    def __init__(self):
        self.made_at: str = _caller()
        self._dataset: int | None = None
        self._iterators = itertools.count()

    def open(self, hosts: Sequence[int]) -> tuple[str, int]:
        """Names the dataset's next iterator; returns its name, and its number from 0.

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
    """Returns the line of the user's program that is running, such as ``train.py:40``, or "?"."""
    frame = user_frame()
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}" if frame else "?"
