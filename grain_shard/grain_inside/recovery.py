"""`Unreadable`, the result of a failed read, and `Recovery`, the rules for trying again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unreadable:
    """Stands for an element that could not be read. The consumer decides what to do.

    Attributes:
        error: The error of the last try.
        among: Number of elements, from this one on, one of which failed. It is more than 1 if a
            call for several elements failed, but each of them could then be read alone.
    """

    def __init__(self, error: BaseException, among: int = 1):
        self.error: BaseException = error
        self.among: int = among


class Recovery:
    """The rules for failed reads. This base class never tries again.

    Attributes:
        masks: True if reading continues after an element that could not be read.
    """

    masks = False

    def may_repair(self, error: Exception) -> bool:
        """Returns whether smaller calls may repair a failed call for several elements.

        If this returns False, the error counts even if smaller calls read all elements.
        """
        return False

    def recovered(
        self, error: Exception, again: Callable[[], Any], *, in_function: bool = False
    ) -> Any:
        """Tries a failed read again, if a further try may help.

        Args:
            error: The error of the first try.
            again: Makes the element once more: reads it and, if `in_function`, applies the user's
                functions.
            in_function: True if a function of the user failed, and not the source.

        Returns:
            The element, or an `Unreadable`.
        """
        return Unreadable(error)


AT_ONCE = Recovery()
