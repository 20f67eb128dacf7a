"""`Parcel`: bytes for new processes, which cannot block the process that starts them."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path

# The most bytes that are sent through the pipe of a new process, in which Linux keeps 64 KiB.
_MOST_IN_PIPE = 2**14


class Parcel:
    """Bytes that are pickled for several new processes: as they are, or as a file if they are many.

    Python writes the pickle of a new process into a pipe. If the process ends before it has read
    the pipe, as when the import of the main script fails, Python waits for ever to write the rest.
    Few bytes fit into the pipe without a reader.

    Args:
        content: The bytes.
    """

    def __init__(self, content: bytes):
        self._content, self._path = content, ""
        if len(content) > _MOST_IN_PIPE:
            file, self._path = tempfile.mkstemp(prefix="grain_shard-")
            self._content = b""
            with open(file, "wb") as opened:
                opened.write(content)

    def open(self) -> bytes:
        """Returns the bytes, in any process of this machine."""
        return Path(self._path).read_bytes() if self._path else self._content

    def remove(self) -> None:
        """Removes the file, if there is one. A second call does nothing."""
        if self._path:
            with contextlib.suppress(FileNotFoundError):
                os.remove(self._path)
