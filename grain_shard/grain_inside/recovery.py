"""The result of a read that has failed, and the rules for trying it again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unreadable:
    """Stands in the place of an element that could not be read. Its consumer decides what follows.

    Attributes:
        error: The error of the last try.
        among: The number of elements, from this one on, one of which has failed. It is 1, unless a
            source failed in a call for many and then gave each of them alone.
    """

    def __init__(self, error: Exception, among: int = 1):
        self.error, self.among = error, among


class Recovery:
    """The rules for reads that fail. These try nothing again.

    Attributes:
        masks: Whether reading goes on after an element that is `Unreadable`.
    """

    masks = False

    def reads_again(self, error: Exception) -> bool:
        """Returns whether to read again at once, in parts or step by step, after this error."""
        return False

    def recovered(
        self, error: Exception, again: Callable[[], Any], *, in_function: bool = False
    ) -> Any:
        """Tries a failed read again, if that may help.

        Args:
            error: The error of the first try.
            again: Reads the element once more, and applies the user's functions if it is one of
                them that has failed.
            in_function: Whether a function of the user's has failed, and not the source.

        Returns:
            The element; or an `Unreadable`.
        """
        return Unreadable(error)


AT_ONCE = Recovery()
