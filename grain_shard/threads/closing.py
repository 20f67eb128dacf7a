"""`Closing`: closes an object once, whoever asks first, and loses no error of that."""

from __future__ import annotations

from collections.abc import Callable

from absl import logging


class Closing:
    """Closes an object once, and keeps the error until somebody raises or logs it.

    Args:
        close: Closes the object.
    """

    def __init__(self, close: Callable[[], None]):
        # Two lists, because `pop` is atomic: of two threads, one gets the value.
        self._to_do, self._errors = [close], list[BaseException]()
        self._nobody_raises = False  # True once errors are logged, because no caller will get them

    def close(self) -> None:
        """Closes the object, unless that was done. It raises nothing."""
        try:
            close = self._to_do.pop()
        except IndexError:  # another call has closed the object
            return
        try:
            close()
        except BaseException as error:
            self._errors.append(error)
            if self._nobody_raises:
                self.log_error()

    def raise_error(self) -> None:
        """Raises the error of closing, if there is one. An error that comes later is logged."""
        self._nobody_raises = True
        if self._errors:
            raise self._errors.pop()

    def log_error(self) -> None:
        """Logs the error of closing, now or when it happens, because no caller will get it."""
        self._nobody_raises = True
        if self._errors:
            log_unclosed(self._errors.pop())


def log_unclosed(error: BaseException) -> None:
    """Logs an error of closing that cannot be raised, because no caller would receive it."""
    logging.error("grain_shard: closing a part of the pipeline failed", exc_info=error)
