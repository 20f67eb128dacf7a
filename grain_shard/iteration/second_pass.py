"""Warnings about passes over a dataset that are most likely a mistake.

One warning is about a second pass that repeats the shuffled order of the first pass. The other is
about iterators that were left after one batch each. A dataset gives each warning once.
"""

from __future__ import annotations

import warnings

# After this many iterators in a row that gave only one batch, the next iterator warns.
_LOOKS = 2


class Passes:
    """Notes the passes that the iterators of a dataset make, and warns of likely mistakes.

    Args:
        same_order: True if the dataset is known to be shuffled with the same order in each pass.
    """

    def __init__(self, same_order: bool = False):
        self._told_of_order, self._told_of_looks = not same_order, False
        self._one_has_ended = False
        self._looks = 0  # iterators in a row that have given only one batch

    def begins(self) -> None:
        """Notes that a pass starts at the first batch; warns if that is likely a mistake."""
        if self._one_has_ended and not self._told_of_order:
            self._told_of_order = True
            warnings.warn(
                "this second pass over a shuffled dataset repeats the order and the augmentations"
                " of the first pass. For a new order in each epoch, write `for batches in"
                " ds.epochs(n): for batch in batches:`, or .batch(B).repeat(n) before .shard_to.",
                stacklevel=4,  # the user's line; Grain wraps `__next__` in one more function
            )
        if self._looks >= _LOOKS and not self._told_of_looks:
            self._told_of_looks = True
            warnings.warn(
                "two iterators of this dataset gave only one batch each, and each iter(ds) begins"
                " at the first batch again. Write `it = iter(ds)` once before the loop, and"
                " `next(it)` in each step.",
                stacklevel=4,
            )

    def gives(self, *, is_first: bool) -> None:
        """Notes that an iterator hands out a batch.

        Args:
            is_first: True for the first batch of a pass.
        """
        self._looks = self._looks + 1 if is_first else 0

    def ends(self) -> None:
        """Notes that a pass has reached its end, so that it was not only a look at one batch."""
        self._one_has_ended, self._looks = True, 0
