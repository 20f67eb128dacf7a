"""Finds and opens ArrayRecord files. Errors say why a file is missing or cannot be opened."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from absl import logging
from array_record.python.array_record_module import ArrayRecordReader

BUCKET = "gs://"  # the start of the URLs that array_record itself can open

# Patterns for the records' files in a folder, which may also hold a description of the data set.
_NAMES_IN_A_FOLDER = ("*array_record*", "*arrayrecord*")
_NAMES_SHOWN = 5


def find_files(path: str) -> list[str]:
    """Returns the files of a path, sorted by name, so that every host has the same order.

    Args:
        path: A file; a pattern (``*``, ``?``, ``[0-9]``, and ``**`` for any folders); or a folder,
            for the files directly in it with "array_record" or "arrayrecord" in their names. A URL
            is returned as it is.

    Returns:
        At least one path. A path without a pattern is returned even if there is no such file.
        Opening it then fails.

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
        raise _not_found(path)
    return files


def _not_found(path: str) -> FileNotFoundError:
    """Returns the error for a path without files. Its message lists some files nearby."""
    problem = f"no file matches {path!r}" if glob.has_magic(path) else f"there is no file {path!r}"
    remedy = "correct the path. If it is in a bucket, check that this host has the bucket mounted."
    if os.path.isdir(path):
        problem = f'no file in the folder {path!r} has "array_record" in its name'
        remedy = "pass a pattern that matches the files, such as 'folder/train-*'."
    elif os.path.islink(path):
        problem = f"{path!r} is a link to {os.readlink(path)!r}, which does not exist"
    folder = Path(os.path.abspath(path))
    while not folder.is_dir():  # up to the nearest folder that exists
        folder = folder.parent
    names = sorted(os.listdir(folder))
    shown = ", ".join(names[:_NAMES_SHOWN]) + (", ..." if len(names) > _NAMES_SHOWN else "")
    return FileNotFoundError(
        f"{problem}.\n  exists: {str(folder)!r}, which holds {shown or 'nothing'}"
        f" (files and folders: {len(names)})\n  remedy: {remedy}"
    )


def open_file(options: str, path: str) -> ArrayRecordReader:
    """Returns the reader of a file, or of a bucket's object by its ``gs://`` URL.

    Args:
        options: Options of the reader, e.g. ``"readahead_buffer_size:0"``.
        path: The file.

    Raises:
        FileNotFoundError: The file does not exist.
        RuntimeError: The file cannot be opened, or is not an ArrayRecord file.
    """
    reader = ArrayRecordReader(path, options=options, file_reader_buffer_size=32768)
    if not reader.ok():
        raise _refusal(path, reader)
    size = re.search(r"group_size:(\d+)", reader.writer_options_string())
    if size and size[1] != "1":
        text = f"{path}: each read of one record decodes {size[1]} records (group_size:{size[1]})."
        text += " To read faster, write the file again with group_size:1."
        logging.log_first_n(logging.WARNING, text, 1)
    return reader


def _refusal(path: str, reader: ArrayRecordReader) -> Exception:
    """Returns the error for a file that array_record could not open."""
    remedy = (
        "close the writer of the file, or write the file again, or leave it out. Read other files,"
        " such as Parquet, with grain_shard.feeds (docs/data.md)."
    )
    if path.startswith(BUCKET):
        remedy = (
            "check that this host can reach the bucket and read the object (gcloud storage ls). Or"
            " mount the bucket and give the path below the mount's folder."
        )
    elif not os.path.exists(path):
        return _not_found(path)
    why = "the file may be incomplete"  # unless closing the reader raises the cause
    try:
        reader.close()
    except RuntimeError as error:
        why = str(error) or why
    return RuntimeError(
        f"{path!r} cannot be read as an ArrayRecord file: {why}\n  remedy: {remedy}"
    )
