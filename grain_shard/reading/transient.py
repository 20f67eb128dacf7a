"""The errors of a source after which a second try may succeed."""

from __future__ import annotations

import errno
import gzip
import http.client
from typing import Any

# These will be the same the next time.
_LASTING = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    gzip.BadGzipFile,
    ValueError,  # an OSError of this class, too, was asked for a wrong address or certificate
)
_LASTING_NUMBERS = (
    errno.EDQUOT,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENODEV,
    errno.ENOSPC,
    errno.EROFS,
)
# HTTP statuses: the request came too late or too early, or there were too many.
_BUSY = 408, 425, 429


def is_transient(error: Exception) -> bool:
    """Returns whether another try may succeed where a source has raised this.

    It may after an `OSError`, and so after a `TimeoutError`, but for those of files that do not
    exist or may not be read, and of a full disk; after an answer of a server that is busy or has
    failed, as `google.api_core` raises it; and where `google.auth` says so.

    Example:
        >>> [is_transient(e) for e in (ConnectionResetError(), FileNotFoundError(), ValueError())]
        [True, False, False]
    """
    status = _http_status(error)
    if status is not None:
        return status in _BUSY or status >= 500
    if isinstance(error, OSError):
        causes = error, getattr(error, "reason", None)  # urllib wraps another error
        is_lasting = any(isinstance(cause, _LASTING) for cause in causes)
        return not is_lasting and error.errno not in _LASTING_NUMBERS
    return isinstance(error, http.client.IncompleteRead) or getattr(error, "retryable", 0) is True


def _http_status(error: Any) -> int | None:
    """The answer of a server: ``code`` of google.api_core and urllib, ``response`` of requests."""
    response = getattr(error, "response", None)
    for status in getattr(error, "code", None), getattr(response, "status_code", None):
        if isinstance(status, int) and 100 <= status < 600:
            return status
    return None
