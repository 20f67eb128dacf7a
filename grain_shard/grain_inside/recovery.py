"""What may take the place of an element that cannot be had; who decides is above."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Unreadable:
    """Stands in the place of an element that cannot be had.

    Attributes:
        error: Why not.
    """

    def __init__(self, error: Exception):
        self.error = error


class Recovery:
    """What becomes of elements that cannot be had. This one raises what was raised.

    Attributes:
        leaves_out: Whether an `Unreadable` may take the place of an element.
    """

    leaves_out = False

    def asks_at_once(self, error: Exception) -> bool:
        """Whether to ask again, in parts, where nobody knows which element has failed."""
        return False

    def of_source(self, error: Exception, again: Callable[[], Any]) -> Any:
        """What to take for an element that could not be read.

        Args:
            error: Why not.
            again: Reads it once more.

        Returns:
            The element, or an `Unreadable` if these may be left out.
        """
        raise error

    def of_function(self, error: Exception, again: Callable[[], Any]) -> Any:
        """The same, of an element for which a function of the user's has failed.

        Args:
            error: Why.
            again: Reads it once more, and makes of it what the functions do.
        """
        raise error


RAISES = Recovery()
