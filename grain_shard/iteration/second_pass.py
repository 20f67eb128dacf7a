"""A warning, once, of a second pass over a shuffled dataset in the same order as the first."""

from __future__ import annotations

import warnings


class SecondPass:
    """The passes that the iterators of a dataset have made, which is in the same order in each."""

    def __init__(self):
        self._one_has_ended = self._was_said = False

    def begins(self) -> None:
        """A pass begins, at the beginning."""
        if self._one_has_ended and not self._was_said:
            self._was_said = True
            warnings.warn(
                "this second pass over a shuffled dataset has the order and the augmentations of"
                " the first. For others in each epoch: `for batches in ds.epochs(n): for batch in"
                " batches:`, or .batch(B).repeat(n) before .shard_to.",
                stacklevel=4,  # Grain wraps what calls this
            )

    def ends(self) -> None:
        """A pass has come to its end; one that was left early may have been a look at the data."""
        self._one_has_ended = True
