"""`Passes`: warns of a loop that begins at the first batch again by mistake."""

from __future__ import annotations

import warnings
from collections import deque

from grain_shard.callers import user_frame


class Passes:
    """The uses of the iterators of one dataset, to warn when another iterator begins anew.

    Attributes:
        unused: Stands for an iterator that was restored to a state, or went to a step, and was not
            used since; None without one.
    """

    def __init__(self):
        # The numbers of batches that the last two iterators had handed out when they were dropped.
        self._dropped = deque[int](maxlen=2)
        self.unused: object | None = None

    def used(self, iterator: object) -> None:
        """Notes that an iterator is used.

        Args:
            iterator: Stands for the iterator.
        """
        if self.unused is iterator:
            self.unused = None

    def dropped(self, num_batches: int) -> None:
        """Notes that an iterator was dropped, which began at the first batch.

        Args:
            num_batches: Number of batches that it had handed out.
        """
        self._dropped.append(num_batches)

    def begins(self) -> None:
        """Warns if another iterator begins, and the last two gave only one batch each."""
        if list(self._dropped) == [1, 1]:
            _warn(
                "two iterators of this dataset gave only one batch each, and each iter(ds) begins"
                " at the first batch again. Write `it = iter(ds)` once before the loop, and"
                " `next(it)` in each step."
            )

    def goes_on(self) -> None:
        """Warns that an iterator goes on to its second batch, in place of the unused one.

        One batch is no reason to warn, because a program may look at it before the loop.
        """
        self.unused = None
        _warn(
            "an iterator of this dataset was restored to a state, or went to a step, and was not"
            " used. This other iterator began at the first batch. To go on from the state, loop"
            " over the iterator that was restored: `for batch in it`, not `for batch in ds`."
        )


def _warn(text: str) -> None:
    """Gives a warning at the innermost line that is not in this package or in Grain."""
    warnings.warn(text, stacklevel=user_frame()[1])
