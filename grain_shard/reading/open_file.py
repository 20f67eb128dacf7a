"""Opens ArrayRecord files, and explains why a file cannot be opened."""

from __future__ import annotations

import os
import re

from absl import logging
from array_record.python.array_record_module import ArrayRecordReader

from grain_shard.reading.find_files import BUCKET, not_found


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
        text = f"{path}: a read of a record decodes group_size:{size[1]}. Write group_size:1."
        logging.log_first_n(logging.WARNING, text, 1)
    return reader


def _refusal(path: str, reader: ArrayRecordReader) -> Exception:
    """Returns the error for a file whose reader reports a problem."""
    remedy = (
        "write it anew, or leave it out; read files of other kinds, such as Parquet, in order by"
        " grain_shard.feeds (docs/data.md)."
    )
    if path.startswith(BUCKET):
        remedy = (
            "see whether this host reaches the bucket, and may read the object (gcloud storage ls);"
            " or mount the bucket and give the path below the mount's folder."
        )
    elif not os.path.exists(path):
        return not_found(path)
    why = "is it complete?"
    try:
        reader.close()
    except RuntimeError as error:
        why = str(error) or why
    return RuntimeError(
        f"{path!r} cannot be read as an ArrayRecord file: {why}\n  remedy: {remedy}"
    )
