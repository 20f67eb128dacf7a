"""A second pass over a dataset whose order is that of the first: a word about it, once."""

from __future__ import annotations

import warnings


class SecondPass:
    """What the iterators of a dataset tell of their passes.

    Args:
        same_order: Whether the dataset is shuffled, and so in the same order in each pass.
    """

    def __init__(self, same_order: bool):
        self._to_say, self._one_has_ended = same_order, False

    def begins(self) -> None:
        """A pass begins, at the beginning."""
        if self._to_say and self._one_has_ended:
            self._to_say = False
            warnings.warn(
                "this second pass over a shuffled dataset has the order and the augmentations of"
                " the first. For others in each epoch: `for batches in ds.epochs(n): for batch in"
                " batches:`, or .batch(B).repeat(n) before .shard_to.",
                stacklevel=4,  # Grain wraps what calls this
            )

    def ends(self) -> None:
        """A pass has come to its end; one that was left early may have been a look at the data."""
        self._one_has_ended = True
