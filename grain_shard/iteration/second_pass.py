"""Warnings, once for each dataset, of passes that are most likely a mistake."""

from __future__ import annotations

import warnings

_SAME_ORDER = (
    "this second pass over a shuffled dataset has the order and the augmentations of the first. For"
    " others in each epoch: `for batches in ds.epochs(n): for batch in batches:`, or"
    " .batch(B).repeat(n) before .shard_to."
)
_FIRST_BATCH = (
    "each iter(ds) begins at the first batch, and of this dataset two iterators in a row were left"
    " after that batch. In a loop, write `it = iter(ds)` once before it, and `next(it)` in each"
    " step."
)
# As many iterators in a row may be looks at the data.
_LOOKS = 2


class Passes:
    """The passes that the iterators of a dataset make.

    Args:
        same_order: Whether it is known to be shuffled, and to have the same order in each pass.
    """

    def __init__(self, same_order: bool):
        self._same_order, self._one_has_ended = same_order, False
        self._looks = 0  # iterators in a row that have given one batch
        self._said: set[str] = set()

    def begins(self) -> None:
        """Warns, if need be, as a pass begins at the beginning."""
        wrong = {_SAME_ORDER: self._same_order and self._one_has_ended}
        wrong[_FIRST_BATCH] = self._looks >= _LOOKS
        for text in wrong:
            if wrong[text] and text not in self._said:
                self._said.add(text)
                warnings.warn(text, stacklevel=4)  # Grain wraps what calls this

    def gives(self, number: int) -> None:
        """Notes that an iterator gives its first batch, its second one, and so on."""
        if number <= 2:
            self._looks = self._looks + 1 if number == 1 else 0

    def ends(self) -> None:
        """Notes the end of a pass; one that was left early may have been a look at the data."""
        self._one_has_ended, self._looks = True, 0
