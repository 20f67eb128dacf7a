"""`Passes`: warns of a loop that begins at the first batch again by mistake."""

from __future__ import annotations

import warnings
from collections import deque


class Passes:
    """The uses of the iterators of one dataset, to warn when another iterator begins anew."""

    def __init__(self):
        # The numbers of batches that the last two iterators had handed out when they were dropped.
        self._dropped = deque[int](maxlen=2)
        self._is_moved = False

    def moved(self) -> None:
        """Notes that an iterator was restored to a state, or went to a step."""
        self._is_moved = True

    def used(self) -> None:
        """Notes that the latest iterator makes batches."""
        self._is_moved = False

    def dropped(self, num_batches: int) -> None:
        """Notes that an iterator was dropped, which began at the first batch.

        Args:
            num_batches: Number of batches that it had handed out.
        """
        self._dropped.append(num_batches)

    def begins_anew(self, stacklevel: int) -> None:
        """Warns if another iterator that begins at the first batch is most likely a mistake.

        Args:
            stacklevel: The level of the user's line, for `warnings.warn` in the caller.
        """
        if self._is_moved:
            what = (
                "an iterator of this dataset was restored to a state, or went to a step, and was"
                " not used. This iter(ds) begins at the first batch. To go on from the state, loop"
                " over the iterator that was restored: `for batch in it`, not `for batch in ds`."
            )
        elif list(self._dropped) == [1, 1]:
            what = (
                "two iterators of this dataset gave only one batch each, and each iter(ds) begins"
                " at the first batch again. Write `it = iter(ds)` once before the loop, and"
                " `next(it)` in each step."
            )
        else:
            return
        self._is_moved = False
        warnings.warn(what, stacklevel=stacklevel + 1)
