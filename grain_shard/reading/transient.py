"""Which errors of a source a second try may heal.

The libraries that read from buckets each say so in their own way. None of them is imported here:
what an error is, it says by its attributes, by the names of its classes, or in its text.
"""

from __future__ import annotations

import errno
import gzip
import http.client
import os
import re
import ssl
from collections.abc import Iterator
from typing import Any

# These will be the same the next time.
_LASTING = (
    FileExistsError,
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
    gzip.BadGzipFile,
    ValueError,  # an OSError that is this, too, was asked for what there is not: an address, say
)
_LASTING_NUMBERS = {
    errno.EDQUOT,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENODEV,
    errno.ENOSPC,
    errno.EROFS,
}
_LASTING_NAMES = {"PIL.UnidentifiedImageError"}
# What goes wrong on the way is one of these; the answer of a server is judged by its status.
_TRANSIENT = (OSError, http.client.BadStatusLine, http.client.IncompleteRead)
# Of libraries whose errors are no OSErrors, by the full name of a class or of one above it.
_TRANSIENT_NAMES = {
    "aiohttp.client_exceptions.ClientConnectionError",
    "aiohttp.client_exceptions.ClientPayloadError",
    "botocore.exceptions.ConnectionError",
    "botocore.exceptions.HTTPClientError",
    "google.auth.exceptions.TransportError",
    "httpcore.NetworkError",
    "httpx.TransportError",
    "tensorflow.python.framework.errors_impl.AbortedError",
    "tensorflow.python.framework.errors_impl.DeadlineExceededError",
    "tensorflow.python.framework.errors_impl.ResourceExhaustedError",
    "tensorflow.python.framework.errors_impl.UnavailableError",
    "urllib3.exceptions.MaxRetryError",
    "urllib3.exceptions.ProtocolError",
    "urllib3.exceptions.TimeoutError",
}
# Of HTTP: the request came too late or too early, there were too many, or the server has failed.
_TRANSIENT_STATUS = {408, 425, 429, *range(500, 600)} - {501, 505}
# C++ libraries, as array_record and tensorstore, raise these two with the status in the text, or
# with what the system said of a read.
_TEXTUAL = (RuntimeError, ValueError)
_CODES = "UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ABORTED"
_SYSTEM_ERRORS = "|".join(
    re.escape(os.strerror(number))
    for number in (
        errno.EIO,
        errno.EAGAIN,
        errno.ETIMEDOUT,
        errno.ESTALE,
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETRESET,
        errno.ENETUNREACH,
        errno.ENOTCONN,
    )
)
_TRANSIENT_TEXT = re.compile(rf"\b({_CODES})\b|{_SYSTEM_ERRORS}")


def is_transient(error: Exception) -> bool:
    """Whether what a source has raised may be gone the next time that it is asked.

    So are `OSError`, and `TimeoutError` with it, but for those that say that there is no such file,
    none that may be read, or no room on the disk; what HTTP servers answer when they are busy; and
    what libraries of buckets call so.

    Example:
        >>> [is_transient(e) for e in (ConnectionResetError(), FileNotFoundError(), ValueError())]
        [True, False, False]
        >>> is_transient(ValueError("UNAVAILABLE: Error reading 'gs://bucket/object'"))
        True
    """
    if any(isinstance(cause, ssl.SSLCertVerificationError) for cause in _and_causes(error)):
        return False
    names = {f"{c.__module__}.{c.__qualname__}" for c in type(error).__mro__}
    if names & _LASTING_NAMES:
        return False
    if isinstance(error, OSError) and (
        isinstance(error, _LASTING) or error.errno in _LASTING_NUMBERS
    ):
        return False
    if (status := _http_status(error)) is not None:
        return status in _TRANSIENT_STATUS
    if getattr(error, "retryable", None) is True:  # google.auth
        return True
    if isinstance(error, _TRANSIENT) or names & _TRANSIENT_NAMES:
        return True
    return type(error) in _TEXTUAL and _TRANSIENT_TEXT.search(str(error)) is not None


def _and_causes(error: BaseException) -> Iterator[BaseException]:
    """An error, and what urllib, urllib3 and requests have wrapped up in it."""
    cause: Any = error
    for _ in range(5):
        if not isinstance(cause, BaseException):
            return
        yield cause
        cause = getattr(cause, "reason", None) or (cause.args[0] if cause.args else None)


def _http_status(error: Any) -> int | None:
    """What the server answered, if the error says so.

    ``code`` is of urllib and google.api_core, ``status`` of aiohttp, ``response`` of requests,
    httpx, huggingface_hub and botocore.
    """
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        metadata = response.get("ResponseMetadata")
        found = [metadata.get("HTTPStatusCode")] if isinstance(metadata, dict) else []
    else:
        found = [getattr(response, "status_code", None)]
    found += [getattr(error, "code", None), getattr(error, "status", None)]
    for status in found:
        if isinstance(status, int) and 100 <= status < 600:
            return int(status)
    return None
