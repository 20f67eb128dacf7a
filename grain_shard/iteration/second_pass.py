"""Warnings, once for each dataset, of passes that are most likely a mistake."""

from __future__ import annotations

import warnings

# This many iterators in a row may be mere looks at the data.
_LOOKS = 2


class Passes:
    """The passes that the iterators of a dataset make.

    Args:
        same_order: Whether the dataset is known to be shuffled with the same order in each pass.
    """

    def __init__(self, same_order: bool = False):
        self._told_of_order, self._told_of_looks = not same_order, False
        self._one_has_ended = False
        self._looks = 0  # iterators in a row that have given one batch

    def begins(self) -> None:
        """Warns, if need be, when a pass starts at the first batch."""
        if self._one_has_ended and not self._told_of_order:
            self._told_of_order = True
            warnings.warn(
                "this second pass over a shuffled dataset repeats the order and the augmentations"
                " of the first pass. For a new order in each epoch, write `for batches in"
                " ds.epochs(n): for batch in batches:`, or .batch(B).repeat(n) before .shard_to.",
                stacklevel=4,  # Grain wraps what calls this
            )
        if self._looks >= _LOOKS and not self._told_of_looks:
            self._told_of_looks = True
            warnings.warn(
                "two iterators of this dataset were left after one batch, and each iter(ds) begins"
                " at the first batch again. Write `it = iter(ds)` once before the loop, and"
                " `next(it)` in each step.",
                stacklevel=4,
            )

    def gives(self, *, is_first: bool) -> None:
        """Notes that an iterator gives the first batch, or another one."""
        self._looks = self._looks + 1 if is_first else 0

    def ends(self) -> None:
        """Notes the end of a pass; one that was left early may have been a look at the data."""
        self._one_has_ended, self._looks = True, 0
