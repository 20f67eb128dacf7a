"""The files of a path, pattern or folder, and the error if there are none."""

from __future__ import annotations

import difflib
import glob
import os
from pathlib import Path

BUCKET = "gs://"  # the URLs that array_record itself can open

# A folder may hold other files, too, such as a description of the data set.
_NAMES_IN_A_FOLDER = ("*array_record*", "*arrayrecord*")
_NAMES_SHOWN = 5


def require_openable(path: str) -> None:
    """Refuses a URL of a kind that neither this package nor array_record can open.

    Raises:
        ValueError: The path is such a URL.
    """
    if "://" in path and not path.startswith(BUCKET):
        raise ValueError(
            f"{path!r}: of URLs, only those that begin with {BUCKET} can be opened.\n"
            "  remedy: give the path of a file; of a bucket, mount it and give the path below the"
            " mount's folder, or write a source of your own (docs/buckets.md)."
        )


def find_files(path: str) -> list[str]:
    """Returns the files of a path, sorted by name, and so in the same order on every host.

    Args:
        path: A file; a pattern (``*``, ``?``, ``[0-9]``, and ``**`` for any folders); or a folder,
            for the files directly in it with "array_record" or "arrayrecord" in their names. A URL
            is not looked up.

    Returns:
        At least one file. A path without a pattern is not checked: opening it fails if it is
        missing.

    Raises:
        FileNotFoundError: No file matches the pattern, or the folder has no such file.
        ValueError: The pattern is a URL.
    """
    if "://" in path:
        if glob.has_magic(path):
            raise ValueError(
                f"{path!r}: patterns are for files, and this is a URL.\n"
                "  remedy: mount the bucket and give the pattern below the mount's folder, or list"
                " the objects, with gcsfs for example, and give their URLs."
            )
        return [path]
    if os.path.isdir(path):
        patterns = [os.path.join(glob.escape(path), name) for name in _NAMES_IN_A_FOLDER]
    elif glob.has_magic(path) and not os.path.exists(path):
        patterns = [path]
    else:
        return [path]
    matches = {match for pattern in patterns for match in glob.iglob(pattern, recursive=True)}
    files = sorted(filter(os.path.isfile, matches))
    for other in sorted(matches.difference(files)):
        if not os.path.exists(other):  # a dangling link, e.g. to a bucket that is not mounted
            raise not_found(other)
    if not files:
        raise not_found(path)
    return files


def not_found(path: str) -> FileNotFoundError:
    """Returns the error for a path without files; its message lists the files that exist nearby."""
    if os.path.isdir(path):
        problem = f'no file in the folder {path!r} has "array_record" in its name'
        remedy = "give a pattern for the files that you mean, such as 'folder/train-*'."
    else:
        pattern = glob.has_magic(path)
        problem = f"no file matches {path!r}" if pattern else f"there is no file {path!r}"
        remedy = "correct the path; of a bucket, see whether it is mounted on this host."
        if os.path.islink(path):
            problem = f"{path!r} is a link that leads nowhere: to {os.readlink(path)!r}"
    folder, missing = Path(os.path.abspath(path)), ""
    while not folder.is_dir():
        folder, missing = folder.parent, folder.name
    names = sorted(os.listdir(folder))
    near = difflib.get_close_matches(missing, names, _NAMES_SHOWN)
    nearest_first = [*near, *(name for name in names if name not in near)]
    shown = ", ".join(nearest_first[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return FileNotFoundError(
        f"{problem}.\n  exists: {str(folder)!r}, which holds {shown or 'nothing'}"
        f" ({len(names)} in all)\n  remedy: {remedy}"
    )
