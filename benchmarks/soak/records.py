"""Draws random datasets of records, as they are before `.batch`, and builds them from literals."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grain
import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

import grain_shard

SOURCES = ("range", "batched", "array_record")
FILES = 3  # number of files of an ArrayRecord source
MOST_RECORDS = 300


@dataclasses.dataclass(frozen=True)
class Records:
    """A dataset of records as a literal: a source, and the transformations applied to it in order.

    Attributes:
        source: Kind of the source, one of `SOURCES`.
        num_records: Number of records of the source.
        steps: The transformations, each as a name of `STEPS` and its arguments.
        seed: Seed of the random numbers in each record.
    """

    source: str
    num_records: int
    steps: tuple[tuple[Any, ...], ...]
    seed: int


# The transformations. Each takes a dataset of integers, and returns another.


def window_shuffle(ds, size, seed):
    return grain.experimental.WindowShuffleMapDataset(ds, window_size=size, seed=seed)


def others(ds):
    """Returns a dataset of other integers, of the same length, to be mixed with `ds`."""
    return grain.MapDataset.range(10_000, 10_000 + len(ds)).shuffle(seed=9)


def mix(ds, weight, weight_of_others):
    return grain.MapDataset.mix([ds, others(ds)], [weight, weight_of_others])


def mix_by_record(ds, weight, at, weight_from_there):
    weights = {0: [weight, 1], at: [weight_from_there, 1]}
    return grain_shard.mix([ds, others(ds).repeat()], weights)


def zipped(ds, seed):
    pairs = grain.experimental.ZipMapDataset([ds, ds.shuffle(seed=seed)])
    return pairs.map(sum_of_pair)


def sum_of_pair(pair):
    return pair[0] + 7 * pair[1]


def plus_some(i, rng):
    return i + int(rng.integers(0, 1000))


STEPS: dict[str, Callable[..., grain.MapDataset]] = {
    "shuffle": lambda ds, seed: ds.shuffle(seed=seed),
    "seed and shuffle": lambda ds, seed: ds.seed(seed).shuffle(),
    "window shuffle": window_shuffle,
    "map": lambda ds, factor: ds.map(lambda i: i * factor + 1),
    "map with index": lambda ds: ds.map_with_index(lambda index, i: i + index),
    "random map": lambda ds, seed: ds.random_map(plus_some, seed=seed),
    "slice": lambda ds, start, stop, step: ds[start:stop:step],
    "repeat": lambda ds, times: ds.repeat(times),
    "mix": mix,
    "mix by record": mix_by_record,
    "zip": zipped,
    "concatenate": lambda ds: grain.MapDataset.concatenate([ds, others(ds)]),
}


def draw(rng: random.Random, at_least: int = 1) -> Records:
    records = Records(
        rng.choice(SOURCES), rng.randint(at_least, 90), steps=(), seed=rng.randint(0, 999)
    )
    for _ in range(rng.randint(0, 4)):
        more = dataclasses.replace(records, steps=(*records.steps, draw_step(rng)))
        if at_least <= len(build(more, range(more.num_records))) <= MOST_RECORDS:
            records = more
    return records


def draw_step(rng: random.Random) -> tuple[Any, ...]:
    arguments = {
        "shuffle": [rng.randint(0, 99)],
        "seed and shuffle": [rng.randint(0, 99)],
        "window shuffle": [rng.randint(1, 20), rng.randint(0, 99)],
        "map": [rng.randint(1, 5)],
        "random map": [rng.randint(0, 99)],
        "slice": [rng.randint(0, 5), rng.randint(6, 90), rng.randint(1, 3)],
        "repeat": [rng.randint(2, 3)],
        "mix": [rng.randint(1, 4), rng.randint(1, 4)],
        "mix by record": [rng.randint(1, 4), rng.randint(1, 30), rng.randint(1, 4)],
        "zip": [rng.randint(0, 99)],
    }
    name = rng.choice(list(STEPS))
    return (name, *arguments.get(name, []))


def build(records: Records, source: Any) -> grain.MapDataset:
    """Returns the dataset of records, built from an opened source.

    All transformations work on integers. The last map makes each integer a record for training.
    """
    ds = grain.MapDataset.source(source).map(to_integer)
    for name, *arguments in records.steps:
        ds = STEPS[name](ds, *arguments)
    return ds.random_map(to_record, seed=records.seed)


def to_integer(element: Any) -> int:
    return int.from_bytes(element, "little") if isinstance(element, bytes) else int(element)


def to_record(i: int, rng: np.random.Generator) -> dict[str, Any]:
    return {
        "id": np.int32(i),
        "tokens": np.arange(8) + i,
        "image": {"pixels": np.full((2, 3), i % 251, np.uint8)},
        "noise": rng.normal(size=4),
        "name": f"record {i}",
    }


class BatchedSource:
    """A source of integers that can read many in one call."""

    def __init__(self, num_records: int):
        self._num_records = num_records

    def __len__(self) -> int:
        return self._num_records

    def __getitem__(self, index: int) -> int:
        return int(index)

    def _getitems(self, indices: Any) -> list[int]:
        return [int(index) for index in indices]

    def __repr__(self) -> str:
        return f"BatchedSource({self._num_records})"


def open_source(records: Records, folder: Path) -> Any:
    """Returns the source of the records. Its files are written if they do not exist."""
    if records.source == "array_record":
        return grain_shard.ArrayRecordSource(write_files(folder, records.num_records))
    return {"range": range, "batched": BatchedSource}[records.source](records.num_records)


def write_files(folder: Path, num_records: int) -> list[str]:
    paths = [folder / f"{num_records}-records-{number}" for number in range(FILES)]
    for number, path in enumerate(paths):
        if not path.exists():
            being_written = path.with_suffix(f".{os.getpid()}")
            writer = ArrayRecordWriter(str(being_written), "group_size:1")
            for i in range(num_records)[
                number * num_records // FILES : (number + 1) * num_records // FILES
            ]:
                writer.write(i.to_bytes(4, "little"))
            writer.close()
            being_written.rename(path)
    return [str(path) for path in paths]
