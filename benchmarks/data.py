"""Writes the files that the benchmarks read: ArrayRecords of 3 KB, and photographs as JPEGs."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.measure import Skip

IMAGE_SIZE = 224
RECORD_SHAPE = (32, 32, 3)
FILES = 4


def record_files(folder: Path, records: int, files: int = FILES) -> list[str]:
    """Writes ArrayRecord files of random records of 3072 bytes, and returns their paths."""
    random = np.random.default_rng(0)
    size = int(np.prod(RECORD_SHAPE))
    per_file = records // files
    return [
        _write(
            folder / f"records-{records}-{number}.array_record",
            (random.integers(0, 256, size, np.uint8).tobytes() for _ in range(per_file)),
        )
        for number in range(files)
    ]


def decode_record(record: bytes) -> dict[str, np.ndarray]:
    """Returns a record as ``{"image": uint8[32, 32, 3]}``."""
    return {"image": np.frombuffer(record, np.uint8).reshape(RECORD_SHAPE)}


def photograph_files(folder: Path, images: int) -> list[str]:
    """Writes ArrayRecord files of 224x224 JPEGs, and returns their paths.

    Each image is a random square of one of two photographs.
    """
    random = np.random.default_rng(0)
    photographs = _photographs()
    per_file = images // FILES
    return [
        _write(
            folder / f"photographs-{images}-{number}.array_record",
            (_jpeg(_piece(photographs[i % 2], random)) for i in range(per_file)),
        )
        for number in range(FILES)
    ]


def decode_photograph(record: bytes) -> dict[str, np.ndarray]:
    """Decodes a JPEG to ``{"image": uint8[224, 224, 3]}``."""
    from PIL import Image

    with Image.open(io.BytesIO(record)) as image:
        return {"image": np.asarray(image.convert("RGB"))}


def _photographs() -> list[Any]:
    try:
        from PIL import Image
        from sklearn.datasets import load_sample_images
    except ImportError as error:
        raise Skip(f"{error.name} is not installed") from None
    return [Image.fromarray(photograph) for photograph in load_sample_images().images]


def _piece(photograph: Any, random: np.random.Generator) -> Any:
    """Returns a random square of a photograph, at least 224 pixels wide, scaled down to 224x224."""
    size = int(random.integers(IMAGE_SIZE, min(photograph.size) + 1))
    left, top = (int(random.integers(0, length - size + 1)) for length in photograph.size)
    box = (left, top, left + size, top + size)
    return photograph.resize((IMAGE_SIZE, IMAGE_SIZE), box=box)


def _jpeg(image: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def _write(path: Path, records: Any) -> str:
    from array_record.python.array_record_module import ArrayRecordWriter

    if not path.exists():
        writer = ArrayRecordWriter(str(path), "group_size:1")
        for record in records:
            writer.write(record)
        writer.close()
    return str(path)
