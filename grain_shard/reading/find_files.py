"""The files of a path, pattern or folder, and the error if there are none."""

from __future__ import annotations

import glob
import os
from pathlib import Path

BUCKET = "gs://"  # the URLs that array_record itself can open

# A folder may hold other files, too, such as a description of the data set.
_NAMES_IN_A_FOLDER = ("*array_record*", "*arrayrecord*")
_NAMES_SHOWN = 5


def find_files(path: str) -> list[str]:
    """Returns the files of a path, sorted by name, and so in the same order on every host.

    Args:
        path: A file; a pattern (``*``, ``?``, ``[0-9]``, and ``**`` for any folders); or a folder,
            for the files directly in it with "array_record" or "arrayrecord" in their names. A URL
            is not looked up.

    Returns:
        At least one file. Opening it fails if it is a path that does not exist, or a link that
        leads nowhere.

    Raises:
        FileNotFoundError: No file matches the pattern, or the folder has no such file.
    """
    patterns = [path]
    if os.path.isdir(path):
        patterns = [os.path.join(glob.escape(path), name) for name in _NAMES_IN_A_FOLDER]
    elif "://" in path or os.path.exists(path) or not glob.has_magic(path):
        return [path]
    matches = {match for pattern in patterns for match in glob.iglob(pattern, recursive=True)}
    files = sorted(match for match in matches if not os.path.isdir(match))
    if not files:
        raise not_found(path)
    return files


def not_found(path: str) -> FileNotFoundError:
    """Returns the error for a path without files; its message lists the files that exist nearby."""
    problem = f"no file matches {path!r}" if glob.has_magic(path) else f"there is no file {path!r}"
    remedy = "correct the path; of a bucket, see whether it is mounted on this host."
    if os.path.isdir(path):
        problem = f'no file in the folder {path!r} has "array_record" in its name'
        remedy = "give a pattern for the files that you mean, such as 'folder/train-*'."
    elif os.path.islink(path):
        problem = f"{path!r} is a link that leads nowhere: to {os.readlink(path)!r}"
    folder = Path(os.path.abspath(path))
    while not folder.is_dir():
        folder = folder.parent
    names = sorted(os.listdir(folder))
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return FileNotFoundError(
        f"{problem}.\n  exists: {str(folder)!r}, which holds {shown or 'nothing'}"
        f" ({len(names)} in all)\n  remedy: {remedy}"
    )
