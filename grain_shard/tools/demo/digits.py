"""The demo's data: scikit-learn's 1,797 images of digits, as ArrayRecord files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from grain_shard.errors import GrainShardError
from grain_shard.tools.demo.checks import say
from grain_shard.trees import Batch

_FILES = {"train": 4, "test": 2}
# Number of test images, of 1,797. In training and test the last batch is short, so it is padded.
_TEST_IMAGES = 297


def digits_folder() -> Path:
    """Returns the path of the folder for the images, in the user's cache folder."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return cache / "grain_shard" / "digits"


def decode(record: bytes) -> Batch:
    """Returns a record as a dict: "image", float32[8, 8, 1] from 0 to 1, and "label", int32.

    A record has 65 bytes: 64 pixels from 0 to 16, and the digit that the image shows.
    """
    *pixels, label = np.frombuffer(record, np.uint8)
    image = np.array(pixels, np.float32).reshape(8, 8, 1) / 16
    return {"image": image, "label": np.int32(label)}


def write_digits(directory: Path) -> None:
    """Writes scikit-learn's digits as ArrayRecord files to a folder, unless it has them.

    The folder gets its name only when it has all files. So a run that is killed leaves no
    incomplete folder of this name.

    Raises:
        GrainShardError: The folder has other files, or cannot be written.
    """
    if any(directory.glob("train-*")):
        say(f"digits found in {directory}")
        return
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    records = [bytes([*digits.images[i].astype(int).flat, digits.target[i]]) for i in order]
    splits = {"test": records[:_TEST_IMAGES], "train": records[_TEST_IMAGES:]}
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="digits-", dir=directory.parent) as scratch:
            complete = Path(scratch, "digits")
            complete.mkdir()
            for split, files in _FILES.items():
                for file in range(files):
                    name = f"{split}-{file:05d}-of-{files:05d}.array_record"
                    writer = ArrayRecordWriter(str(complete / name), "group_size:1")
                    for record in splits[split][file::files]:
                        writer.write(record)
                    writer.close()
            complete.rename(directory)
    except OSError as error:
        if not any(directory.glob("train-*")):  # otherwise another process has written them
            raise GrainShardError(
                f"cannot write the digits to {directory}: {error}\n"
                "  remedy: set XDG_CACHE_HOME to a folder that can be written."
            ) from error
    say(f"digits written to {directory}")
