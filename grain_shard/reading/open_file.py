"""Opens an ArrayRecord file; or raises an error that says what the file is and what to do."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import Future

from absl import logging
from array_record.python.array_record_module import ArrayRecordReader

from grain_shard.reading.find_files import BUCKET, not_found

# A bucket's object that is not open after this time is logged as late. Further ones are logged at
# this interval, because there may be thousands of them.
_LATE_S, _AGAIN_S = 10.0, 60.0
_PARQUET = b"PAR1"  # the first bytes of a Parquet file


def open_file(options: str, path: str) -> ArrayRecordReader:
    """Returns the reader of a file, or of a bucket's object by its ``gs://`` URL.

    Args:
        options: Options of the reader, e.g. ``"readahead_buffer_size:0"``.
        path: The file.

    Raises:
        FileNotFoundError: The file does not exist.
        RuntimeError: The file cannot be opened, or is not an ArrayRecord file.
    """
    reader = _object(options, path) if path.startswith(BUCKET) else _file(options, path)
    if not reader.ok():
        raise _refusal(path, reader)
    size = re.search(r"group_size:(\d+)", reader.writer_options_string())
    if size and size[1] != "1":
        logging.log_first_n(
            logging.WARNING,
            "%s was written with group_size:%s, so that to read one record decodes so many. Write"
            " the files with group_size:1.",
            1,
            path,
            size[1],
        )
    return reader


def _file(options: str, path: str) -> ArrayRecordReader:
    return ArrayRecordReader(path, options=options, file_reader_buffer_size=32768)


def _object(options: str, path: str) -> ArrayRecordReader:
    """Returns the reader of a bucket's object; logs a warning while the bucket does not answer.

    Without a network or credentials, array_record tries for a quarter of an hour without a message,
    and blocks Ctrl-C in its caller. So a separate thread calls it, and the caller may stop waiting.
    """
    opened = Future[ArrayRecordReader]()

    def run() -> None:
        try:
            opened.set_result(_file(options, path))
        except BaseException as error:
            opened.set_exception(error)

    thread = threading.Thread(target=run, name="grain-shard-open", daemon=True)
    thread.start()
    while True:
        thread.join(_LATE_S)
        if not thread.is_alive():
            return opened.result()
        if not threading.main_thread().is_alive():  # the program's exit waits for this thread
            raise RuntimeError(f"{path!r} was not open yet when the program ended")
        logging.log_every_n_seconds(
            logging.WARNING,
            "%s is not open yet, after %.0f s or more. It is tried for a quarter of an hour before"
            " that is an error: see whether this host reaches storage.googleapis.com and has"
            " credentials for the bucket, or mount it and give the path below the mount's folder.",
            _AGAIN_S,
            path,
            _LATE_S,
        )


def _refusal(path: str, reader: ArrayRecordReader) -> Exception:
    """Returns the error for a file whose reader reports a problem."""
    remedy = "write it anew, or leave it out."
    if path.startswith(BUCKET):
        remedy = (
            "see whether this host reaches the bucket, and may read the object (gcloud storage ls);"
            " or mount the bucket and give the path below the mount's folder."
        )
    elif not os.path.exists(path):
        return not_found(path)
    elif _begins_with(_PARQUET, path):
        return RuntimeError(
            f"{path!r} is a Parquet file, and no ArrayRecord file.\n"
            "  remedy: read it in order, by grain.experimental.ParquetIterDataset in"
            " grain_shard.feeds (docs/data.md), or write its rows to ArrayRecord files."
        )
    why = "is it complete?"
    try:
        reader.close()
    except RuntimeError as error:
        why = str(error) or why
    return RuntimeError(
        f"{path!r} cannot be read as an ArrayRecord file: {why}\n  remedy: {remedy}"
    )


def _begins_with(magic: bytes, path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(magic)) == magic
    except OSError:
        return False  # e.g. a folder: the reader's own error explains it
