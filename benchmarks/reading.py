"""P1, P2, P3, P8, P14: the speed of reading shuffled 3 KB ArrayRecords for eight devices."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any

import grain
import jax

import grain_shard
from benchmarks import peers
from benchmarks.data import decode_record, record_files
from benchmarks.measure import Comparison, Goal, Group, Round, Run, interleave

RECORDS, GLOBAL_BATCH_SIZE = 16_384, 256
Pipeline = Callable[[Sequence[str], peers.Decode, int], Iterator[Any]]
WHAT = "3 KB ArrayRecords to 8 devices, shuffled, decoded, batches of 256"


def ours(
    paths: Sequence[str], decode: peers.Decode, size: int, mask_key: str | None = "valid_mask"
) -> Iterator[Any]:
    ds = (
        grain.MapDataset.source(grain_shard.ArrayRecordSource(paths))
        .seed(peers.SEED)
        .shuffle()
        .map(decode)
        .batch(size)
        .shard_to(peers.data_mesh(), mask_key=mask_key)
    )
    with iter(ds) as batches:
        yield from batches


PIPELINES: dict[str, Pipeline] = {
    "grain_shard": ours,
    "without a mask": functools.partial(ours, mask_key=None),
    "Grain's guide": peers.guide,
    "Grain tuned": peers.tuned,
    "by hand": peers.by_hand,
    "datarax": peers.datarax,
    "flax": peers.flax_prefetch,
}


def records_per_second(pipeline: Pipeline, paths: Sequence[str]) -> float:
    """Returns the records per second of an epoch.

    The time is from the start of building the pipeline until the last batch is on the devices.
    """
    start, ready = time.perf_counter(), []
    for batch in pipeline(paths, decode_record, GLOBAL_BATCH_SIZE):
        jax.block_until_ready(batch)
        ready.append(time.perf_counter())
    assert len(ready) == RECORDS // GLOBAL_BATCH_SIZE, len(ready)
    return RECORDS / (ready[-1] - start)


def ms_to_first_batch(pipeline: Pipeline, paths: Sequence[str]) -> float:
    """Returns the milliseconds from the start of building the pipeline to its first batch.

    The first batch counts when it is on the devices.
    """
    start = time.perf_counter()
    with closing(pipeline(paths, decode_record, GLOBAL_BATCH_SIZE)) as batches:  # pyright: ignore
        jax.block_until_ready(next(batches))
        return (time.perf_counter() - start) * 1e3


def measure_epochs(run: Run) -> Iterable[Round]:
    paths = record_files(run.folder, RECORDS)
    sides = {
        name: lambda pipeline=pipeline: records_per_second(pipeline, paths)
        for name, pipeline in PIPELINES.items()
    }
    return interleave(sides, run.rounds(quick=3, full=9))


def measure_starts(run: Run) -> Iterable[Round]:
    paths = record_files(run.folder, RECORDS)
    sides = {
        name: lambda pipeline=PIPELINES[name]: ms_to_first_batch(pipeline, paths)
        for name in ("grain_shard", "Grain's guide", "Grain tuned")
    }
    return interleave(sides, run.rounds(quick=5, full=15))


def _reading(number: str, against: str, theirs: str, goal: Goal | None) -> Comparison:
    return Comparison(
        number,
        what="",
        against=against,
        unit="records/s",
        ours="grain_shard",
        theirs=theirs,
        compared="ours / theirs",
        goal=goal,
    )


def _first_batch(number: str, against: str, theirs: str, goal: Goal | None) -> Comparison:
    return Comparison(
        number,
        what="",
        against=against,
        unit="ms",
        ours="grain_shard",
        theirs=theirs,
        compared="ours / theirs",
        goal=goal,
    )


GROUPS = [
    Group(
        "reading",
        WHAT,
        measure_epochs,
        [
            _reading("P1", "Grain's guide, option C", "Grain's guide", Goal("at least", 5)),
            _reading("P2", "Grain, 2 threads, 4 batches", "Grain tuned", Goal("at least", 2.5)),
            _reading("P3", "written by hand for just this", "by hand", Goal("at least", 0.85)),
            Comparison(
                "P8",
                what="with a mask",
                against="without a mask",
                unit="records/s",
                ours="grain_shard",
                theirs="without a mask",
                compared="theirs / ours",
                goal=Goal("at most", 1.01),
            ),
            _reading("", "datarax", "datarax", None),
            _reading("", "Flax's prefetch_to_device", "flax", None),
        ],
    ),
    Group(
        "first_batch",
        "Time to the first batch of 3 KB ArrayRecords",
        measure_starts,
        [
            _first_batch("P14", "Grain's guide, option C", "Grain's guide", Goal("at most", 0.5)),
            _first_batch("", "Grain, 2 threads, 4 batches", "Grain tuned", None),
        ],
    ),
]
