"""The errors of a source that may pass, so that a second try may succeed."""

from __future__ import annotations

import errno
import gzip
import http.client
from typing import Any

# Errors that will be the same at the next try.
_LASTING = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    gzip.BadGzipFile,
    ValueError,  # some OSErrors are ValueErrors, too: a wrong address or certificate
)
_LASTING_NUMBERS = (
    errno.EDQUOT,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENODEV,
    errno.ENOSPC,
    errno.EROFS,
)
# HTTP statuses for a request that came too late or too early, or for too many requests.
_BUSY = 408, 425, 429


def is_transient(error: Exception) -> bool:
    """Returns whether a second try may succeed after a source raised this error.

    True for an `OSError`, and so for a `TimeoutError`, except for files that do not exist or may
    not be read, and for a full disk; for the answer of a busy or failed server, as
    `google.api_core` raises it; and for errors that `google.auth` marks as retryable.

    Example:
        >>> [is_transient(e) for e in (ConnectionResetError(), FileNotFoundError(), ValueError())]
        [True, False, False]
    """
    status = _http_status(error)
    if status is not None:
        return status in _BUSY or status >= 500
    if isinstance(error, OSError):
        causes = error, getattr(error, "reason", None)  # urllib's error wraps another one
        is_lasting = any(isinstance(cause, _LASTING) for cause in causes)
        return not is_lasting and error.errno not in _LASTING_NUMBERS
    return isinstance(error, http.client.IncompleteRead) or getattr(error, "retryable", 0) is True


def _http_status(error: Any) -> int | None:
    """Returns the HTTP status: ``code`` in google.api_core and urllib, ``response`` in requests."""
    response = getattr(error, "response", None)
    for status in getattr(error, "code", None), getattr(response, "status_code", None):
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None
