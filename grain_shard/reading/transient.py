"""Recognizes transient errors of a source, after which a second try may succeed."""

from __future__ import annotations

import errno
import gzip
import http.client
from typing import Any

# Errors that a second try would raise again. Most of them are subclasses of OSError.
_LASTING = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    gzip.BadGzipFile,
    ValueError,  # the OSErrors for a wrong address or certificate are ValueErrors, too
)
_LASTING_NUMBERS = (
    errno.EDQUOT,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENODEV,
    errno.ENOSPC,
    errno.EROFS,
)
# HTTP statuses of a request that came too late or too early, and of too many requests.
_BUSY = 408, 425, 429


def is_transient(error: Exception) -> bool:
    """Returns whether a second try may succeed after a source raised this error.

    It may succeed after an `OSError`, which includes `TimeoutError`, unless a file does not exist
    or may not be read, or a disk is full. It may also succeed after the answer of a busy or failed
    server (as in `google.api_core`), after an HTTP answer that breaks off, and after an error that
    `google.auth` marks as retryable.

    Example:
        >>> [is_transient(e) for e in (ConnectionResetError(), FileNotFoundError(), ValueError())]
        [True, False, False]
    """
    status = _http_status(error)
    if status is not None:
        return status in _BUSY or status >= 500
    if isinstance(error, OSError):
        causes = error, getattr(error, "reason", None)  # urllib's error has its cause as `reason`
        is_lasting = any(isinstance(cause, _LASTING) for cause in causes)
        return not is_lasting and error.errno not in _LASTING_NUMBERS
    return isinstance(error, http.client.IncompleteRead) or getattr(error, "retryable", 0) is True


def _http_status(error: Any) -> int | None:
    """Returns the HTTP status of an error; None if it has none.

    The status is ``code`` in google.api_core and urllib, and ``response.status_code`` in requests.
    """
    response = getattr(error, "response", None)
    for status in getattr(error, "code", None), getattr(response, "status_code", None):
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None
